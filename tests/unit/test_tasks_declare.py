"""What can be declared as a task, under which name, and with which lock."""

import asyncio
import gc
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock, TaskLockConfig
from grelmicro.coordination.memory import MemoryLockAdapter
from grelmicro.errors import SettingsValidationError, TaskError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import IntervalTask, TaskRouter, Tasks, errors
from grelmicro.testing import MovableClock

INTERVAL = "should be a number of seconds, 0.001 or more and at most ten years: give it as int or float, such as 5"


def tick() -> None:
    return


def of(router: TaskRouter) -> list[IntervalTask]:
    """The tasks of a router."""
    tasks = [task for task in router.tasks if isinstance(task, IntervalTask)]
    assert len(tasks) == len(router.tasks)
    return tasks


def lock_of(router: TaskRouter) -> TaskLock:
    """The lock of its only task."""
    (task,) = of(router)
    assert task.lock is not None
    return task.lock


@pytest.mark.parametrize(
    "seconds",
    [
        0,
        -1,
        1e-6,
        0.000_999,
        timedelta(microseconds=1),
        float("nan"),
        float("inf"),
        True,
        "5",
        timedelta(0),
        1e12,
    ],
)
def test_an_interval_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        TaskRouter().every(seconds=seconds)
    assert str(caught.value) == f"every(seconds=) {INTERVAL}"
    with pytest.raises(SettingsValidationError) as caught:
        IntervalTask("job", tick, seconds)
    assert str(caught.value) == f"IntervalTask seconds {INTERVAL}"


@pytest.mark.parametrize(
    ("given", "seconds"), [(5, 5.0), (0.001, 0.001), (timedelta(milliseconds=1), 0.001), (timedelta(minutes=1), 60.0)]
)
def test_an_interval_is_kept_in_seconds(given: float | timedelta, seconds: float) -> None:
    router = TaskRouter()
    assert router.every(seconds=given)(tick) is tick
    (task,) = of(router)
    assert (task.seconds, task.function, task.name) == (seconds, tick, f"{__name__}:tick")
    assert task.next_fire_time is None


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda router: router.every(tick), "@tasks.every needs an interval: write @tasks.every(seconds=60)"),
        (lambda router: router.every(60), "every() takes its arguments by name: write every(seconds=60)"),
        (lambda router: router.every(), "every() needs an interval: give seconds=, such as every(seconds=60)"),
        (lambda router: router.every(seconds=None), "every() needs an interval: give seconds=, such as"),
    ],
)
def test_what_is_written_otherwise_is_refused_with_the_right_way(misuse: Callable[[Any], object], text: str) -> None:
    with pytest.raises(SettingsValidationError, match=f"^{re.escape(text)}"):
        misuse(TaskRouter())


