"""Workers that run the same task, each over a connection of its own, on a clock that the test moves."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from grelmicro.coordination import LeaderElection, TaskLock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.timeline import STEP, CountedStore, Timeline
from tests.helpers.worlds import World

Work = Callable[[], Awaitable[object]]


class Hand:
    """One worker: its connection, its task, and when that ran."""

    def __init__(self, store: CountedStore, clock: MovableClock, work: Work | None) -> None:
        self.store = store
        self.backend = LockAdapter(store)
        self.election_backend = LeaderElectionAdapter(store)
        self.clock = clock
        self.work = work
        self.runs: list[float] = []
        self.tasks = Tasks(clock=clock)
        self.leader: LeaderElection | None = None
        self._open = AsyncExitStack()

    def declare(self, seconds: float, *, lock: dict[str, Any] | None = None, leader: bool = False) -> None:
        """Declare the task, with a lock of these settings, or for the leader, or both."""
        if leader:
            self.leader = LeaderElection("job", backend=self.election_backend, retry_jitter=0.0)
            self.tasks.add_task(self.leader)
        own = None if lock is None else TaskLock(backend=self.backend, **lock)
        self.tasks.every(seconds=seconds, name="job", lock=own, leader=self.leader)(self.run)

    async def run(self) -> None:
        """What the task does."""
        self.runs.append(self.clock.now())
        if self.work is not None:
            await self.work()

    @property
    def task(self) -> IntervalTask:
        """The task."""
        task = self.tasks.tasks[-1]
        assert isinstance(task, IntervalTask)
        return task

    @property
    def outcomes(self) -> dict[str, int]:
        """How its fires ended, without those outcomes that there were none of."""
        return {outcome: count for outcome, count in self.task.outcomes.items() if count}

    async def start(self) -> None:
        """Run."""
        await self._open.enter_async_context(self.backend)
        await self._open.enter_async_context(self.tasks)

    async def stop(self) -> None:
        """End in order."""
        await self._open.aclose()


class Crew(Timeline):
    """The workers of a service, and the time that they live in."""

    def __init__(self, world: World, clock: MovableClock) -> None:
        super().__init__(world, clock)
        self.hands: list[Hand] = []

    async def hand(self, seconds: float, work: Work | None = None, *, start: bool = True, **declared: Any) -> Hand:
        """A new worker, whose task is declared with `declared`."""
        hand = Hand(self.connect(), self.clock, work)
        hand.declare(seconds, **declared)
        self.hands.append(hand)
        if start:
            await hand.start()
            await self.settle()
        return hand

    @property
    def runs(self) -> list[float]:
        """When the task ran, on whichever worker."""
        return sorted(run for hand in self.hands for run in hand.runs)

    async def stop(self, hand: Hand) -> None:
        """Let a worker end in order, for which it may need time."""
        hand.store.heal()
        stop = asyncio.create_task(hand.stop())
        await self.settle()
        while not stop.done():
            await self.let_pass(STEP)
        await stop

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hand in self.hands:
            await self.stop(hand)
