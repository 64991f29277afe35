"""Passing a lease on: who gives it back lets the first who waits in this process have it, in one request."""

import asyncio

from grelmicro.leases import Lease, Waiter


class Offer:
    """The offer of one who waits to take what another of this process gives back. It is good for one attempt.

    Args:
        holder: who has the lease then; used for nothing else.
        ttl: seconds for which it is wanted.
        waiter: where the one who offers it waits.
    """

    __slots__ = ("_attempt", "_waiter", "_withdrawn", "holder", "lease", "sent_at", "ttl")

    def __init__(self, holder: str, ttl: float, waiter: Waiter) -> None:
        self.holder = holder
        self.ttl = ttl
        self.sent_at = 0.0
        """When the store was asked, by the clock of this process."""
        self.lease: Lease | None = None
        """What was passed on."""
        self._waiter = waiter
        self._attempt: asyncio.Future[None] | None = None
        self._withdrawn = False

    def begin(self, now: float) -> None:
        """The store is asked at `now`; give what it answers to `end`, whatever becomes of it."""
        self.sent_at = now
        self._attempt = asyncio.get_running_loop().create_future()

    def end(self, lease: Lease | None) -> bool:
        """The attempt brought `lease`, or nothing; whether there is still somebody to have it."""
        assert self._attempt is not None
        self._attempt.set_result(None)
        if self._withdrawn:
            return False
        self.lease = lease
        self._waiter.wake()
        return True

    async def settle(self) -> Lease | None:
        """What was passed on, once no attempt is under way."""
        if self._attempt is not None and not self._attempt.done():
            await asyncio.wait({self._attempt})
        return self.lease

    def withdraw(self) -> None:
        """Nobody is there any more to have it."""
        self._withdrawn = True