@pytest.mark.parametrize(
    ("keywords", "hint"),
    [
        ({"minutes": 1}, "'minutes': seconds= takes a number of seconds, or a timedelta"),
        ({"hours": 1, "lock": TaskLock()}, "'hours': seconds= takes a number of seconds, or a timedelta"),
        ({"second": 1}, "'second': did you mean seconds=?"),
        ({"seconds": 1, "locks": None}, "'locks': did you mean lock=?"),
        ({"seconds": 1, "x": 1}, "'x': it knows seconds=, name=, lock=, leader="),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_right_one(keywords: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"^every\\(\\) got an unexpected keyword argument {re.escape(hint)}$"):
        TaskRouter().every(**keywords)


@pytest.mark.parametrize("builtin", [print, dict, int, time.time, gc.collect, breakpoint])
def test_a_builtin_is_a_function_too(builtin: Callable[[], object]) -> None:
    """Also one whose signature is not known."""
    router = TaskRouter()
    router.every(seconds=1)(builtin)
    (task,) = of(router)
    assert task.function is builtin


TEN_YEARS = 10 * 366 * 24 * 3600


@pytest.mark.parametrize("lock", [None, TaskLock(), TaskLock(auto_renew=True)], ids=["alone", "lock", "renewed"])
async def test_ten_years_are_an_interval(clock: MovableClock, nothing_left: None, lock: TaskLock | None) -> None:
    for seconds in (TEN_YEARS, timedelta(seconds=TEN_YEARS)):
        ran: list[float] = []
        tasks = Tasks(clock=clock)
        tasks.every(seconds=seconds, name="job", lock=lock)(lambda ran=ran: ran.append(clock.now()))
        async with Grelmicro(uses=[Coordination(MemoryProvider(clock=clock)), tasks]):
            begun = clock.now()
            await clock.advance(TEN_YEARS)
            assert ran == [begun, begun + TEN_YEARS]
            (task,) = of(tasks)
            assert task.next_fire_time is not None


def test_the_errors_of_tasks_have_a_door() -> None:
    assert errors.TaskError is TaskError


class Callable_:
    """An object that can be called."""

    def __call__(self) -> None:
        return


@pytest.mark.parametrize("function", [lambda: None, partial(tick), Callable_()], ids=["lambda", "partial", "object"])
def test_what_has_no_name_of_its_own_needs_one(function: Callable[[], None]) -> None:
    router = TaskRouter()
    with pytest.raises(
        TaskError,
        match=re.escape("every() needs a function with a name of its own: define it with def, or give name="),
    ):
        router.every(seconds=1)(function)
    router.every(seconds=1, name="a name")(function)
    assert [task.name for task in router.tasks] == ["a name"]


def test_arguments_need_defaults() -> None:
    def needs(one: int, *, other: int) -> None:
        return

    def optional(one: int = 1, *others: int, other: int = 2, **more: int) -> None:
        return

    router = TaskRouter()
    with pytest.raises(
        TaskError, match="^task job is called without arguments, but needs one, other: give them defaults$"
    ):
        router.every(seconds=1, name="job")(needs)  # type: ignore[type-var]
    router.every(seconds=1)(optional)


def generate() -> Iterator[int]:
    yield 1


async def generate_async() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generate, generate_async])
def test_a_generator_is_no_task(function: Callable[[], object]) -> None:
    with pytest.raises(
        TaskError,
        match="^task job is a generator, of which nothing runs when it is called: write it without yield$",
    ):
        TaskRouter().every(seconds=1, name="job")(function)


def test_only_functions_are_tasks() -> None:
    with pytest.raises(TaskError, match=r"^every\(\) decorates a function, not int$"):
        TaskRouter().every(seconds=1)(5)  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 256, 5])
def test_a_name_is_short_text(name: Any) -> None:
    with pytest.raises(SettingsValidationError, match=r"^every\(name=\): name "):
        TaskRouter().every(seconds=1, name=name)(tick)


def test_two_tasks_of_one_name_would_share_a_lock() -> None:
    router = TaskRouter()
    router.every(seconds=1, name="job")(tick)
    refusal = "^there is a task named 'job' already, and both would share one lock: give one another name=$"
    with pytest.raises(TaskError, match=refusal):
        router.every(seconds=2, name="job")(tick)
    with pytest.raises(TaskError, match=refusal):
        router.include_router(TaskRouter(tasks=of(router)))
    with pytest.raises(TaskError, match=refusal):
        Tasks(tasks=of(router) * 2)
    assert len(router.tasks) == 1


def test_two_candidates_for_one_role_may_run_in_one_process() -> None:
    first, second = LeaderElection("job"), LeaderElection("job")
    tasks = Tasks(tasks=[first, second])
    tasks.every(seconds=1, name="job")(tick)
    assert tasks.tasks[:2] == (first, second)
    with pytest.raises(TaskError, match="^there is a task named 'job' already"):
        tasks.add_task(first)


