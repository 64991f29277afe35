"""A subscription to hints as a waiter has it: a store that does not begin or end it in time holds nobody up."""

import logging
from contextlib import AbstractAsyncContextManager
from types import TracebackType

from grelmicro.clock import Clock, TimeLimit, end_within
from grelmicro.leases import Waiter

logger = logging.getLogger("grelmicro.coordination")


class Subscription:
    """A store's subscription, or a waiter that polls when the store does not begin it within `limit` seconds.

    Its end never holds the caller up, and never fails: what was won meanwhile counts.

    Args:
        watch: what `LeaseBackend.watch` returned.
        clock: the time of the waiter.
        limit: seconds for its beginning, and for its end.
        title: what is waited for, for the log.
    """

    def __init__(self, watch: AbstractAsyncContextManager[Waiter], clock: Clock, limit: float, title: str) -> None:
        self._watch = watch
        self._clock = clock
        self._limit = limit
        self._title = title
        self._begun = False

    async def __aenter__(self) -> Waiter:
        try:
            async with TimeLimit(self._clock, self._limit) as scope:
                waiter = await self._watch.__aenter__()
                self._begun = True
        except TimeoutError:
            if not scope.expired():  # the store's own
                raise
            logger.warning("%s: the store gave no hints within %g s, so it is polled instead", self._title, self._limit)
            return Waiter(self._clock)
        return waiter

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._begun:
            return
        try:
            await end_within(self._clock, self._limit, self._end())
        except Exception as failure:
            logger.warning("%s: a subscription to hints did not end in order: %r", self._title, failure)

    async def _end(self) -> None:
        await self._watch.__aexit__(None, None, None)
