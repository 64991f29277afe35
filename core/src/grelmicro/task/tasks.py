"""`Tasks`: starts a set of tasks, watches over them, and stops them in good order."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from grelmicro import lifecycle
from grelmicro.clock import SYSTEM_CLOCK, Clock
from grelmicro.config import LONGEST, Config, Duration, Reconfigurable, build, check_config, number
from grelmicro.coordination import LeaderElection
from grelmicro.coordination.taskruns import TaskRun
from grelmicro.errors import TaskError
from grelmicro.lifecycle import Resource, end_or_leave, outlast
from grelmicro.task.interval import IntervalTask
from grelmicro.task.router import TaskRouter
from grelmicro.task.task import Fire, Task, check_task

logger = logging.getLogger("grelmicro.task")

START_LIMIT = 30.0
"""Seconds within which a task must say that it runs."""

RELEASE_LIMIT = 5.0
"""Seconds that an election, or a task that was cancelled, has to give its lease back."""


class TasksConfig(Config):
    """Settings of `Tasks`; each can be set by `GREL_TASK_{FIELD}`."""

    kind = "TASK"

    shutdown_timeout: Annotated[float, BeforeValidator(number), Field(ge=0, le=LONGEST, allow_inf_nan=False)] = 30.0
    """Seconds for which closing waits for fires that run; then they are cancelled."""
    fire_log_level: Literal["INFO", "DEBUG"] = "INFO"
    """The level of the log line about each fire in which the function ran. The line about others is DEBUG."""


class Tasks(TaskRouter, Resource, Reconfigurable[TasksConfig]):
    """Runs tasks while it is open. An app opens it last and closes it first, so that tasks find all that they use.

    Settings left None come from the environment, then from the defaults of `TasksConfig`.

    Args:
        tasks: those to begin with.
        auto_start: whether opening starts the tasks; otherwise `start` does.
        shutdown_timeout: seconds for which closing waits for fires that run; then they are cancelled.
        fire_log_level: `INFO` or `DEBUG`: the level of the log line about each fire in which the function ran.
        clock: the time of due times; tests move it.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    kind = "tasks"
    _started = False

    def __init__(
        self,
        *,
        tasks: Iterable[Task] = (),
        auto_start: bool = True,
        shutdown_timeout: Duration | None = None,
        fire_log_level: Literal["INFO", "DEBUG"] | None = None,
        clock: Clock | None = None,
    ) -> None:
        given = {"shutdown_timeout": shutdown_timeout, "fire_log_level": fire_log_level}
        self._set_up(build(TasksConfig, "Tasks", given, name="default"), tasks, auto_start, clock)

    @classmethod
    def from_config(
        cls,
        config: TasksConfig,
        *,
        tasks: Iterable[Task] = (),
        auto_start: bool = True,
        clock: Clock | None = None,
    ) -> Self:
        """`Tasks` with ready settings: no environment is read, and nothing is checked again.

        Raises:
            SettingsValidationError: `config` is of another class.
        """
        created = cls.__new__(cls)
        created._set_up(check_config(config, TasksConfig), tasks, auto_start, clock)
        return created

    def _set_up(self, config: TasksConfig, tasks: Iterable[Task], auto_start: bool, clock: Clock | None) -> None:
        super().__init__(tasks=tasks)
        self._config = config
        self._auto_start = auto_start
        self._clock = clock or SYSTEM_CLOCK
        self._running: dict[asyncio.Task[None], Task] = {}
        self._stop = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    def add_task(self, task: Task) -> None:
        """Add a task; see `TaskRouter.add_task`.

        Raises:
            TaskError: they run already, another one has its name, or it is no task.
        """
        check_task(task)
        if self.started():
            raise TaskError(f"task {task.name!r} came after the start: add it before the app is opened")
        super().add_task(task)

    def started(self) -> bool:
        """Whether the tasks run."""
        return self._started and self._generation is lifecycle.generation

    async def open(self) -> None:
        """Start every task, unless `start` shall; when one fails to start, the others are stopped again."""
        if self._auto_start:
            await self._start_all()

    async def start(self) -> None:
        """Start every task, where opening did not; when one fails to start, the others are stopped again.

        Raises:
            OutOfContextError: it is not open.
            TaskError: the tasks run already, or one of them did not start.
        """
        self.check_open()
        if self.started():
            raise TaskError("the tasks run already: start() is for Tasks(auto_start=False), once while it is open")
        await self._start_all()

    async def _start_all(self) -> None:
        self._started = True
        self._stop = asyncio.Event()
        try:
            for task in self.tasks:
                await self._start(task)
        except BaseException:
            await self.close()
            raise

    async def run_now(self, name: str) -> Fire:
        """Run a task's function now, on this worker; see `IntervalTask.run_now`.

        It works also before the tasks are started, as in a test or in a command for operators.

        Raises:
            TaskError: there is no such task.
        """
        for task in self._interval_tasks():
            if task.name == name:
                if not self.started():
                    task.clock = self._clock
                return await task.run_now()
        known = ", ".join(task.name for task in self._interval_tasks()) or "none"
        raise TaskError(f"there is no task named {name!r}: the tasks are {known}")

    async def last_runs(self) -> Mapping[str, TaskRun | None]:
        """The last run of each task on any worker, by its name; see `IntervalTask.last_run`.

        Raises:
            OutOfContextError: no app serves this code.
            CoordinationBackendError: a store failed.
        """
        return {task.name: await task.last_run() for task in self._interval_tasks()}

    def overdue(self) -> Mapping[str, float]:
        """The tasks that this worker should have fired, and for how many seconds; see `IntervalTask.overdue_for`."""
        late = {task.name: task.overdue_for for task in self._interval_tasks()}
        return {name: seconds for name, seconds in late.items() if seconds}

    def _interval_tasks(self) -> list[IntervalTask]:
        return [task for task in self.tasks if isinstance(task, IntervalTask)]

    async def close(self) -> None:
        """Let fires that run end, then stop the elections; cancel what is not done within the shutdown timeout."""
        self.hand_over()
        try:
            if self._ending is not None:
                await outlast(self._ending, hurry=self.hurry)
        finally:
            self._ending = None
            self._started = False

    def hand_over(self) -> None:
        """Begin to close: no new fire begins, and leadership passes to another worker; returns at once."""
        if self._ending is None and self._running:
            self._stop.set()
            self._ending = asyncio.get_running_loop().create_task(self._end(), name="grelmicro-tasks-end")

    def hurry(self) -> None:
        """Cancel what still runs, but for elections that are stepping down; returns at once."""
        for runner, task in self._running.items():
            if not (isinstance(task, LeaderElection) and runner.cancelling()):
                runner.cancel()

    async def _end(self) -> None:
        elections = {runner for runner, task in self._running.items() if isinstance(task, LeaderElection)}
        leaders = {runner for runner, task in self._running.items() if getattr(task, "leader", None) is not None}
        # The leader's work ends before its term does; other fires that run on do not hold a successor up.
        await asyncio.gather(self._end_terms(leaders, elections), self._drain(set(self._running) - elections - leaders))

    async def _end_terms(self, leaders: set[asyncio.Task[None]], elections: set[asyncio.Task[None]]) -> None:
        await self._drain(leaders)
        for runner in elections:
            runner.cancel()
        await self._drain(elections, max(self._config.shutdown_timeout, RELEASE_LIMIT))

    def abandon(self) -> None:
        """Forget what ran on an event loop that is gone."""
        self._started = False
        self._running.clear()
        self._ending = None

    async def _start(self, task: Task) -> None:
        if isinstance(task, IntervalTask):
            task.clock = self._clock
            task.log_level = logging.getLevelNamesMapping()[self._config.fire_log_level]
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        stop = None if isinstance(task, LeaderElection) else self._stop
        runner = loop.create_task(task(ready=ready, stop=stop), name=f"grelmicro-task-{task.name}")
        self._running[runner] = task
        await asyncio.wait({runner, ready}, timeout=START_LIMIT, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            if runner.done():
                if not runner.cancelled() and (error := runner.exception()) is not None:
                    raise error
                raise TaskError(f"task {task.name!r} ended before it was ready: complete the `ready` future first")
            runner.cancel()
            raise TaskError(f"task {task.name!r} was not ready within {START_LIMIT:g} s")
        runner.add_done_callback(self._ended)

    def _ended(self, runner: asyncio.Task[None]) -> None:
        """Say at once when a task ends that should run on."""
        task = self._running.get(runner)
        if task is None or self._stop.is_set():
            return
        error = None if runner.cancelled() else runner.exception()
        logger.error("task %s ended while the others run on", task.name, exc_info=error)

    async def _drain(self, runners: set[asyncio.Task[None]], timeout: float | None = None) -> None:
        if runners:
            _, late = await asyncio.wait(runners, timeout=self._config.shutdown_timeout if timeout is None else timeout)
            for runner in late:
                logger.warning("task %s did not end in time and is cancelled", self._running[runner].name)
                runner.cancel()
            await self._end_late(late)
        for runner in runners:
            del self._running[runner]
            if runner.done() and not runner.cancelled() and (error := runner.exception()) is not None:
                logger.debug("task ended with %r", error)

    async def _end_late(self, late: set[asyncio.Task[None]]) -> None:
        """Wait for those that were cancelled, but not for a store that ignores it: functions alone have all the time.

        The lease of a function in a thread is kept until the thread has ended.
        """
        while late:
            _, late = await asyncio.wait(late, timeout=RELEASE_LIMIT)
            at_the_store = {runner for runner in late if self._is_at_the_store(runner)}
            await end_or_leave(at_the_store)
            late -= at_the_store

    def _is_at_the_store(self, runner: asyncio.Task[None]) -> bool:
        task = self._running[runner]
        return isinstance(task, IntervalTask) and not task.in_function