def test_a_router_gives_its_tasks_on() -> None:
    outer, inner, tasks = TaskRouter(), TaskRouter(), Tasks()
    inner.every(seconds=1, name="inner")(tick)
    outer.every(seconds=1, name="outer")(tick)
    outer.include_router(inner)
    tasks.include_router(outer)
    assert [task.name for task in tasks.tasks] == ["outer", "inner"]


async def test_tasks_are_added_before_the_start() -> None:
    router = TaskRouter()
    router.every(seconds=1, name="late")(tick)
    refusal = "^task 'late' came after the start: add it before the app is opened$"
    async with Tasks() as tasks:
        assert tasks.started()
        with pytest.raises(TaskError, match=refusal):
            tasks.every(seconds=1, name="late")(tick)
        with pytest.raises(TaskError, match=refusal):
            tasks.include_router(router)
    assert not tasks.started()
    tasks.include_router(router)


def test_a_lock_takes_the_tasks_name_and_interval() -> None:
    router = TaskRouter()
    router.every(seconds=90, name="job", lock=TaskLock())(tick)
    lock = lock_of(router)
    assert (lock.name, lock.config.min_hold_duration, lock.config.lease_duration) == ("job", 90.0, 90.0)


def test_a_lease_is_at_least_as_long_as_its_default() -> None:
    router = TaskRouter()
    router.every(seconds=5, name="job", lock=TaskLock())(tick)
    assert lock_of(router).config.lease_duration == 60.0


def test_what_is_given_is_kept() -> None:
    backend = MemoryLockAdapter()
    settings = TaskLockConfig(worker="web-1", lease_duration=30, min_hold_duration=2, auto_renew=True, max_hold=99)
    given = TaskLock.from_config("maintenance", settings, backend=backend)
    router = TaskRouter()
    router.every(seconds=5, name="job", lock=given)(tick)
    lock = lock_of(router)
    assert lock is not given
    assert (lock.name, lock.worker, lock.given_backend) == ("maintenance", "web-1", backend)
    assert lock.config == given.config
    assert given.config.min_hold_duration == 2


def test_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_MIN_HOLD_DURATION", "3")
    monkeypatch.setenv("GREL_TASKLOCK_LEASE_DURATION", "33")
    router = TaskRouter()
    router.every(seconds=5, name="job", lock=TaskLock())(tick)
    assert (lock_of(router).config.min_hold_duration, lock_of(router).config.lease_duration) == (3.0, 33.0)


def test_a_nameless_lock_reads_the_variables_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_LEASE_DURATION", "20")
    monkeypatch.setenv("GREL_TASKLOCK_MAX_HOLD", "200")
    monkeypatch.setenv("GREL_TASKLOCK_DEFAULT_MAX_HOLD", "300")
    monkeypatch.setenv("GREL_TASKLOCK_NIGHT_JOB_LEASE_DURATION", "30")
    monkeypatch.setenv("GREL_TASKLOCK_NIGHT_JOB_WORKER", "web-1")
    monkeypatch.setenv("GREL_TASKLOCK_NIGHT_JOB_AUTO_RENEW", "true")
    monkeypatch.setenv("GREL_TASKLOCK_OTHER_LEASE_DURATION", "40")
    monkeypatch.setenv("SHOP_LEASE_DURATION", "50")

    def declared(lock: TaskLock) -> TaskLock:
        router = TaskRouter()
        router.every(seconds=5, name="night-job", lock=lock)(tick)
        return lock_of(router)

    nameless, keyword = declared(TaskLock()), declared(TaskLock(lease_duration=25, auto_renew=False))
    assert nameless.config == TaskLockConfig(
        worker="web-1", lease_duration=30, min_hold_duration=5, auto_renew=True, max_hold=200
    )
    assert nameless.worker == "web-1"
    assert (keyword.config.lease_duration, keyword.config.auto_renew, keyword.config.max_hold) == (25, False, 200)
    assert declared(TaskLock("other")).config.lease_duration == 40
    assert declared(TaskLock(env_prefix="SHOP_")).config.lease_duration == 50
    ready = TaskLock.from_config("default", TaskLockConfig(max_hold=9))
    assert declared(ready).config == TaskLockConfig(max_hold=9, min_hold_duration=5)
    assert declared(ready).name == "night-job"


