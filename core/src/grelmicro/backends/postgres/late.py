"""Acquires that may arrive late, and the server's time, which bounds how late."""

import asyncio
import math
from typing import NamedTuple

from grelmicro.clock import Clock
from grelmicro.leases.lease import Lease

MOST = 1000
"""Acquires that are remembered at most, the latest ones."""


class Late(NamedTuple):
    """An acquire that was given up."""

    recovery: "asyncio.Task[bool] | None"
    """Returns whether its connection has shown that the server is done; None: the connection is gone."""
    not_after: float
    """The server's time after which it is not granted."""

    @property
    def is_over(self) -> bool:
        """Whether the server is surely done with it."""
        recovery = self.recovery
        return recovery is not None and recovery.done() and not recovery.cancelled() and recovery.result()


class LateAcquires:
    """The acquires of this process that were given up, until the server surely does nothing about them any more.

    Each carries the server's time after which it is not to be granted, also if it has waited for its row until then.
    So an undo is final that gets the row after that time, or after the connection has shown that the server is done.

    Args:
        clock: the time of this process.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = math.nan  # by how much the server's time is ahead, in seconds
        self._late: dict[str, Late] = {}

    def learn(self, server_time: float, sent_at: float) -> None:
        """The server said its time, between `sent_at` and now on the clock of this process."""
        least, most = server_time - self._clock.now(), server_time - sent_at
        # As close to what is known already as this answer allows: one that was slow in coming tells little.
        self._ahead = most if math.isnan(self._ahead) else min(max(self._ahead, least), most)

    def server_time(self) -> float:
        """The server's time now, in seconds since 1970, by its last answers."""
        return self._clock.now() + self._ahead

    def add(self, holder: str, not_after: float, recovery: "asyncio.Task[bool] | None") -> None:
        """An acquire was given up; `recovery` tells whether its connection has shown that the server is done."""
        if len(self._late) >= MOST:
            del self._late[next(iter(self._late))]
        self._late[holder] = Late(recovery, not_after)

    def get(self, lease: Lease) -> Late | None:
        """The acquire of this holder that may still take effect."""
        late = self._late.get(lease.holder)
        if late is None or late.is_over:
            return None
        return late

    def done(self, lease: Lease) -> None:
        """Forget about it."""
        self._late.pop(lease.holder, None)
