"""A minimum hold belongs to the interval that it was made for, and never keeps its own worker from a turn."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from math import ceil

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import WouldBlockError
from grelmicro.leases import Lease
from grelmicro.task import FireOutcome, IntervalTask, TaskRun, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.crews import Crew
from tests.helpers.stores import Fault, reply_lost, request_lost
from tests.helpers.timeline import pause
from tests.helpers.worlds import World, eventually


class WholeSeconds(MemoryStore):
    """A store that keeps whole seconds, as Kubernetes does."""

    resolution = 1.0

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        return await super().acquire(name, holder, ceil(ttl), data=data, waiting=waiting)

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        return await super().renew(lease, ceil(ttl), data=data)


def locked(backend: LockAdapter, clock: MovableClock, work: Callable[[], object], seconds: float) -> IntervalTask:
    """A task with a lock that is held for its interval."""
    tasks = Tasks(clock=clock)
    tasks.every(seconds=seconds, name="job", lock=TaskLock(backend=backend))(work)
    (task,) = tasks.tasks
    assert isinstance(task, IntervalTask)
    task.clock = clock
    return task


async def test_each_due_tick_runs_where_a_store_rounds_holds_up(nothing_left: None, clock: MovableClock) -> None:
    store = WholeSeconds(clock=clock)
    start, runs, theirs = clock.now(), [], []

    async def work() -> None:
        runs.append(clock.now() - start)
        await pause(clock, 0.4)

    async with LockAdapter(store) as backend, LockAdapter(store) as other:
        task = locked(backend, clock, work, 3.0)
        runner = asyncio.create_task(task())
        await clock.advance(1.0)
        follower = locked(other, clock, lambda: theirs.append(clock.now()), 3.0)
        following = asyncio.create_task(follower())
        await clock.advance(30.0)
        assert runs == pytest.approx([3.0 * number for number in range(11)], abs=0.01)
        assert {outcome: count for outcome, count in task.outcomes.items() if count} == {"success": 11}
        assert theirs == []
        runner.cancel()
        following.cancel()
        await asyncio.wait({runner, following})


@pytest.mark.parametrize("late", [0.1, 1.5], ids=["a little late", "late"])
async def test_a_run_that_began_late_does_not_delay_the_next_one_of_its_worker(
    late: float, world: World, clock: MovableClock
) -> None:
    """As after a pause of the process between the due time and the request."""
    async with world.client() as backend, world.client() as other:
        mine, theirs = (locked(each, clock, lambda: None, 3.0)._job for each in (backend, other))
        mine.clock = theirs.clock = clock
        due = clock.now()
        await clock.advance(late)
        assert await mine.run(due, tolerance=0.3) == FireOutcome.SUCCESS
        await clock.advance(3.0 - late)
        if late > 0.3:
            with pytest.raises(WouldBlockError):
                await theirs.run(due + 3.0, tolerance=0.3)
        assert await mine.run(due + 3.0, tolerance=0.3) == FireOutcome.SUCCESS


async def test_each_due_tick_runs_on_each_store(real_world: World) -> None:
    seconds = 1.2 if real_world.kind == "kubernetes" else 0.3
    tasks, ran = Tasks(), []
    async with real_world.client() as backend:

        @tasks.every(seconds=seconds, name="job", lock=TaskLock(backend=backend))
        async def job() -> None:
            ran.append(1)
            await asyncio.sleep(seconds / 10)

        (task,) = tasks.tasks
        assert isinstance(task, IntervalTask)
        async with tasks:
            await eventually(lambda: len(ran) >= 4, "it ran")
        assert task.outcomes["skipped"] == 0


@pytest.mark.parametrize("fault", [request_lost, reply_lost])
async def test_a_hold_that_was_not_confirmed_delays_its_own_worker_no_longer(
    world: World, clock: MovableClock, fault: Fault
) -> None:
    """Although the record may still say that the lease lasts an hour."""
    store = world.troubled()
    runs: list[float] = []
    async with LockAdapter(store) as backend:
        tasks = Tasks(clock=clock)
        lock = TaskLock(backend=backend, lease_duration=3600)
        tasks.every(seconds=10, name="job", lock=lock)(lambda: runs.append(clock.now()))
        store.break_down(fault, "renew")
        start = clock.now()
        async with tasks:
            await clock.advance(10.0)
            await clock.advance(10.0)
            assert runs == [start, start + 10.0, start + 20.0]
        store.heal()
        while backend._background:
            await clock.advance(1.0)


async def test_a_shorter_interval_counts_at_once(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        old = await crew.hand(3600.0, lock={})
        await crew.let_pass(5.0)
        await crew.stop(old)
        new = await crew.hand(2.0, lock={})
        await crew.let_pass(10.0)
        assert new.runs == pytest.approx([start + 5.0 + 2.0 * number for number in range(6)], abs=0.3)
        assert new.outcomes == {"success": 6}


async def test_a_shorter_interval_is_waited_for(world: World, clock: MovableClock) -> None:
    """It counts from the last run, and the record tells that to all workers."""
    async with Crew(world, clock) as crew:
        start = clock.now()
        old = await crew.hand(3600.0, lock={})
        await crew.let_pass(5.0)
        await crew.stop(old)
        for _ in range(2):
            await crew.hand(60.0, lock={})
        lease = await crew.hands[1].backend.read("tasklock:job")
        assert lease is not None
        assert lease.remaining == pytest.approx(55.0, abs=0.5)
        await crew.let_pass(130.0)
        assert crew.runs == pytest.approx([start, start + 60.0, start + 120.0], abs=3.5)


async def test_a_longer_interval_counts_at_once(world: World, clock: MovableClock) -> None:
    """Also for a worker that starts when the old hold would have ended."""
    async with Crew(world, clock) as crew:
        start = clock.now()
        old = await crew.hand(10.0, lock={})
        await crew.let_pass(5.0)
        await crew.stop(old)
        first = await crew.hand(100.0, lock={})
        await crew.let_pass(10.0)
        second = await crew.hand(100.0, lock={})
        await crew.let_pass(80.0)
        assert (first.runs, second.runs) == ([], [])
        await crew.let_pass(15.0)
        assert crew.runs == pytest.approx([start, start + 100.0], abs=5.5)


@pytest.mark.slow
async def test_a_run_that_goes_on_is_never_taken_for_a_hold(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        old = await crew.hand(100.0, partial(pause, clock, 150.0), lock={"auto_renew": True})
        await crew.let_pass(260.0)
        new = await crew.hand(1.0, lock={})
        await crew.let_pass(10.0)
        assert len(old.runs) == 2
        assert new.runs == []
        await crew.let_pass(100.0)
        assert new.runs[0] == pytest.approx(old.runs[1] + 150.0, abs=1.5)


async def test_tasks_that_share_a_lock_keep_their_own_intervals(world: World, clock: MovableClock) -> None:
    """A hold for one is no hold for a shorter interval of another."""
    async with Crew(world, clock) as crew:
        long = await crew.hand(60.0, lock={"name": "maintenance"}, start=False)
        await long.start()
        await crew.let_pass(5.0)
        store = crew.connect()
        ran: list[float] = []
        async with LockAdapter(store) as backend:
            tasks = Tasks(clock=clock)
            lock = TaskLock("maintenance", backend=backend)
            tasks.every(seconds=2, name="another", lock=lock)(lambda: ran.append(clock.now()))
            async with tasks:
                await crew.let_pass(50.0)
                assert ran == []


async def test_every_worker_reads_the_last_run(world: World, clock: MovableClock) -> None:
    async def fail() -> None:
        await pause(clock, 3.0)
        raise LookupError("of the work")

    async with Crew(world, clock) as crew:
        started = datetime.fromtimestamp(clock.wall(), UTC)
        first = await crew.hand(60.0, fail, lock={"worker": "web-1"})
        await crew.let_pass(1.0)
        second = await crew.hand(60.0, lock={})
        assert await second.task.last_run() is None
        await crew.let_pass(4.0)
        run = await second.task.last_run()
        assert run is not None
        assert (run.task, run.outcome, run.error, run.worker) == ("job", "error", "LookupError", "web-1")
        assert run.started_at == started
        assert run.duration == pytest.approx(3.0, abs=0.3)
        assert first.outcomes == {"error": 1}
        writes = sum(first.store.calls.values())
        assert writes == 2, "it rides on what is stored anyway"
        assert await second.tasks.last_runs() == {"job": run}


async def test_a_run_that_outlasted_its_hold_is_noted_too(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(2.0, partial(pause, clock, 3.0), lock={})
        await crew.let_pass(3.5)
        run = await hand.task.last_run()
        assert run is not None
        assert run.outcome is FireOutcome.SUCCESS


async def test_the_last_run_on_a_leader_is_read_by_every_worker(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        first = await crew.hand(5.0, leader=True)
        await eventually(lambda: first.leader is not None and first.leader.is_leader(), "it leads")
        second = await crew.hand(5.0, leader=True)
        await crew.let_pass(6.0)
        run = await second.task.last_run()
        assert run is not None
        assert first.leader is not None
        assert (run.outcome, run.worker) == ("success", first.leader.worker)
        await crew.let_pass(5.0)
        later = await second.task.last_run()
        assert later is not None
        assert later.started_at > run.started_at


async def test_a_quick_task_of_the_leader_is_stored_now_and_then(world: World, clock: MovableClock) -> None:
    """And at once when it ends otherwise than before."""
    async with Crew(world, clock) as crew:
        hand = await crew.hand(0.1, leader=True)
        await eventually(lambda: hand.leader is not None and hand.leader.is_leader(), "it leads")
        await crew.let_pass(1.0, step=0.1)
        asked = hand.store.calls["acquire"]
        await crew.let_pass(10.0, step=0.1)
        assert len(hand.runs) > 100
        assert hand.store.calls["acquire"] - asked <= 11

        async def fail() -> None:
            raise LookupError

        hand.work = fail
        await crew.let_pass(0.3, step=0.1)
        run = await hand.task.last_run()
        assert run is not None
        assert run.outcome is FireOutcome.ERROR


async def test_without_a_lock_or_leader_the_last_run_is_that_of_this_worker(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(5.0)
        await crew.let_pass(1.0)
        run = await hand.task.last_run()
        assert run is not None
        assert run.outcome is FireOutcome.SUCCESS


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"started": "x"}'])
def test_a_note_of_another_version_is_none(text: str) -> None:
    assert TaskRun.of("job", Lease("tasklock:job", "", 1, data={"task:job": text})) is None


async def test_run_now_runs_before_it_is_due(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        hand = await crew.hand(60.0, lock={})
        other = await crew.hand(60.0, lock={})
        await crew.let_pass(10.0)
        fire = await other.task.run_now()
        assert (fire.outcome, other.runs) == ("success", [start + 10.0])
        assert hand.runs == [start]
        await crew.let_pass(125.0)
        assert crew.runs[2:] == pytest.approx([start + 70.0, start + 130.0], abs=3.5)


async def test_run_now_does_not_run_beside_a_run_without_a_lock(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(60.0, partial(pause, clock, 5.0))
        await crew.let_pass(1.0)
        assert (await hand.task.run_now()).outcome is FireOutcome.SKIPPED
        await crew.let_pass(5.0)
        running = asyncio.create_task(hand.task.run_now())
        await crew.let_pass(56.0)  # the next due time comes when it has ended
        assert (await running).outcome is FireOutcome.SUCCESS
        assert len(hand.runs) == 3


async def test_run_now_does_not_run_beside_another_run(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(60.0, partial(pause, clock, 5.0), lock={})
        other = await crew.hand(60.0, lock={})
        await crew.let_pass(1.0)
        for each in (hand, other):
            assert (await each.task.run_now()).outcome is FireOutcome.SKIPPED
        assert len(crew.runs) == 1


async def test_run_now_needs_no_lock_and_no_start(clock: MovableClock, nothing_left: None) -> None:
    tasks, ran = Tasks(clock=clock), []

    @tasks.every(seconds=60, name="job")
    async def job() -> None:
        ran.append(1)

    assert (await tasks.run_now("job")).outcome is FireOutcome.SUCCESS
    assert ran == [1]
