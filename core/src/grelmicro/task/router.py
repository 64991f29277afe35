"""`TaskRouter`: declare tasks where they are written, and include them in the `Tasks` that run them."""

import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar, overload

from grelmicro.config import check_name
from grelmicro.coordination import LeaderElection, TaskLock
from grelmicro.errors import SettingsValidationError, TaskError
from grelmicro.keywords import refuse_keywords
from grelmicro.task.interval import IntervalTask, check_interval
from grelmicro.task.task import Task, check_task

F = TypeVar("F", bound=Callable[[], object])


class TaskRouter:
    """A set of tasks.

    Args:
        tasks: those to begin with.
    """

    _included = False

    def __init__(self, *, tasks: Iterable[Task] = ()) -> None:
        self._tasks: dict[str, Task] = {}
        for task in tasks:
            self.add_task(task)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks, in the order in which they were added."""
        return tuple(self._tasks.values())

    def add_task(self, task: Task) -> None:
        """Add a task, such as a `LeaderElection`.

        Raises:
            TaskError: another one has its name, it is no task, or this router was included before.
        """
        check_task(task)
        if self._included:
            raise TaskError(
                f"task {task.name!r} came after its router was included, and would never run: "
                "add it before include_router()"
            )
        # Two elections of one role in one process are two candidates, so only names of functions must differ.
        name = task.name if isinstance(task, IntervalTask) else f"{type(task).__name__} {task.name} {id(task)}"
        if name in self._tasks:
            raise TaskError(
                f"there is a task named {task.name!r} already, and both would share one lock: give one another name="
            )
        self._tasks[name] = task

    def include_router(self, router: "TaskRouter") -> None:
        """Add all tasks of another router, which takes no more of them then.

        Raises:
            TaskError: a name is there already, or it is no router.
        """
        if not isinstance(router, TaskRouter):
            raise TaskError(f"include_router() takes a TaskRouter, not {type(router).__name__}")
        for task in router.tasks:
            self.add_task(task)
        router._included = True

    @overload
    def every(
        self,
        *,
        seconds: float,
        name: str | None = None,
        lock: TaskLock | None = None,
        leader: LeaderElection | None = None,
    ) -> Callable[[F], F]: ...

    @overload
    def every(
        self,
        *,
        seconds: timedelta,
        name: str | None = None,
        lock: TaskLock | None = None,
        leader: LeaderElection | None = None,
    ) -> Callable[[F], F]: ...

    def every(
        self,
        *misplaced: object,
        seconds: object = None,
        name: str | None = None,
        lock: TaskLock | None = None,
        leader: LeaderElection | None = None,
        **unknown: object,
    ) -> Callable[[F], F]:
        """Run the decorated function every `seconds`; a plain function runs in a thread.

        Args:
            seconds: the interval, in seconds or as a timedelta; at least a millisecond.
            name: unique among all tasks of the application; the function's module and name by default.
            lock: run on one worker per interval. `TaskLock()` takes the task's name, also for its environment
                variables, and its minimum hold is the interval unless given.
            leader: run only on the worker that leads; needs no lock.

        Raises:
            TaskError: the function needs arguments or has no name of its own, or the name is taken.
            SettingsValidationError: the interval or the lock's durations break a rule, `lock` or `leader` is none, or
                the interval is not given as `seconds=`.
            TypeError: a keyword is not known.
        """
        if misplaced and callable(misplaced[0]):
            raise SettingsValidationError("@tasks.every needs an interval: write @tasks.every(seconds=60)")
        if misplaced:
            raise SettingsValidationError("every() takes its arguments by name: write every(seconds=60)")
        if unknown:
            refuse_keywords("every", unknown, ("seconds", "name", "lock", "leader"))
        if seconds is None:
            raise SettingsValidationError("every() needs an interval: give seconds=, such as every(seconds=60)")
        for given, kind in ((lock, TaskLock), (leader, LeaderElection)):
            if given is not None and not isinstance(given, kind):
                raise SettingsValidationError(
                    f"every() takes a {kind.__name__}, not {type(given).__name__}: "
                    f"build one, such as {kind.__name__}('job')"
                )
        interval = check_interval("every(seconds=)", seconds)

        def declare(function: F) -> F:
            if not callable(function):
                raise TaskError(f"every() decorates a function, not {type(function).__name__}")
            task_name = check_name("every(name=)", name if name is not None else _name_of(function))
            _check_signature(task_name, function)
            own = None if lock is None else lock.for_task(task_name, interval)
            self.add_task(IntervalTask(task_name, function, interval, lock=own, leader=leader))
            return function

        return declare


def _name_of(function: Callable[[], object]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<lambda>" in name:
        raise TaskError("every() needs a function with a name of its own: define it with def, or give name=")
    return f"{module}:{name}"


def _check_signature(name: str, function: Callable[[], object]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TaskError(f"task {name} is a generator, of which nothing runs when it is called: write it without yield")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some builtins nothing is known
        return
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TaskError(f"task {name} is called without arguments, but needs {', '.join(needed)}: give them defaults")
