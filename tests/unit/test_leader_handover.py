"""A leader that stops first ends its work, then gives its lease back, and the next one leads at once."""

import asyncio
import gc
import logging
from datetime import UTC, datetime

import pytest

from grelmicro.coordination import LeaderElection, LeaderRecord
from grelmicro.coordination.adapters import LeaderElectionAdapter
from grelmicro.errors import SettingsValidationError, TaskError
from grelmicro.leases import LeaseStore
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet, Worker
from tests.helpers.stores import late, refused, request_lost
from tests.helpers.timeline import pause
from tests.helpers.worlds import World, eventually


class Diary:
    """When the work of each worker began and ended."""

    def __init__(self, clock: MovableClock, needed: float) -> None:
        self.clock = clock
        self.needed = needed
        self.lines: list[tuple[float, str, str]] = []

    def work_of(self, worker: Worker) -> asyncio.Task[None]:
        """Let `worker` work whenever it leads; its work needs a while to react to a cancellation."""

        async def work() -> None:
            self.lines.append((self.clock.now(), "begin", worker.election.worker))
            try:
                await asyncio.Event().wait()
            finally:
                await pause(self.clock, self.needed)
                self.lines.append((self.clock.now(), "end", worker.election.worker))

        async def lead() -> None:
            await worker.election.lead(work, repeat=True)

        return asyncio.create_task(lead())

    @property
    def most_at_once(self) -> int:
        """How many ran at the same time at most."""
        running, most = 0, 0
        for _, what, _ in self.lines:
            running += 1 if what == "begin" else -1
            most = max(most, running)
        return most


async def test_the_lease_is_released_after_the_work_has_ended(world: World, clock: MovableClock) -> None:
    diary = Diary(clock, needed=4.0)
    async with Fleet(world, clock) as fleet:
        first = await fleet.leading(worker="first")
        second = fleet.worker(worker="second")
        works = [diary.work_of(first), diary.work_of(second)]
        await fleet.settle()
        began = clock.now()
        stop = asyncio.create_task(first.stop())
        await fleet.settle()
        assert not first.election.is_leader()  # at once
        await fleet.let_pass(3.75)
        assert not fleet.leaders
        assert (await fleet.record()).live
        await fleet.let_pass(0.25)
        await eventually(second.election.is_leader, "the second one leads")
        await fleet.settle()
        assert diary.lines == [(began, "begin", "first"), (began + 4, "end", "first"), (began + 4, "begin", "second")]
        await stop
        for task in works:
            task.cancel()
        await fleet.let_pass(4.5)
        await asyncio.wait(works)


async def test_work_that_does_not_end_keeps_the_lease_until_it_runs_out(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary(clock, needed=60.0)
    async with Fleet(world, clock) as fleet:
        first = await fleet.leading()
        second = fleet.worker()
        work = diary.work_of(first)
        await fleet.let_pass(1.0)
        stop = asyncio.create_task(first.stop())
        await fleet.let_pass(13.5)  # the lease was taken 14.5 s ago
        assert not fleet.leaders
        assert not caplog.records
        await fleet.let_pass(1.0)
        await eventually(second.election.is_leader, "the second one leads")
        await stop
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
            f"work of leader:job, term {second.election.guard().fence - 1}, runs on although its lease has ended"
        ]
        work.cancel()
        await fleet.let_pass(60.0)
        await asyncio.wait({work})


