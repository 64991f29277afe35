"""`Tasks`: starts a set of tasks, watches over them, and stops them in good order."""

import asyncio
import logging
from collections.abc import Iterable

from grelmicro.clock import SYSTEM_CLOCK, Clock
from grelmicro.config import check_seconds
from grelmicro.coordination import LeaderElection
from grelmicro.errors import TaskError
from grelmicro.lifecycle import Resource, outlast
from grelmicro.task.interval import IntervalTask
from grelmicro.task.router import TaskRouter
from grelmicro.task.task import Task, check_task

logger = logging.getLogger("grelmicro.task")

START_LIMIT = 30.0
"""Seconds within which a task must say that it runs."""

RELEASE_LIMIT = 5.0
"""Seconds that an election has to give its lease back, however short the shutdown timeout is."""


class Tasks(TaskRouter, Resource):
    """Runs tasks while it is open. An app opens it last and closes it first, so that tasks find all that they use.

    Args:
        tasks: those to begin with.
        shutdown_timeout: seconds for which closing waits for fires that run; then they are cancelled.
        clock: the time of due times; tests move it.
    """

    kind = "tasks"

    def __init__(
        self, *, tasks: Iterable[Task] = (), shutdown_timeout: float = 30.0, clock: Clock | None = None
    ) -> None:
        super().__init__(tasks=tasks)
        self._shutdown_timeout = check_seconds("Tasks shutdown_timeout", shutdown_timeout, zero=True)
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
        if self.is_open:
            raise TaskError(f"task {task.name!r} came after the start: add it before the app is opened")
        super().add_task(task)

    def started(self) -> bool:
        """Whether the tasks run."""
        return self.is_open

    async def open(self) -> None:
        """Start every task; when one fails to start, the others are stopped again and its error is raised."""
        self._stop = asyncio.Event()
        try:
            for task in self.tasks:
                await self._start(task)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let fires that run end, then stop the elections; cancel what is not done within the shutdown timeout."""
        self.hand_over()
        try:
            if self._ending is not None:
                await outlast(self._ending, hurry=self.hurry)
        finally:
            self._ending = None

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
        await self._drain(elections, max(self._shutdown_timeout, RELEASE_LIMIT))

    def abandon(self) -> None:
        """Forget what ran on an event loop that is gone."""
        self._running.clear()
        self._ending = None

    async def _start(self, task: Task) -> None:
        if isinstance(task, IntervalTask):
            task.clock = self._clock
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
            _, late = await asyncio.wait(runners, timeout=self._shutdown_timeout if timeout is None else timeout)
            for runner in late:
                logger.warning("task %s did not end in time and is cancelled", self._running[runner].name)
                runner.cancel()
            if late:
                await asyncio.wait(late)
        for runner in runners:
            del self._running[runner]
            if not runner.cancelled() and (error := runner.exception()) is not None:
                logger.debug("task ended with %r", error)
