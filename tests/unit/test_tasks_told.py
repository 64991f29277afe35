"""What operators learn of tasks: a line about each run, and which tasks are overdue."""

import asyncio
import logging
from functools import partial

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, HealthCheck, LeaderElection
from grelmicro.task import FireOutcome, IntervalTask, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.crews import Crew
from tests.helpers.timeline import pause
from tests.helpers.worlds import World, eventually


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The lines about fires, and their levels."""
    return [
        (record.levelname, record.getMessage()) for record in caplog.records if record.getMessage().endswith(" s late")
    ]


async def test_a_run_is_one_line_and_another_workers_turn_is_a_debug_line(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "grelmicro.task")
    async with Crew(world, clock) as crew:
        first = await crew.hand(10.0, partial(pause, clock, 2.0), lock={})
        await crew.let_pass(3.0)
        await crew.hand(10.0, lock={})
        assert lines(caplog) == [
            ("INFO", "task job: success in 2.000 s, 0.000 s late"),
            ("DEBUG", "task job: skipped in 0.000 s, 0.000 s late"),
        ]
        assert first.task.last_fire is not None
        assert first.task.last_fire.lateness == 0.0


async def test_a_late_run_says_so(clock: MovableClock, nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "grelmicro.task")
    tasks, lengths = Tasks(clock=clock), [10.75, 1.0]

    @tasks.every(seconds=10, name="job")
    async def job() -> None:
        await pause(clock, lengths.pop(0))

    async with tasks:
        await clock.advance(13.0)
        (task,) = tasks.tasks
        assert isinstance(task, IntervalTask)
        assert task.last_fire is not None
        assert task.last_fire.lateness == 0.75
    assert lines(caplog)[1:] == [("INFO", "task job: success in 1.000 s, 0.750 s late")]


@pytest.mark.parametrize("by", ["keyword", "variable", "reconfigure"])
async def test_the_lines_can_be_debug_lines(
    clock: MovableClock,
    nothing_left: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    caplog.set_level(logging.DEBUG, "grelmicro.task")
    if by == "variable":
        monkeypatch.setenv("GREL_TASK_FIRE_LOG_LEVEL", "DEBUG")
    tasks = Tasks(clock=clock, fire_log_level="DEBUG") if by == "keyword" else Tasks(clock=clock)
    tasks.every(seconds=10, name="job")(lambda: None)
    if by == "reconfigure":
        await tasks.reconfigure(tasks.config.model_copy(update={"fire_log_level": "DEBUG"}))
    async with tasks:
        await clock.advance(1.0)
    assert lines(caplog) == [("DEBUG", "task job: success in 0.000 s, 0.000 s late")]


async def test_an_outcome_is_text(clock: MovableClock, nothing_left: None) -> None:
    tasks = Tasks(clock=clock)
    tasks.every(seconds=10, name="job")(lambda: None)
    async with tasks:
        await clock.advance(1.0)
        (task,) = tasks.tasks
        assert isinstance(task, IntervalTask)
        assert task.last_fire is not None
        assert task.last_fire.outcome is FireOutcome.SUCCESS
        assert f"{task.last_fire.outcome}" == "success"
        assert task.outcomes[FireOutcome.SUCCESS] == task.outcomes["success"] == 1


@pytest.fixture
def hanging(clock: MovableClock, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """A task whose first run is quick, and whose second one hangs."""
    monkeypatch.setattr("grelmicro.testing.clock.WORK_LIMIT", 0.05)
    tasks, runs = Tasks(clock=clock, shutdown_timeout=0.0), []

    @tasks.every(seconds=20, name="job")
    async def job() -> None:
        runs.append(1)
        if len(runs) > 1:
            await asyncio.Event().wait()

    return tasks


async def test_a_function_that_does_not_end_makes_its_task_overdue(
    hanging: Tasks, clock: MovableClock, nothing_left: None
) -> None:
    async with hanging:
        await clock.advance(19.0)
        assert hanging.overdue() == {}
        await clock.advance(40.0)
        assert hanging.overdue() == {}
        await clock.advance(2.0)
        assert hanging.overdue() == {"job": 21.0}
    assert hanging.overdue() == {}


async def test_quick_tasks_are_not_overdue_for_a_while(clock: MovableClock, nothing_left: None) -> None:
    """A second between two fires is no measure of how long a function may take."""
    tasks = Tasks(clock=clock, shutdown_timeout=0.0)
    tasks.every(seconds=1, name="job")(partial(pause, clock, 15.0))
    async with tasks:
        for _ in range(40):
            await clock.advance(1.0)
            assert tasks.overdue() == {}


async def test_another_workers_turn_makes_no_task_overdue(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        await crew.hand(5.0, lock={})
        await crew.let_pass(1.0)
        follower = await crew.hand(5.0, lock={})
        for _ in range(20):
            await crew.let_pass(5.0)
            assert follower.tasks.overdue() == {}


async def test_a_task_that_ended_is_overdue(
    clock: MovableClock, nothing_left: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = Tasks(tasks=[IntervalTask("job", lambda: None, 20, leader=LeaderElection("job"))], clock=clock)

    def fail(self: LeaderElection) -> None:
        raise RuntimeError("of another event loop")

    async with tasks:
        monkeypatch.setattr(LeaderElection, "is_leader", fail)
        await clock.advance(21.0)
        await eventually(lambda: "task job ended while the others run on" in caplog.text, "it is told")
        await clock.advance(40.0)
        assert tasks.overdue() == {"job": 41.0}


async def test_a_health_check_reports_what_is_overdue(hanging: Tasks, clock: MovableClock, nothing_left: None) -> None:
    coordination = Coordination(MemoryStore(clock=clock))
    async with coordination, hanging, HealthCheck(coordination, tasks=hanging, clock=clock) as check:
        await clock.advance(30.0)
        report = await check.report()
        assert (report.good, report.overdue) == (True, {})
        await clock.advance(50.0)
        report = await check.report()
        assert (report.good, report.overdue) == (False, {"job": 40.0})
