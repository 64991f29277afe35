"""Workers that stand for one role, each over a connection of its own, on a clock that the test moves."""

import asyncio
from types import TracebackType
from typing import Any, Self

from grelmicro.coordination import LeaderElection
from grelmicro.coordination.adapters import LeaderElectionAdapter
from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
from tests.helpers.timeline import STEP, CountedStore, Timeline
from tests.helpers.worlds import World


class Worker:
    """One instance of an election, and the connection over which it reaches the store."""

    def __init__(self, store: CountedStore, election: LeaderElection) -> None:
        self.store = store
        self.election = election
        self.service: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take part."""
        self.service = asyncio.create_task(self.election(), name=f"service of {self.election.worker}")

    async def stop(self) -> None:
        """Take part no more; returns when it has stepped down."""
        if self.service is not None:
            self.service.cancel()
            await asyncio.wait({self.service})


class Fleet(Timeline):
    """The workers of a service, and the time that they live in."""

    def __init__(self, world: World, clock: MovableClock) -> None:
        super().__init__(world, clock)
        self.workers: list[Worker] = []
        self._own = self.connect()

    def worker(self, role: str = "job", *, start: bool = True, ordered: bool = True, **settings: Any) -> Worker:
        """A new worker; the settings are those of `LeaderElection`, by default without jitter."""
        store = self.connect(ordered=ordered)
        election = LeaderElection(role, backend=LeaderElectionAdapter(store), **{"retry_jitter": 0.0, **settings})
        worker = Worker(store, election)
        self.workers.append(worker)
        if start:
            worker.start()
        return worker

    async def leading(self, role: str = "job", **settings: Any) -> Worker:
        """A new worker that leads already."""
        worker = self.worker(role, **settings)
        await self.settle()
        assert worker.election.is_leader()
        return worker

    @property
    def leaders(self) -> list[Worker]:
        """Those who lead now."""
        return [worker for worker in self.workers if worker.election.is_leader()]

    async def record(self, role: str = "job") -> Lease:
        """What the store keeps of the role."""
        lease = await self._own.read(f"leader:{role}")
        assert lease is not None
        return lease

    async def check(self) -> None:
        """Whoever says that it leads has a live lease at the store, under the fence that it tells; so it is alone."""
        for worker in self.leaders:
            fence = worker.election.guard().fence
            record = await self.record(worker.election.name)
            assert record.live, "it leads, and its lease has ended"
            assert record.fence == fence, "it leads, and the lease is another's"

    async def __aenter__(self) -> Self:
        await self._own.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.store.heal()
        stops = asyncio.gather(*(worker.stop() for worker in self.workers))
        while not stops.done():
            await self.let_pass(STEP)
        await self._own.__aexit__(None, None, None)
