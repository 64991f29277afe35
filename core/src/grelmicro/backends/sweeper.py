"""Goes through the records of a store now and then, in the background and a few at a time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import Context
from random import random
from typing import Generic, TypeVar

from grelmicro.clock import Clock

logger = logging.getLogger("grelmicro.coordination")

SWEEP_INTERVAL = 3600.0
"""Seconds between the beginnings of two rounds through the records."""

SWEEP_PAUSE = 1.0
"""Seconds between two parts of such a round."""

P = TypeVar("P")


class Sweeper(Generic[P]):
    """Begins rounds when they are due, one at a time.

    Args:
        sweep: tidies the next few records from a place on, and returns the place to go on from; `begin` at the end.
        begin: where a round begins.
        clock: says when a round is due. The first one is at a random time, so that processes take turns.
        title: whose records, for the log.
    """

    def __init__(self, sweep: Callable[[P], Awaitable[P]], begin: P, clock: Clock, title: str) -> None:
        self._sweep = sweep
        self._begin = begin
        self._clock = clock
        self._title = title
        self._due = clock.now() + SWEEP_INTERVAL * random()
        self._round: asyncio.Task[None] | None = None

    def begin_if_due(self) -> None:
        """Begin a round when it is time, unless one is under way."""
        now = self._clock.now()
        if now < self._due:
            return
        self._due = now + SWEEP_INTERVAL
        if self._round is None or self._round.done():
            # In a context of its own: it may live longer than the request that happened to start it.
            self._round = asyncio.get_running_loop().create_task(
                self._go_round(), name="grelmicro-sweeper", context=Context()
            )

    async def close(self) -> None:
        """End the round that is under way."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait({self._round})

    async def _go_round(self) -> None:
        place = self._begin
        try:
            while (place := await self._sweep(place)) != self._begin:
                await asyncio.sleep(SWEEP_PAUSE)
        except Exception as error:  # another round comes
            logger.debug("%s: old records were left as they are: %s", self._title, error)
