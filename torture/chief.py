"""A candidate that stands for a role again and again, and the work of its terms."""

import asyncio
from contextlib import suppress

from grelmicro.coordination import LeaderElection, NotLeaderError
from grelmicro.leases import Lease
from torture.holding import Holding, State
from torture.kit import Kit
from torture.log import now

ROLE = "chief"

LEASE, DEADLINE, RETRY, BACKEND_TIMEOUT = 2.0, 1.4, 0.3, 0.7
"""Settings of the election, in seconds."""

TICK = 0.03
"""Seconds between two steps of the leader's work."""


class HeldTerm:
    """One term of an election, as it is observed."""

    def __init__(self, kit: Kit, election: LeaderElection, fence: int) -> None:
        self._kit = kit
        self._election = election
        self._fence = fence

    def state(self) -> State:
        """What the election says now; a later term is not this one."""
        valid, age = self._election.is_leader(), self._election.last_confirmation_age()
        with suppress(NotLeaderError):
            valid = valid and self._election.guard().fence == self._fence
        # The age is infinite once the term is over.
        return State(valid, max(DEADLINE - age, 0.0) if valid else 0.0, self._fence)

    async def wait_lost(self) -> None:
        """See `LeaderElection.wait_lose_leader`."""
        await self._election.wait_lose_leader()

    async def read(self) -> Lease | None:
        """The store's record."""
        return await self._kit.coordination.election_backend.read(f"leader:{ROLE}")


class Chief:
    """Stands for the role until the worker is stopped; now and then it steps down and stands again.

    Args:
        kit: what it works with.
        title: what its claims are called, before their numbers.
    """

    def __init__(self, kit: Kit, title: str) -> None:
        self._kit = kit
        self._title = title
        self._count = 0
        self._asked = 0.0
        self._holding: Holding | None = None

    async def run(self) -> None:
        """Stand for one period after another."""
        while not self._kit.stop.is_set():
            await self._stand(self._kit.chance.uniform(3.0, 15.0))

    async def _stand(self, seconds: float) -> None:
        election = self._kit.coordination.leaderelection(
            ROLE,
            lease_duration=LEASE,
            renew_deadline=DEADLINE,
            retry_interval=RETRY,
            backend_timeout=BACKEND_TIMEOUT,
        )
        down = asyncio.Event()
        self._asked = now()
        service = self._kit.group.create_task(election(stop=down))
        leading = self._kit.group.create_task(election.lead(self._work, election, repeat=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._kit.stop.wait()
        if self._holding is not None:
            self._holding.give_up()
        down.set()
        await service
        leading.cancel()
        await asyncio.wait({leading})

    async def _work(self, election: LeaderElection) -> None:
        """Write to the resource while this term lasts."""
        try:
            fence = election.guard().fence
        except NotLeaderError:
            return
        self._count += 1
        holding = self._holding = Holding(
            self._kit.log, f"{self._title}.{self._count}", HeldTerm(self._kit, election, fence), fence
        )
        holding.granted(ROLE, asked=self._asked, lease=LEASE, margin=LEASE - DEADLINE, guarded=True)
        holding.look()
        holding.observe(self._kit.group, self._kit.chance)
        try:
            while True:
                await self._kit.resource.write(ROLE, fence, holding.claim)
                await asyncio.sleep(TICK)
                holding.look()
        except asyncio.CancelledError:
            holding.stopped("cancelled")
            raise
        finally:
            self._asked = now()
            self._holding = None
