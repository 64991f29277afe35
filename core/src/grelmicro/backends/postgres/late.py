"""Acquires that may arrive late, and the server's time, which bounds how late."""

import asyncio
import math
from typing import NamedTuple

from grelmicro.clock import Clock
from grelmicro.leases.lease import Lease

COMMIT = 1.0
"""Seconds that a transaction may take from its decision to its end."""

MOST = 1000
"""Acquires that are remembered at most, the latest ones."""


class _Late(NamedTuple):
    recovery: "asyncio.Task[bool] | None"
    not_after: float


class LateAcquires:
    """The acquires of this process that were given up, until the server surely does nothing about them any more.

    Each carries the server's time after which it is not to be granted. So an undo that finds nothing after that, or
    after the connection has shown that the server is done, is final.

    Args:
        clock: the time of this process.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead = math.nan  # by how much the server's time is ahead, in seconds
        self._late: dict[str, _Late] = {}

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
        self._late[holder] = _Late(recovery, not_after)

    def is_over(self, lease: Lease) -> bool:
        """Whether no acquire of this holder can take effect any more."""
        late = self._late.get(lease.holder)
        if late is None:
            return True
        recovery = late.recovery
        if recovery is not None and recovery.done() and not recovery.cancelled() and recovery.result():
            return True
        return self.server_time() > late.not_after + COMMIT

    def done(self, lease: Lease) -> None:
        """Forget about it."""
        self._late.pop(lease.holder, None)
