"""Workers that stand for one role, each over a connection of its own, on a clock that the test moves."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from grelmicro.coordination import LeaderElection
from grelmicro.coordination.adapters import LeaderElectionAdapter
from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
from tests.helpers.stores import Apply, Fault, TroubledStore
from tests.helpers.worlds import World

T = TypeVar("T")

STEP = 0.25
"""Seconds by which the clock moves at a time: less than what a test tells apart."""


def takes(clock: MovableClock, *, request: float = 0.0, reply: float = 0.0) -> Fault:
    """The request takes `request` seconds of the clock to arrive, its reply takes `reply`."""

    async def fault(apply: Apply) -> object:
        await pause(clock, request)
        answer = await apply()
        await pause(clock, reply)
        return answer

    return fault


def stalled_until(clock: MovableClock, when: float) -> Fault:
    """The store carries out nothing before then."""

    async def fault(apply: Apply) -> object:
        await pause(clock, when - clock.now())
        return await apply()

    return fault


async def pause(clock: MovableClock, seconds: float) -> None:
    """Wait until the clock has been moved by `seconds`."""
    if seconds > 0:
        moved = asyncio.Event()
        timer = clock.call_later(seconds, moved.set)
        try:
            await moved.wait()
        finally:
            timer.cancel()


class CountedStore(TroubledStore):
    """It knows how many requests the store itself is working on, so that the clock need not move meanwhile."""

    busy = 0
    live_until = 0.0
    """When the lease ends that the store told of last, whether or not the answer arrived."""

    async def open(self) -> None:
        await self._count(super().open)

    async def close(self) -> None:
        await self._count(super().close)

    async def _send(self, operation: str, apply: Callable[[], Awaitable[T]]) -> T:
        return await super()._send(operation, lambda: self._count(apply))

    async def _count(self, work: Callable[[], Awaitable[T]]) -> T:
        self.busy += 1
        try:
            answer = await work()
        finally:
            self.busy -= 1
        if isinstance(answer, Lease) and answer.live:
            self.live_until = self.clock.now() + answer.remaining
        return answer


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


class Fleet:
    """The workers of a service, and the time that they live in."""

    def __init__(self, world: World, clock: MovableClock) -> None:
        self.world = world
        self.clock = clock
        self.workers: list[Worker] = []
        self._own = CountedStore(world.store())

    def worker(self, role: str = "job", *, start: bool = True, **settings: Any) -> Worker:
        """A new worker; the settings are those of `LeaderElection`, by default without jitter."""
        store = CountedStore(self.world.store())
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

    async def let_pass(self, seconds: float, *, step: float = STEP) -> None:
        """Move the clock, and let everybody do at each step what falls due."""
        until = self.clock.now() + seconds
        await self.settle()
        while (left := until - self.clock.now()) > 1e-9:
            await self.clock.advance(min(step, left))
            await self.settle()
            await self._check()

    async def settle(self) -> None:
        """Let everybody go on until all wait for the clock or for each other."""
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if not any(store.busy for store in self._stores()):
                return
            await asyncio.sleep(0.0005)

    async def _check(self) -> None:
        """Whoever says that it leads has a live lease at the store, under the fence that it tells; so it is alone."""
        for worker in self.leaders:
            fence = worker.election.guard().fence
            record = await self.record(worker.election.name)
            assert record.live, "it leads, and its lease has ended"
            assert record.fence == fence, "it leads, and the lease is another's"

    def _stores(self) -> Iterable[CountedStore]:
        return [self._own, *(worker.store for worker in self.workers)]

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
