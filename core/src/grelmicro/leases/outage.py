"""An outage in the log: one warning when it begins and one when it is over, however many users of a store notice it."""

import logging
from math import inf

from grelmicro.events import emit
from grelmicro.leases.unsent import why_unsent

STALE_AFTER_S = 60.0
"""Seconds after which a user that noticed the outage, and was not heard of since, counts as gone."""


def reason_of(error: BaseException) -> str:
    """What an error of a request to a store says, for texts."""
    error = why_unsent(error) or error
    silent = isinstance(error, TimeoutError) and not str(error)
    return "no answer in time: check the store" if silent else str(error) or type(error).__name__


class Outage:
    """The trouble of a store, which all its users of this process share, or that of a single thing.

    It begins with the first failure. It is over with the first success once no source that noticed it still fails.

    Args:
        title: what has trouble, for the log.
        logger: where it is logged.
        emits: whether it is an event too: that of a store is.
    """

    def __init__(self, title: str, logger: logging.Logger, *, emits: bool = False) -> None:
        self.title = title
        self._logger = logger
        self._emits = emits
        self._since: float | None = None
        self._told_at = 0.0
        self._failing: dict[str, float] = {}  # the sources that noticed it, and when each failed last

    @property
    def is_on(self) -> bool:
        """Whether it goes on."""
        return self._since is not None

    def note(
        self, error: BaseException, now: float, interval: float = inf, source: str = "", *, awaited: bool = True
    ) -> None:
        """A request failed at `now`.

        Args:
            error: how it failed.
            now: the time of this process.
            interval: seconds between two lines that tell that it goes on.
            source: what sent the request, for the log.
            awaited: whether the outage lasts until `source` has had success, which needs to try again soon.
        """
        if awaited:
            self._failing[source] = now
        title = f"{self.title} ({source})" if source else self.title
        if self._since is None:
            self._since = self._told_at = now
            self._logger.warning("%s has trouble since %.1f s: %s", title, 0.0, reason_of(error))
            if self._emits:
                emit("outage", self.title, detail=type(error).__name__)
        elif now - self._told_at >= interval:
            self._told_at = now
            self._logger.info("%s still has trouble after %.1f s: %s", title, now - self._since, reason_of(error))

    def over(self, now: float, source: str = "") -> None:
        """A request of `source` succeeded at `now`."""
        if self._since is None:
            return
        self._failing = {
            other: failed_at
            for other, failed_at in self._failing.items()
            if other != source and now - failed_at < STALE_AFTER_S
        }
        if self._failing:
            return
        seconds, self._since = now - self._since, None
        self._logger.warning("%s works again after %.1f s", self.title, seconds)
        if self._emits:
            emit("recovered", self.title, seconds)

    def leave(self, source: str) -> None:
        """`source` sends no more requests: the outage ends with the success of others."""
        self._failing.pop(source, None)

    def forget(self) -> None:
        """The store has no user any more."""
        self._failing.clear()
        self._since = None


def shared_outage(backend: object, own: Outage) -> Outage:
    """The outage of the store of `backend`; `own` if it has none."""
    found = getattr(backend, "outage", None)
    return found if isinstance(found, Outage) else own