async def test_a_nameless_lock_keeps_new_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_JOB_LEASE_DURATION", "30")
    lock = TaskLock(lease_duration=40)
    await lock.reconfigure(TaskLockConfig(lease_duration=50))
    router = TaskRouter()
    router.every(seconds=5, name="job", lock=lock)(tick)
    assert lock_of(router).config.lease_duration == 50


def test_a_wrong_variable_of_the_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_JOB_LEASE_DURATION", "soon")
    with pytest.raises(
        SettingsValidationError,
        match=r"^every\(lock=\) of job: lease_duration \(environment variable GREL_TASKLOCK_JOB_LEASE_DURATION\) ",
    ):
        TaskRouter().every(seconds=5, name="job", lock=TaskLock())(tick)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"lock": Lock("a")}, "every() takes a TaskLock, not Lock: build one, such as TaskLock('job')"),
        ({"leader": "a"}, "every() takes a LeaderElection, not str: build one, such as LeaderElection('job')"),
    ],
)
def test_another_kind_of_lock_or_leader_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsValidationError, match=f"^{re.escape(text)}$"):
        TaskRouter().every(seconds=5, **given)


def test_a_lease_that_is_shorter_than_the_interval_is_refused() -> None:
    with pytest.raises(
        SettingsValidationError,
        match=r"^every\(lock=\) of job: \(settings\) min_hold_duration should be at most lease_duration: ",
    ):
        TaskRouter().every(seconds=90, name="job", lock=TaskLock(lease_duration=60))(tick)


def test_ready_settings_can_be_given() -> None:
    router = TaskRouter()
    router.every(seconds=5, name="job", lock=TaskLock.from_config("x", TaskLockConfig(lease_duration=20)))(tick)
    assert (lock_of(router).name, lock_of(router).config.min_hold_duration) == ("x", 5.0)


def test_tasks_of_the_same_name_are_two_when_their_functions_are() -> None:
    def make() -> Callable[[], None]:
        def job() -> None:
            return

        return job

    router = TaskRouter()
    router.every(seconds=1)(make())
    with pytest.raises(TaskError, match="<locals>.job' already"):
        router.every(seconds=1)(make())


async def test_nothing_runs_without_tasks() -> None:
    before = asyncio.all_tasks()
    async with Tasks() as tasks:
        assert asyncio.all_tasks() == before
        tasks.hand_over()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("wrong", [tick, LeaderElection, "tick", None])
def test_what_is_no_task_is_refused(wrong: Any) -> None:
    text = f"not {type(wrong).__name__}: declare a function with @tasks.every"
    with pytest.raises(TaskError, match=text):
        TaskRouter().add_task(wrong)
    with pytest.raises(TaskError, match=text):
        Tasks(tasks=[wrong])


async def test_what_is_no_task_is_refused_while_others_run() -> None:
    wrong: Any = tick
    async with Tasks() as tasks:
        with pytest.raises(TaskError, match="not function"):
            tasks.add_task(wrong)


def test_a_task_that_comes_after_its_router_was_included_is_refused() -> None:
    router, tasks = TaskRouter(), Tasks()
    router.every(seconds=1)(tick)
    tasks.include_router(router)
    with pytest.raises(TaskError, match="task 'late' came after its router was included, and would never run"):
        router.every(seconds=1, name="late")(tick)
    tasks.every(seconds=1, name="own")(tick)
    assert [task.name for task in of(tasks)] == [of(router)[0].name, "own"]
    Tasks().include_router(router)  # of another app


def test_only_routers_are_included() -> None:
    wrong: Any = tick
    with pytest.raises(TaskError, match=r"include_router\(\) takes a TaskRouter, not function"):
        Tasks().include_router(wrong)
