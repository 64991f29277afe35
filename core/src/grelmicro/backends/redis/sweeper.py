"""Sets free, in the background, the locks on a Redis server whose lease ended by itself.

A record that is held has no time to live, since a server that is short of memory may drop what has one. So a lease that
ends by its time leaves a record without: what stays of a task lock's minimum hold, or of a process that was killed.
"""

import asyncio
import logging
from contextvars import Context
from random import random

from grelmicro.backends.redis.table import BEGIN, Table
from grelmicro.clock import Clock
from grelmicro.errors import CoordinationBackendError

logger = logging.getLogger("grelmicro.coordination")

SWEEP_INTERVAL = 3600.0
"""Seconds between the beginnings of two rounds through the records."""

SWEEP_PAUSE = 1.0
"""Seconds between two parts of such a round."""


class Sweeper:
    """Goes through the records of one namespace now and then.

    Args:
        table: the records.
        clock: says when a round is due. The first one is at a random time, so that processes take turns.
    """

    def __init__(self, table: Table, clock: Clock) -> None:
        self._table = table
        self._clock = clock
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
                self._sweep(), name="grelmicro-redis-sweeper", context=Context()
            )

    async def close(self) -> None:
        """End the round that is under way."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait({self._round})

    async def _sweep(self) -> None:
        cursor = BEGIN
        try:
            while (cursor := await self._table.sweep(cursor)) != BEGIN:
                await asyncio.sleep(SWEEP_PAUSE)
        except CoordinationBackendError as error:  # another round comes
            logger.debug("expired locks were left as they are: %s", error)
