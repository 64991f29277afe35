"""Cancelled at any moment, a task leaves no lease and no running body, and its fire is counted once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

from grelmicro.coordination import LeaderElection, TaskLock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.task import IntervalTask
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.matrix import further
from tests.helpers.stores import SOON, late
from tests.helpers.worlds import World, eventually

LONG = 3600.0
"""A lease that does not end by itself within a test."""

MOST_SUSPENSIONS = 60
"""More than a few fires need: what suspends more often runs in circles."""

PROMPT = 3.0
"""Seconds within which an undo ends: less than it takes until a server surely does nothing more by itself."""

FIRES = 3


@dataclass
class Cast:
    """The clients of all plays of a test: what one did to their connections must not harm the next."""

    backend: LockAdapter
    other: LockAdapter
    elections: LeaderElectionAdapter


@asynccontextmanager
async def cast_of(world: World, slow: bool) -> AsyncIterator[Cast]:
    store = world.troubled()
    if slow:
        store.break_down(late(request=SOON, reply=SOON))
    async with (
        LockAdapter(store) as backend,
        world.client() as other,
        LeaderElectionAdapter(world.store()) as elections,
    ):
        yield Cast(backend, other, elections)


async def play(cast: Cast, at: int, when: When, *, leads: bool) -> bool:
    """Fire a few times, and cancel it at suspension `at`; whether there were that many."""
    running: list[int] = []
    fires: list[int] = []

    async def work() -> None:
        running.append(1)
        fires.append(1)
        try:
            await asyncio.sleep(0.001)
        finally:
            try:
                await asyncio.sleep(0)
            finally:
                running.pop()

    leader = LeaderElection("job", backend=cast.elections) if leads else None
    service = asyncio.create_task(leader()) if leader is not None else None
    if leader is not None:
        await asyncio.wait_for(leader.wait_for_leader(), 5)
    lock = TaskLock("job", backend=cast.backend, lease_duration=LONG, min_hold_duration=0.001)
    task = IntervalTask("job", work, 0.005, lock=lock, leader=leader)
    runner: asyncio.Task[None]
    suspended: Suspended[None] = Suspended(task(), at, when, lambda: runner.cancel())

    async def run() -> None:
        await suspended

    runner = asyncio.create_task(run())
    while not runner.done() and len(fires) < FIRES:
        await asyncio.sleep(0.001)
    reached = suspended.suspensions >= at
    runner.cancel()
    await asyncio.wait({runner})
    assert suspended.suspensions < MOST_SUSPENSIONS
    assert not running
    assert runner.cancelled()
    assert task.next_fire_time is None
    tried = sum(task.outcomes.values()) - task.outcomes["missed"] - task.outcomes["skipped"]
    assert len(fires) <= tried <= len(fires) + 1

    async with asyncio.timeout(5):
        while not (lease := await cast.other.acquire("tasklock:job", "after", LONG)).granted_to("after"):
            await asyncio.sleep(0.002)
    await cast.other.release(lease)
    await eventually(lambda: not cast.backend._background, "every undo has ended", PROMPT)
    if service is not None:
        service.cancel()
        await asyncio.wait({service})
    return reached


async def play_all(world: World, when: When, *, leads: bool, slow: bool) -> None:
    """Play again and again, and cancel it at one suspension after the other."""
    at = 1
    async with cast_of(world, slow) as cast:
        while await play(cast, at, when, leads=leads):
            at += 1
    assert at > 3  # on a busy machine a play has fewer fires, and so fewer suspensions


@pytest.mark.parametrize("leads", [False, True], ids=["lock", "lock and leader"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_it_leaves_nothing(matrix_world: World, when: When, leads: bool) -> None:
    # A store in memory answers before anything can come between; the others are slow anyway.
    await play_all(matrix_world, when, leads=leads, slow=matrix_world.kind == "memory")


@pytest.mark.parametrize("matrix_world", further("memory", "sqlite"), indirect=True)
@pytest.mark.parametrize("leads", [False, True], ids=["lock", "lock and leader"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_the_pace_of_connections_changes_nothing(matrix_world: World, when: When, leads: bool) -> None:
    await play_all(matrix_world, when, leads=leads, slow=matrix_world.kind != "memory")


@pytest.fixture
def go_on() -> Iterator[threading.Event]:
    """What work that ignores cancellations waits for; also when the test failed."""
    event = threading.Event()
    yield event
    event.set()


async def ignore_cancellations(go_on: threading.Event) -> None:
    """Run on until `go_on`, whoever cancels it."""
    while not go_on.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("in_thread", [False, True], ids=["coroutine", "thread"])
async def test_the_lock_is_kept_until_the_body_ends_however_often_it_is_cancelled(
    real_world: World, go_on: threading.Event, in_thread: bool
) -> None:
    begun = threading.Event()

    async def coroutine() -> None:
        begun.set()
        await ignore_cancellations(go_on)

    def thread() -> None:
        begun.set()
        assert go_on.wait(10)

    async with real_world.client() as backend, real_world.client() as other:
        lock = TaskLock("job", backend=backend, lease_duration=LONG, min_hold_duration=0.001)
        runner = asyncio.create_task(IntervalTask("job", thread if in_thread else coroutine, 60.0, lock=lock)())
        await eventually(begun.is_set, "it runs")
        for _ in range(5):
            runner.cancel()
            await asyncio.sleep(0.02)
        record = await other.read("tasklock:job")
        assert record is not None
        assert record.live
        assert not runner.done()
        go_on.set()
        await asyncio.wait({runner}, timeout=10)
        assert runner.cancelled()
        record = await other.read("tasklock:job")
        assert record is not None
        assert record.remaining < 1.0


async def test_lead_is_not_left_before_its_work_however_often_it_is_cancelled(
    real_world: World, go_on: threading.Event
) -> None:
    leader = LeaderElection("job", backend=LeaderElectionAdapter(real_world.store()))
    service = asyncio.create_task(leader())
    leading = asyncio.create_task(leader.lead(ignore_cancellations, go_on))
    await asyncio.wait_for(leader.wait_for_leader(), 10)
    for _ in range(5):
        await asyncio.sleep(0.02)
        leading.cancel()
    assert not leading.done()
    go_on.set()
    await asyncio.wait({leading}, timeout=10)
    assert leading.cancelled()
    service.cancel()
    await asyncio.wait({service})
