"""An outage in the log: one warning when it begins, one now and then while it goes on, one line when it is over."""

import logging

from grelmicro.leases.unsent import why_unsent


def reason_of(error: BaseException) -> str:
    """What an error of a request to the store says, for texts."""
    error = why_unsent(error) or error
    silent = isinstance(error, TimeoutError) and not str(error)
    return "no answer in time: check the store" if silent else str(error) or type(error).__name__


class Outage:
    """The trouble of one thing with its store.

    Args:
        title: whose trouble, for the log.
        logger: where it is told.
    """

    def __init__(self, title: str, logger: logging.Logger) -> None:
        self._title = title
        self._logger = logger
        self._since: float | None = None
        self._told_at = 0.0

    def note(self, error: BaseException, now: float, interval: float) -> None:
        """Something failed at `now`; told if it is the first time, or `interval` seconds after it was last told."""
        if self._since is None:
            self._since = now
        elif now - self._told_at < interval:
            return
        self._told_at = now
        self._logger.warning("%s has trouble since %.1f s: %s", self._title, now - self._since, reason_of(error))

    def over(self, now: float) -> None:
        """Something worked at `now`."""
        if self._since is not None:
            self._logger.warning("%s works again after %.1f s", self._title, now - self._since)
            self._since = None