async def test_work_that_ends_soon_after_a_takeover_is_no_error(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary(clock, needed=0.5)
    async with Fleet(world, clock) as fleet:
        first = await fleet.leading()
        work = diary.work_of(first)
        await fleet.settle()
        clock._now += 20.0  # the process stood still
        await fleet.let_pass(1.5)
        assert len(diary.lines) == 3
        assert not [record for record in caplog.records if record.levelno == logging.ERROR]
        work.cancel()
        await fleet.let_pass(1.0)
        await asyncio.wait({work})


async def test_stopped_workers_hand_over_without_overlap(world: World, clock: MovableClock) -> None:
    diary = Diary(clock, needed=1.0)
    async with Fleet(world, clock) as fleet:
        works = [diary.work_of(fleet.worker()) for _ in range(4)]
        await fleet.settle()
        fences, transitions = [], []
        for _ in range(4):
            await eventually(lambda: fleet.leaders, "one leads")
            (leader,) = fleet.leaders
            record = leader.election.guard()
            fences.append(record.fence)
            transitions.append(record.transitions)
            stop = asyncio.create_task(leader.stop())
            await fleet.let_pass(2.0)
            await stop
        assert fences == list(range(fences[0], fences[0] + 4))
        assert transitions == [0, 1, 2, 3]
        assert diary.most_at_once == 1
        for work in works:
            work.cancel()
        await asyncio.wait(works)


async def test_the_fence_and_the_count_of_transitions_outlive_every_leader(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        seen: list[LeaderRecord] = []
        for number in range(5):
            worker = await fleet.leading()
            seen.append(worker.election.guard())
            if number % 2:
                await worker.stop()
            else:  # as if it was killed
                worker.store.break_down(request_lost)
                stop = asyncio.create_task(worker.stop())
                await fleet.let_pass(16.0)
                await stop
        assert [record.fence - seen[0].fence for record in seen] == [0, 1, 2, 3, 4]
        assert [record.transitions for record in seen] == [0, 1, 2, 3, 4]


async def test_every_worker_reads_who_leads(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(worker="web-1", metadata={"url": "http://192.0.2.4:8000"})
        follower = fleet.worker(metadata={"url": "http://192.0.2.5:8000"})
        assert follower.election.record is None
        await eventually(lambda: follower.election.record, "it has asked")
        record = follower.election.record
        assert record is not None
        assert record.holder.startswith("web-1:")
        assert record.metadata == {"url": "http://192.0.2.4:8000"}
        assert record.fence == leader.election.guard().fence
        assert record.acquired_at == datetime.fromtimestamp(clock.wall(), UTC)
        await leader.stop()
        await eventually(follower.election.is_leader, "it leads")
        assert follower.election.record == follower.election.guard()
        assert follower.election.guard().metadata == {"url": "http://192.0.2.5:8000"}


async def test_the_record_is_renewed(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        began = clock.wall()
        await fleet.let_pass(60.0)
        record = leader.election.guard()
        assert record.acquired_at.timestamp() == pytest.approx(began)
        assert record.renewed_at.timestamp() == pytest.approx(began + 60.0, abs=2.5)
        assert record.lease_duration == pytest.approx(15.0)


async def test_metadata_cannot_be_changed_and_is_text(world: World) -> None:
    given = {"pod": "web-1"}
    election = LeaderElection("job", metadata=given)
    given["pod"] = "web-2"
    assert election.metadata == {"pod": "web-1"}
    with pytest.raises(TypeError):
        election.metadata["pod"] = "web-3"  # type: ignore[index]
    with pytest.raises(
        SettingsValidationError,
        match=r"^LeaderElection metadata should be text by text: convert its values with str\(\)$",
    ):
        LeaderElection("job", metadata={"port": 80})  # type: ignore[dict-item]


async def test_a_release_that_fails_is_repeated(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leader.store.suffer("release", request_lost, refused, refused)
        stop = asyncio.create_task(leader.stop())
        await fleet.let_pass(2.0)
        await stop
        assert not (await fleet.record()).live
    assert "releasing leader:job failed, and it ends by itself: " in caplog.text


async def test_it_takes_part_once_at_a_time_and_again_after_it_stopped(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        assert leader.election.is_running()
        with pytest.raises(TaskError, match="^election 'job' runs already: start it once, or build a second"):
            await leader.election()
        assert leader.election.is_leader()
        await leader.stop()
        assert not leader.election.is_running()
        leader.start()
        await fleet.settle()
        assert leader.election.is_leader()


async def test_it_ends_when_it_is_told_to_stop(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        service = asyncio.create_task(worker.election(ready=ready, stop=stop))
        await asyncio.wait_for(ready, 5)
        await eventually(worker.election.is_leader, "it leads")
        stop.set()
        await service
        assert not worker.election.is_leader()
        assert not (await fleet.record()).live


async def test_a_second_cancellation_waits_for_nothing_and_breaks_nothing(world: World, clock: MovableClock) -> None:
    """The lease is given back all the same once the work has ended."""
    diary = Diary(clock, needed=3.0)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        work = diary.work_of(leader)
        await fleet.settle()
        assert leader.service is not None
        leader.service.cancel()
        await fleet.settle()
        assert not leader.service.done()
        leader.service.cancel()
        await asyncio.wait({leader.service}, timeout=5)
        assert leader.service.done()
        assert (await fleet.record()).live
        await fleet.let_pass(3.25)
        assert not (await fleet.record()).live
        work.cancel()
        await asyncio.wait({work})


async def test_when_a_loop_ends_all_its_tasks_at_once_the_lease_is_given_back(real_world: World) -> None:
    """As `asyncio.run` does at its end: it cancels the service, the task that awaits it, and the work."""
    store = real_world.troubled()
    store.break_down(late(request=0.02, reply=0.02), "release")
    election = LeaderElection("job", backend=LeaderElectionAdapter(store))

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)

    before = asyncio.all_tasks()
    service = asyncio.create_task(election())
    await asyncio.wait_for(election.wait_for_leader(), 5)
    leading = asyncio.create_task(election.lead(work))
    await asyncio.sleep(0.02)
    tasks = asyncio.all_tasks() - before
    assert len(tasks) >= 5
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (service.cancelled(), leading.cancelled()) == (True, True)
    async with real_world.store() as own:
        record = await own.read("leader:job")
    assert record is not None
    assert not record.live


# asyncpg leaves a socket behind where its own task is cancelled while it connects, as some are here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("needed", [0.0, 0.02])
async def test_a_loop_that_ends_while_it_steps_down_leaves_no_lease(real_world: World, needed: float) -> None:
    """Servers end it a moment after the signal: it was told to stop, and is cancelled wherever it is by then."""

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(needed)

    async def step_down(own: LeaseStore, moments: int) -> None:
        election = LeaderElection("job", backend=LeaderElectionAdapter(real_world.store()))
        before = asyncio.all_tasks()
        stop = asyncio.Event()
        service = asyncio.create_task(election(stop=stop))
        await asyncio.wait_for(election.wait_for_leader(), 5)
        leading = asyncio.create_task(election.lead(work))
        await asyncio.sleep(0.002)
        stop.set()
        for _ in range(moments):
            await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - before
        for task in tasks:
            task.cancel()
        await asyncio.wait({*tasks, service, leading})
        record = await own.read("leader:job")
        assert record is not None
        assert not record.live, f"after {moments} moments"

    async with real_world.store() as own:
        for moments in range(25):
            await step_down(own, moments)
    gc.collect()  # here, where that is known, and not in another test
