"""Tasks start when all that they use is open, say what goes wrong, and leave nothing running when they end."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock
from grelmicro.errors import OutOfContextError, SettingsValidationError, TaskError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import IntervalTask, Tasks, TasksConfig
from grelmicro.task import tasks as module
from grelmicro.testing import MovableClock
from tests.helpers.crews import Crew
from tests.helpers.parts import Part
from tests.helpers.stores import Gate
from tests.helpers.timeline import pause
from tests.helpers.worlds import World, eventually

Body = Callable[[asyncio.Future[None], asyncio.Event], Awaitable[None]]


class Custom:
    """A task of an application's own."""

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self.body = body
        self.log: list[str] = []

    async def __call__(self, *, ready: asyncio.Future[None] | None = None, stop: asyncio.Event | None = None) -> None:
        assert ready is not None
        assert stop is not None
        self.log.append("begins")
        try:
            await self.body(ready, stop)
        finally:
            self.log.append("ends")


async def good(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
    ready.set_result(None)
    await stop.wait()


async def fails(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
    raise ValueError("of the task")


async def returns(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
    return


async def cancels_itself(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
    raise asyncio.CancelledError


async def is_never_ready(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (fails, ValueError, "^of the task$"),
        (returns, TaskError, "^task 'bad' ended before it was ready: complete the `ready` future first$"),
        (cancels_itself, TaskError, "^task 'bad' ended before it was ready: complete the `ready` future first$"),
        (is_never_ready, TaskError, "^task 'bad' was not ready within 0.05 s$"),
    ],
)
async def test_a_task_that_does_not_start_is_told_and_nothing_stays(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch, body: Body, error: type[Exception], text: str
) -> None:
    monkeypatch.setattr(module, "START_LIMIT", 0.05)
    before = asyncio.all_tasks()
    log: list[str] = []
    first, bad, last = Custom("first", good), Custom("bad", body), Custom("last", good)
    tasks = Tasks(tasks=[first, LeaderElection("job"), bad, last])
    micro = Grelmicro(uses=[tasks, Part("store", log), Coordination(MemoryProvider())])
    with pytest.raises(error, match=text) as raised:
        async with micro:
            raise AssertionError("it opened")
    assert raised.type is error
    assert (first.log, bad.log, last.log) == (["begins", "ends"], ["begins", "ends"], [])
    assert log == ["open store", "close store"]
    assert asyncio.all_tasks() == before
    assert not tasks.started()


async def test_a_start_that_is_cancelled_leaves_nothing(nothing_left: None) -> None:
    first, bad = Custom("first", good), Custom("bad", is_never_ready)
    tasks = Tasks(tasks=[first, bad], shutdown_timeout=0.05)
    opening = asyncio.create_task(tasks.__aenter__())
    await eventually(lambda: bad.log, "it began")
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert (first.log, bad.log) == (["begins", "ends"], ["begins", "ends"])


@pytest.mark.parametrize("error", [ValueError("of the task"), None])
async def test_a_task_that_ends_too_soon_is_told_at_once(
    nothing_left: None, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    async def ends_soon(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        ready.set_result(None)
        await asyncio.sleep(0.01)
        if error is not None:
            raise error

    async with Tasks(tasks=[Custom("bad", ends_soon), Custom("good", good)]):
        await eventually(lambda: caplog.records, "it is told")
        (record,) = caplog.records
        assert (record.levelno, record.getMessage()) == (logging.ERROR, "task bad ended while the others run on")
        assert (record.exc_info[1] if record.exc_info else None) is error


async def test_a_crash_right_after_the_start_is_told(nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    async def crashes(ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        ready.set_result(None)
        raise ValueError("of the task")

    async with Tasks(tasks=[Custom("bad", crashes), Custom("good", good)]):
        await eventually(lambda: "task bad ended while the others run on" in caplog.text, "it is told")


@pytest.mark.parametrize("reverse", [False, True])
async def test_tasks_find_everything_open_from_the_first_fire_to_the_last(nothing_left: None, reverse: bool) -> None:
    """Wherever they stand among what the app uses."""
    log: list[str] = []
    tasks = Tasks()
    began, go_on = asyncio.Event(), asyncio.Event()

    @tasks.every(seconds=60)
    async def job() -> None:
        log.append("first")
        async with Lock("a"):
            began.set()
        await go_on.wait()
        async with Lock("b"):
            log.append("last")

    uses: list[object] = [Coordination(MemoryProvider()), Part("store", log), tasks]
    micro = Grelmicro(uses=reversed(uses) if reverse else uses)
    async with micro:
        await began.wait()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
    assert log == ["open store", "first", "last", "close store"]


async def test_a_fire_that_runs_is_finished_and_no_other_begins(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(1.0, partial(pause, clock, 5.0), lock={})
        await crew.let_pass(0.5)
        stop = asyncio.create_task(hand.stop())
        await crew.let_pass(4.0)
        assert not stop.done()
        await crew.let_pass(1.0)
        await asyncio.wait_for(stop, 5)
        assert (len(hand.runs), hand.outcomes["success"]) == (1, 1)


async def test_a_fire_that_does_not_end_in_time_is_cancelled(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    tasks = Tasks(shutdown_timeout=0.05)

    @tasks.every(seconds=60, name="job")
    async def job() -> None:
        log.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            log.append("ends")

    async with tasks:
        await eventually(lambda: log, "it runs")
    assert log == ["begins", "ends"]
    (task,) = tasks.tasks
    assert isinstance(task, IntervalTask)
    assert (task.outcomes["error"], sum(task.outcomes.values())) == (1, 1)
    assert "task job did not end in time and is cancelled" in caplog.text


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "soon"])
def test_the_shutdown_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(
        SettingsValidationError,
        match=r"^Tasks: shutdown_timeout \(keyword\) should be .*: give a value within the rule",
    ):
        Tasks(shutdown_timeout=timeout)


async def test_a_thread_that_does_not_end_in_time_keeps_its_lock_as_long_as_it_runs(real_world: World) -> None:
    begun, go_on = threading.Event(), threading.Event()
    async with real_world.client() as backend, real_world.client() as other:
        tasks = Tasks(shutdown_timeout=0.0)

        @tasks.every(seconds=0.01, name="job", lock=TaskLock(backend=backend))
        def job() -> None:
            begun.set()
            assert go_on.wait(10)

        await tasks.__aenter__()
        await eventually(begun.is_set, "it runs")
        stop = asyncio.create_task(tasks.__aexit__(None, None, None))
        await asyncio.sleep(0.2)
        record = await other.read("tasklock:job")
        assert record is not None
        assert record.live
        go_on.set()
        await asyncio.wait_for(stop, 10)
        record = await other.read("tasklock:job")
        assert record is not None
        assert record.remaining < 0.02


async def test_a_thread_that_outlives_its_lease_is_waited_for_no_longer(real_world: World) -> None:
    begun, go_on = threading.Event(), threading.Event()
    async with real_world.client() as backend:
        tasks = Tasks(shutdown_timeout=0.0)

        lock = TaskLock(backend=backend, lease_duration=0.3, min_hold_duration=0.01)

        @tasks.every(seconds=0.01, name="job", lock=lock)
        def job() -> None:
            begun.set()
            assert go_on.wait(10)

        await tasks.__aenter__()
        await eventually(begun.is_set, "it runs")
        await asyncio.wait_for(tasks.__aexit__(None, None, None), 5)
        go_on.set()


async def test_a_long_fire_of_another_task_does_not_hold_up_a_successor(real_world: World) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()
    leader, successor = LeaderElection("job"), LeaderElection("job")
    tasks = Tasks(tasks=[leader])

    @tasks.every(seconds=60)
    async def long() -> None:
        began.set()
        await go_on.wait()

    async with Grelmicro(uses=[Coordination(real_world.store()), tasks]):
        await asyncio.wait_for(leader.wait_for_leader(), 10)
        await began.wait()
        service = asyncio.create_task(successor())
        await eventually(lambda: successor.record, "the successor stands")
        tasks.hand_over()
        await asyncio.wait_for(successor.wait_for_leader(), 10)
        go_on.set()
        service.cancel()
        await asyncio.wait({service})


async def test_the_leaders_fire_ends_before_its_term(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(60.0, partial(pause, clock, 5.0), leader=True)
        assert hand.leader is not None
        await eventually(lambda: hand.runs, "it runs")
        hand.tasks.hand_over()
        await crew.let_pass(4.5)
        assert hand.leader.is_leader()
        await crew.let_pass(1.0)
        assert not hand.leader.is_leader()
        assert hand.task.outcomes["success"] == 1


async def test_an_election_gives_its_lease_back_although_there_is_no_patience(real_world: World) -> None:
    store = real_world.troubled()
    provider = Coordination(store)
    leader = LeaderElection("job", lease_duration=3600)
    tasks = Tasks(tasks=[leader], shutdown_timeout=0.0)
    async with Grelmicro(uses=[provider, tasks]):
        await asyncio.wait_for(leader.wait_for_leader(), 10)
        gate = Gate()
        store.suffer("release", gate)
        asyncio.get_running_loop().call_later(0.2, gate.open.set)
    assert gate.arrived.is_set()
    async with real_world.store() as own:
        record = await own.read("leader:job")
    assert record is not None
    assert not record.live


async def test_tasks_open_again(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(2.0, leader=True)
        for _ in range(3):
            await eventually(lambda: hand.leader is not None and hand.leader.is_leader(), "it leads")
            await crew.let_pass(5.0)
            hand.tasks.hand_over()
            hand.tasks.hand_over()
            await crew.let_pass(3.0)
            ran = len(hand.runs)
            await crew.let_pass(5.0)
            assert len(hand.runs) == ran > 0
            await crew.stop(hand)
            await hand.start()


async def test_a_close_that_is_cancelled_cancels_what_runs(nothing_left: None) -> None:
    log: list[str] = []
    leader = LeaderElection("job")
    tasks = Tasks(tasks=[leader])

    @tasks.every(seconds=60)
    async def job() -> None:
        log.append("begins")
        try:
            await asyncio.Event().wait()
        finally:
            log.append("ends")

    async with Grelmicro(uses=[Coordination(MemoryProvider())]):
        await tasks.__aenter__()
        await eventually(lambda: log and leader.is_leader(), "both run")
        closing = asyncio.create_task(tasks.__aexit__(None, None, None))
        await asyncio.sleep(0.02)
        assert not closing.done()
        closing.cancel()
        await asyncio.wait({closing})
        assert closing.cancelled()
        assert log == ["begins", "ends"]
        assert not leader.is_running()


async def test_they_start_when_they_are_told_to(nothing_left: None) -> None:
    ran: list[str] = []
    tasks = Tasks(auto_start=False)
    async with Grelmicro(uses=[Coordination(MemoryProvider()), tasks]):
        tasks.every(seconds=60, name="job", lock=TaskLock())(lambda: ran.append("job"))  # also after the opening
        await asyncio.sleep(0.01)
        assert (ran, tasks.started()) == ([], False)
        await tasks.start()
        assert tasks.started()
        await eventually(lambda: ran, "it ran")
        with pytest.raises(TaskError, match="^the tasks run already: start"):
            await tasks.start()
        with pytest.raises(TaskError, match="came after the start"):
            tasks.every(seconds=60, name="late")(lambda: None)
    assert not tasks.started()
    with pytest.raises(OutOfContextError, match="Tasks is not open"):
        await tasks.start()
    async with Grelmicro(uses=[Coordination(MemoryProvider()), tasks]):
        assert not tasks.started()


async def test_a_start_that_fails_leaves_nothing_and_can_be_tried_again(nothing_left: None) -> None:
    first, bad = Custom("first", good), Custom("bad", fails)
    tasks = Tasks(tasks=[first, bad], auto_start=False)
    async with tasks:
        for _ in range(2):
            with pytest.raises(ValueError, match="of the task"):
                await tasks.start()
            assert not tasks.started()
    assert first.log == ["begins", "ends"] * 2


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASK_SHUTDOWN_TIMEOUT", "3")
    assert Tasks().config == TasksConfig(shutdown_timeout=3)
    assert Tasks(shutdown_timeout=0).config.shutdown_timeout == 0
    assert Tasks.from_config(TasksConfig()).config.shutdown_timeout == 30
    monkeypatch.setenv("GREL_TASK_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(SettingsValidationError, match=r"environment variable GREL_TASK_SHUTDOWN_TIMEOUT\)"):
        Tasks()


async def test_a_shutdown_timeout_is_changed_while_they_run(nothing_left: None) -> None:
    began = asyncio.Event()
    tasks = Tasks(shutdown_timeout=60)

    @tasks.every(seconds=60, name="job")
    async def job() -> None:
        began.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(20), tasks:
        await began.wait()
        await tasks.reconfigure(TasksConfig(shutdown_timeout=0.05))


async def test_a_task_is_run_by_its_name(nothing_left: None) -> None:
    ran: list[str] = []
    tasks = Tasks(tasks=[LeaderElection("a")])
    tasks.every(seconds=60, name="job")(lambda: ran.append("job"))
    assert (await tasks.run_now("job")).outcome == "success"
    assert ran == ["job"]
    with pytest.raises(TaskError, match="^there is no task named 'a': the tasks are job$"):
        await tasks.run_now("a")
