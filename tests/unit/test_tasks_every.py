"""A task fires on a grid of due times, and each due time ends in one outcome."""

import asyncio
import contextvars
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from grelmicro import events
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.crews import Crew
from tests.helpers.timeline import pause
from tests.helpers.worlds import World, eventually


@pytest.fixture
def world(tmp_path: Path, clock: MovableClock, nothing_left: None) -> World:
    """Without a lock there is nothing to store."""
    return World("memory", tmp_path, clock)


async def test_it_fires_at_the_start_and_then_at_each_due_time(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        hand = await crew.hand(2.0)
        await crew.let_pass(10.0)
        assert hand.runs == [start + due for due in (0, 2, 4, 6, 8, 10)]
        assert hand.outcomes == {"success": 6}


async def test_the_grid_does_not_drift(world: World, clock: MovableClock) -> None:
    """However long each run takes, and however late a timer is."""
    async with Crew(world, clock) as crew:
        start = clock.now()
        hand = await crew.hand(1.0, partial(pause, clock, 0.6))
        for _ in range(200):
            await crew.let_pass(0.5)
            clock._now += 0.01  # nothing else moves: timers are late
        assert len(hand.runs) == pytest.approx(clock.now() - start, abs=2)
        assert all((run - start) % 1.0 < 0.05 for run in hand.runs)


async def test_due_times_during_a_run_are_missed(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        hand = await crew.hand(2.0, partial(pause, clock, 5.0))
        await crew.let_pass(11.0)
        assert hand.runs == [start, start + 6.0]
        assert hand.outcomes == {"success": 2, "missed": 4}
    assert "task job missed 2 fires: it ran, or this process stood still, for too long" in caplog.text


async def test_a_due_time_that_is_hardly_over_is_not_missed(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        hand = await crew.hand(10.0, partial(pause, clock, 10.75))
        await crew.let_pass(21.75)
        assert hand.runs == [start, start + 10.75]
        hand.work = partial(pause, clock, 20.5)
        await crew.let_pass(30.0)
        assert hand.runs[2:] == [start + 30.0, start + 50.5]  # one was missed, and the next one was not
        assert hand.outcomes == {"success": 3, "missed": 2}


async def test_a_process_that_stood_still_makes_nothing_up(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = clock.now()
        hand = await crew.hand(2.0)
        await crew.let_pass(1.0)
        clock._now += 3600.5
        await crew.let_pass(0.1)
        assert hand.runs == [start]
        assert hand.outcomes == {"success": 1, "missed": 1800}
        await crew.let_pass(2.0)
        assert hand.runs == [start, start + 3602]


async def test_an_error_ends_one_run_only(world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("of the work")

    async with Crew(world, clock) as crew:
        hand = await crew.hand(1.0, fail)
        await crew.let_pass(3.0)
        assert (len(hand.runs), hand.outcomes) == (4, {"error": 4})
    assert "task job failed" in caplog.text
    assert "of the work" in caplog.text


async def test_it_tells_when_it_fires_next_and_how_it_went_last(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        start = datetime.fromtimestamp(clock.wall(), UTC)
        hand = await crew.hand(10.0, partial(pause, clock, 3.0))
        assert hand.task.last_fire is None
        assert hand.task.next_fire_time == start  # the one that runs
        await crew.let_pass(4.0)
        fire = hand.task.last_fire
        assert fire is not None
        assert (fire.started_at, fire.outcome, fire.duration) == (start, "success", 3.0)
        assert hand.task.next_fire_time == start + timedelta(seconds=10)
        await crew.stop(hand)
        assert hand.task.next_fire_time is None


async def test_each_fire_is_an_event(world: World, clock: MovableClock) -> None:
    seen: list[events.Event] = []
    stop = events.listen(seen.append)
    try:
        async with Crew(world, clock) as crew:
            hand = await crew.hand(2.0, partial(pause, clock, 5.0))
            await crew.let_pass(7.0)
            await crew.stop(hand)
    finally:
        stop()
    fired = [event for event in seen if event.kind == "fired"]
    assert [(event.name, event.seconds, event.detail, event.count) for event in fired] == [
        ("job", 5.0, "success", 1),
        ("job", 0.0, "missed", 2),
        ("job", 5.0, "success", 1),
    ]


async def test_a_plain_function_runs_in_a_thread_with_the_context_of_the_start(world: World) -> None:
    number = contextvars.ContextVar("number", default=0)
    seen: list[tuple[bool, int]] = []
    tasks = Tasks()

    @tasks.every(seconds=60)
    def job() -> None:
        seen.append((threading.current_thread() is threading.main_thread(), number.get()))
        number.set(2)

    number.set(1)
    async with tasks:
        await eventually(lambda: seen, "it ran")
    assert seen == [(False, 1)]
    assert number.get() == 1


async def test_a_plain_function_that_returns_a_coroutine_is_awaited(world: World, clock: MovableClock) -> None:
    """As functions do that were wrapped by a decorator which knows nothing of coroutines."""
    ran: list[str] = []

    class Job:
        async def __call__(self) -> None:
            await asyncio.sleep(0)
            ran.append("object")

    async def work() -> None:
        await asyncio.sleep(0)
        ran.append("wrapped")

    tasks = Tasks()
    tasks.every(seconds=60, name="wrapped")(lambda: work())
    tasks.every(seconds=60, name="object")(Job())
    tasks.every(seconds=60, name="partial")(partial(work))
    async with tasks:
        await eventually(lambda: len(ran) == 3, "each ran")
    assert sorted(ran) == ["object", "wrapped", "wrapped"]


async def test_an_error_in_a_thread_is_counted(world: World) -> None:
    tasks = Tasks()

    @tasks.every(seconds=60, name="job")
    def job() -> None:
        raise ValueError("of the thread")

    async with tasks:
        (task,) = tasks.tasks
        assert isinstance(task, IntervalTask)
        await eventually(lambda: task.outcomes["error"], "it failed")


async def test_two_tasks_run_side_by_side(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        slow = await crew.hand(1.0, partial(pause, clock, 100.0))
        quick = await crew.hand(1.0)
        await crew.let_pass(10.0)
        assert (len(slow.runs), len(quick.runs)) == (1, 11)


async def test_many_that_were_missed_are_one_event(world: World, clock: MovableClock) -> None:
    """A process that slept for a day must not tell of each thousandth of a second of it."""
    seen: list[events.Event] = []
    async with Crew(world, clock) as crew:
        hand = await crew.hand(0.001)
        stop = events.listen(seen.append)
        try:
            clock._now += 24 * 3600.0
            await crew.let_pass(0.1)
        finally:
            stop()
        assert hand.outcomes["missed"] > 86_000_000
    told = [event for event in seen if event.detail == "missed"]
    assert len(told) <= 2
    assert sum(event.count for event in told) == hand.outcomes["missed"]


async def test_missed_fires_are_told_at_the_beginning_and_then_now_and_then(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(10.0, partial(pause, clock, 15.0))
        await crew.let_pass(1216.0)
        missed = hand.outcomes["missed"]
    told = [record.getMessage() for record in caplog.records if " missed " in record.getMessage()]
    # The first one, and those of each ten minutes after it.
    assert told == [
        f"task job missed {number} fires: it ran, or this process stood still, for too long" for number in (1, 30, 30)
    ]
    assert missed == 61


async def test_work_that_never_waits_does_not_keep_others_from_running(world: World, clock: MovableClock) -> None:
    """Each run takes as long as the interval, so the next one is due when it ends."""
    turns: list[int] = []

    async def other() -> None:
        while True:
            turns.append(len(hand.runs))
            await asyncio.sleep(0)

    async def work() -> None:
        if len(hand.runs) < 100:
            clock._now += 1.0

    async with Crew(world, clock) as crew:
        hand = await crew.hand(1.0, start=False)
        hand.work = work
        beside = asyncio.create_task(other())
        await hand.start()
        await eventually(lambda: len(hand.runs) >= 100, "it ran")
        beside.cancel()
    assert len(set(turns)) > 90
