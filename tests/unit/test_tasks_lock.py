"""With a task lock, a task runs once per interval over all workers, and only while its lease lasts."""

import asyncio
import logging
from functools import partial
from random import Random

import pytest

from grelmicro.coordination import TaskLock
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.crews import Crew, Hand
from tests.helpers.stores import Apply, refused, reply_lost, request_lost
from tests.helpers.timeline import pause, takes
from tests.helpers.worlds import World


def gaps(runs: list[float]) -> list[float]:
    """The seconds between runs that follow each other."""
    return [later - earlier for earlier, later in zip(runs, runs[1:], strict=False)]


def most_in_one(runs: list[float], interval: float) -> int:
    """How many of the runs fall into one interval at most, counted from the first one."""
    numbers = [int((run - runs[0]) // interval) for run in runs]
    return max(map(numbers.count, numbers))


async def test_it_runs_once_per_interval_on_two_workers(world: World, clock: MovableClock) -> None:
    """Whose due times are half an interval apart."""
    async with Crew(world, clock) as crew:
        start = clock.now()
        first = await crew.hand(4.0, lock={})
        await crew.let_pass(2.0, step=0.05)
        second = await crew.hand(4.0, lock={})
        await crew.let_pass(10.5, step=0.05)
        assert crew.runs == pytest.approx([start, start + 4, start + 8, start + 12], abs=0.3)
        assert (len(first.runs), len(second.runs)) == (4, 0)
        assert first.outcomes == {"success": 4}
        assert second.outcomes == {"skipped": 3 + 1}


@pytest.mark.slow
async def test_a_fleet_that_is_restarted_again_and_again_keeps_the_interval(world: World, clock: MovableClock) -> None:
    """A short task every two seconds on three workers, of which one is replaced again and again."""
    minutes, interval, random = (4, 2.0, Random(5)) if world.kind == "memory" else (1, 2.0, Random(5))
    async with Crew(world, clock) as crew:
        start = clock.now()
        present: list[Hand] = []
        for _ in range(3):
            present.append(await crew.hand(interval, partial(pause, clock, 0.005), lock={}))
            await crew.let_pass(random.uniform(0, interval), step=0.05)
        for number in range(10):
            end = start + minutes * 6.0 * (number + 1)
            await crew.let_pass(random.uniform(0.2, 0.8) * (end - clock.now()), step=0.05)
            await crew.stop(present.pop(number % 3))
            await crew.let_pass(random.uniform(0, interval), step=0.05)
            present.append(await crew.hand(interval, partial(pause, clock, 0.005), lock={}))
            await crew.let_pass(end - clock.now(), step=0.05)
        assert min(gaps(crew.runs)) > interval * 0.9
        if world.kind == "memory":  # which answers at once; else each answer is late by a step of the clock
            assert most_in_one(crew.runs, interval) == 1
        assert abs(len(crew.runs) - (clock.now() - start) / interval) <= 1.0
        late = 0.5 if world.kind == "memory" else interval
        assert crew.runs[-1] - start == pytest.approx(interval * (len(crew.runs) - 1), abs=late)
        for hand in crew.hands:
            assert not hand.outcomes.keys() - {"success", "skipped"}


async def test_another_worker_takes_over_without_losing_an_interval(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        first = await crew.hand(60.0, lock={})
        await crew.let_pass(55.0)
        second = await crew.hand(60.0, lock={})
        await crew.stop(first)
        started = first.runs[0]
        await crew.let_pass(70.0)
        assert second.runs == pytest.approx([started + 60.0, started + 120.0], abs=0.8)


async def test_another_worker_takes_over_in_the_middle_of_an_interval(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        first = await crew.hand(60.0, lock={})
        await crew.let_pass(25.0)
        others = [await crew.hand(60.0, lock={}) for _ in range(2)]
        await crew.stop(first)
        started = first.runs[0]
        await crew.let_pass(160.0)
        runs = sorted(others[0].runs + others[1].runs)
        assert runs[0] == pytest.approx(started + 62.25, abs=1.5)  # let the first one go first, if it had come
        assert runs[1:] == pytest.approx([started + 120.0, started + 180.0], abs=0.8)
        assert [] in (others[0].runs, others[1].runs)


@pytest.mark.slow
async def test_the_worker_that_runs_goes_on_running(world: World, clock: MovableClock) -> None:
    """Although its way to the store is longer than that of the others."""
    async with Crew(world, clock) as crew:
        first = await crew.hand(10.0, lock={})
        first.store.break_down(takes(clock, request=0.1), "acquire")
        others = [await crew.hand(10.0, lock={}) for _ in range(3)]
        await crew.let_pass(60.4, step=0.02)
        assert len(first.runs) == 7
        assert [hand.outcomes.keys() for hand in others] == [{"skipped"}] * 3


async def test_a_refusal_that_is_nearly_over_is_waited_for(world: World, clock: MovableClock) -> None:
    """A tenth of the interval: its own hold may end a moment after its due time."""
    async with Crew(world, clock) as crew:
        start = clock.now()
        held = await crew.hand(10.0, lock={"min_hold_duration": 10.9}, start=False)
        await held.start()
        await crew.let_pass(12.0, step=0.05)
        assert held.runs == pytest.approx([start, start + 10.9], abs=0.2)
        assert held.outcomes == {"success": 2}


async def test_a_refusal_that_lasts_is_skipped(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        held = await crew.hand(10.0, lock={"min_hold_duration": 11.1})
        await crew.let_pass(21.5, step=0.05)
        assert held.runs == pytest.approx([start, start + 11.1], abs=0.8)
        assert held.outcomes == {"success": 2, "skipped": 2}


async def test_a_hold_that_is_shorter_than_the_interval_lets_others_run(world: World, clock: MovableClock) -> None:
    """As asked: then it is no guard of the interval, and nobody follows another one's due times."""
    async with Crew(world, clock) as crew:
        start = clock.now()
        await crew.hand(10.0, lock={"min_hold_duration": 3.0})
        await crew.let_pass(1.0)
        await crew.hand(10.0, lock={"min_hold_duration": 3.0})
        await crew.let_pass(4.0)
        await crew.hand(10.0, lock={"min_hold_duration": 3.0})
        await crew.let_pass(6.0)
        assert crew.runs == pytest.approx([start, start + 5, start + 10], abs=0.1)


async def test_a_long_run_is_not_repeated_by_another_worker(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        for _ in range(2):
            await crew.hand(2.0, partial(pause, clock, 29.0), lock={})
        await crew.let_pass(33.0)
        assert crew.runs == [start, pytest.approx(start + 30.0, abs=1.0)]


@pytest.mark.parametrize("auto_renew", [False, True])
async def test_a_job_that_outlives_its_lease(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, auto_renew: bool
) -> None:
    """Renewed, it runs alone; else its loss cancels it and is counted, and the runs never overlap."""
    running: list[int] = []
    most: list[int] = []

    async def work() -> None:
        running.append(1)
        most.append(len(running))
        try:
            await pause(clock, 10.0)
        finally:
            running.pop()

    async with Crew(world, clock) as crew:
        for _ in range(3):
            await crew.hand(2.0, work, lock={"lease_duration": 3.0, "auto_renew": auto_renew})
        await crew.let_pass(35.0, step=0.1)
        outcomes = [hand.task.outcomes for hand in crew.hands]
        lost, success = (sum(each[what] for each in outcomes) for what in ("lost", "success"))
        assert max(most) == 1
        if auto_renew:
            assert (lost, success) == (0, 3)
        else:
            assert success == 0
            assert lost >= 9
            assert "task job lost its lease while it ran" in caplog.text


async def test_a_renewal_that_fails_long_enough_is_a_loss(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        ended: list[str] = []

        async def work() -> None:
            try:
                await pause(clock, 100.0)
            finally:
                ended.append(f"at {clock.now() - start:.2f}")

        start = clock.now()
        hand = await crew.hand(8.0, work, lock={"lease_duration": 9.0, "auto_renew": True})
        hand.store.break_down(refused, "renew_many", "renew")
        await crew.let_pass(9.0, step=0.05)
        assert ended == ["at 8.91"]
        assert hand.task.outcomes["lost"] == 1


@pytest.mark.parametrize("leader", [False, True], ids=["alone", "and a leader"])
@pytest.mark.parametrize("auto_renew", [False, True], ids=["kept", "renewed"])
async def test_an_error_in_reaction_to_a_loss_is_told(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, auto_renew: bool, leader: bool
) -> None:
    async def work() -> None:
        try:
            await pause(clock, 100.0)
        finally:
            raise ValueError("of the cleaning up")

    async with Crew(world, clock) as crew:
        lock = {"lease_duration": 9.0, "auto_renew": auto_renew}
        hand = await crew.hand(8.0, work, lock=lock, leader=leader)
        hand.store.break_down(refused, "renew_many")
        await crew.let_pass(9.5)
        assert hand.task.outcomes["lost"] == 1
        assert hand.task.outcomes["error"] == 0
    assert "of the cleaning up" in caplog.text


async def test_one_lock_given_to_two_tasks_is_two_locks(world: World, clock: MovableClock) -> None:
    ran: list[str] = []
    crew = Crew(world, clock)
    store = crew.connect()
    hand = Hand(store, clock, None)
    lock = TaskLock(backend=hand.backend)
    tasks = Tasks(clock=clock)

    @tasks.every(seconds=60, lock=lock)
    async def first() -> None:
        ran.append("first")
        await pause(clock, 1.0)

    @tasks.every(seconds=60, lock=lock)
    async def second() -> None:
        ran.append("second")
        await pause(clock, 1.0)

    async with hand.backend, tasks:
        await crew.let_pass(2.0)
        assert sorted(ran) == ["first", "second"]
        for task in tasks.tasks:
            assert isinstance(task, IntervalTask)
            assert task.outcomes["success"] == 1


async def test_without_an_answer_it_does_not_run_and_that_is_counted(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken_client(apply: Apply) -> object:
        raise RuntimeError("a bug in the client library")

    for fault in (refused, request_lost, reply_lost, broken_client):
        async with Crew(world, clock) as crew:
            hand = await crew.hand(2.0, lock={}, start=False)
            hand.store.break_down(fault, "acquire")
            await hand.start()
            await crew.let_pass(5.0)
            assert (hand.runs, hand.outcomes) == ([], {"coordination_error": 3})
            hand.store.heal()
            await crew.let_pass(7.0)
            assert hand.task.outcomes["success"] >= 1
        told = [record.getMessage() for record in caplog.records if record.name == "grelmicro.coordination"]
        assert len(told) == 2  # for an outage of any length
        told_first = (
            " (task job) has trouble since 0.0 s: it did not run, since it could not be told whose turn it is: "
        )
        assert told_first in told[0]
        assert "Store works again after " in told[1]
        caplog.clear()


async def test_without_a_backend_it_is_tried_again_at_each_due_time(
    clock: MovableClock, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = Tasks(clock=clock)
    tasks.every(seconds=2, name="job", lock=TaskLock())(lambda: None)
    async with tasks:
        await clock.advance(5.0)
        (task,) = tasks.tasks
        assert isinstance(task, IntervalTask)
        assert task.outcomes["coordination_error"] == 3
    assert "TaskLock 'job': no app is open" in caplog.text


@pytest.mark.parametrize("fault", [request_lost, reply_lost])
async def test_a_lock_that_cannot_be_given_back_does_not_unmake_the_run(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, fault: object
) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(2.0, lock={}, start=False)
        hand.store.suffer("renew", fault)  # type: ignore[arg-type]
        await hand.start()
        await crew.let_pass(1.0)
        assert hand.outcomes == {"success": 1}
        await crew.let_pass(4.5)
        assert len(hand.runs) == 3  # the hold was shortened all the same
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_waiting_for_a_refusal_to_end_can_be_stopped(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(100.0, lock={"min_hold_duration": 109.0, "lease_duration": 200})
        await crew.let_pass(101.0)
        await asyncio.wait_for(hand.stop(), 5)
        assert hand.outcomes == {"success": 1, "skipped": 1}
