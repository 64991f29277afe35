"""`SingletonCommand` and `@singleton`: commands and functions of which one process runs at a time."""

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from django.core.management.base import BaseCommand, OutputWrapper
from django.db import connections

from grelmicro.coordination import ThreadLockHandle
from grelmicro.errors import GrelmicroError, OutOfContextError
from grelmicro_django.exits import command_error
from grelmicro_django.policies import Policy
from grelmicro_django.running import Skipped, arun, run

P = ParamSpec("P")
R = TypeVar("R")

# A mixin is to stand before any class that is a command, and has none of its own.
if TYPE_CHECKING:
    Base = BaseCommand
else:
    Base = object


class SingletonMixin(Base):
    """Makes a management command run in one process at a time: name it before the command's other bases.

    A command that is busy elsewhere is skipped, silently and with exit code 0, unless `on_busy` says otherwise. Its
    lease is renewed while it runs; a lost one stops it. Times are in seconds.
    """

    singleton_name: str = ""
    """The name of its lock; empty: the command's own."""
    on_busy: str = ""
    """`skip`, `wait` or `fail`; empty: `wait` where `wait` is set, else `skip`."""
    wait: float | None = None
    """For how long it is waited for; None: no limit."""
    lease_duration: float = 60.0
    """After which another process may run it if this one is gone."""
    max_hold: float | None = None
    """After which it is stopped; None: no limit."""
    min_hold: float = 0.0
    """For which no other process runs it at least, counted from its begin."""
    on_lost: str = "stop"
    """`stop`: interrupt it when its lease is lost. `finish`: let it run on, and exit with 70."""
    grace: float = 5.0
    """After which its process is ended when it was interrupted, and goes on."""

    _lease: ThreadLockHandle | None = None
    _overrides: dict[str, Any] | None = None

    @property
    def lease(self) -> ThreadLockHandle:
        """The lease under which it runs.

        Raises:
            OutOfContextError: it does not run.
        """
        if self._lease is None:
            raise OutOfContextError("self.lease was used while the command does not run: use it in handle()")
        return self._lease

    def override(self, **settings: Any) -> None:
        """Let settings, named as those of `Policy`, count instead of its own; None counts not."""
        self._overrides = settings

    def policy(self) -> Policy:
        """Its settings.

        Raises:
            SettingsValidationError: one of them breaks a rule.
        """
        own = Policy(
            name=self.singleton_name or type(self).__module__.rpartition(".")[2],
            on_busy=self.on_busy,
            wait=self.wait,
            lease_duration=self.lease_duration,
            max_hold=self.max_hold,
            min_hold=self.min_hold,
            on_lost=self.on_lost,
            grace=self.grace,
        )
        return own.overridden(**(self._overrides or {}))

    def refresh_connections(self) -> None:
        """Close the database connections that the server has closed, so that their next use connects again.

        Call it after a long time without queries. What is in a transaction is left alone.
        """
        for connection in connections.all(initialized_only=True):
            if connection.connection is None or connection.in_atomic_block:
                continue
            connection.close_if_unusable_or_obsolete()
            if connection.connection is not None and not connection.is_usable():
                connection.close()

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command under its lease."""

        def work(held: ThreadLockHandle) -> str | None:
            self._lease = held
            try:
                output: str | None = super(SingletonMixin, self).execute(*args, **options)
                return output
            finally:
                self._lease = None

        try:
            policy = self.policy()
        except GrelmicroError as error:
            raise command_error(error) from None
        result = run(policy, work, failure=command_error, tell=teller(options, self.stderr))
        return None if isinstance(result, Skipped) else result


class SingletonCommand(SingletonMixin, BaseCommand):
    """A management command that runs in one process at a time; see `SingletonMixin`."""


def teller(options: dict[str, Any], stderr: OutputWrapper) -> Callable[[str], object]:
    """Writes what a skip tells where a person reads it: cron mails each line."""
    shown = options.get("verbosity", 1) >= 2 or stderr.isatty()
    return stderr.write if shown else lambda _: None


class Decorator(Protocol):
    """What `singleton` returns."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | Skipped]]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | Skipped]: ...


def singleton(
    name: str,
    *,
    on_busy: str = "",
    wait: float | None = None,
    lease_duration: float = 60.0,
    max_hold: float | None = None,
    min_hold: float = 0.0,
    on_lost: str = "stop",
    grace: float = 5.0,
) -> Decorator:
    """Let one process at a time run a function. It goes under `@task` and `@shared_task`.

    A call that is busy elsewhere returns `SKIPPED`, which is the JSON object `{"grelmicro": "skipped"}`, unless
    `on_busy` says otherwise. In the main thread, and in a
    coroutine, a lost lease interrupts the function; in other threads nothing does.

    Args:
        name: the name of its lock.
        on_busy: `skip`, `wait` or `fail`; empty: `wait` where `wait` is set, else `skip`.
        wait: seconds for which it is waited for; None: no limit.
        lease_duration: seconds after which another process may run it if this one is gone; it is renewed.
        max_hold: seconds after which it is stopped; None: no limit.
        min_hold: seconds for which no other process runs it at least, counted from its begin.
        on_lost: `stop`: interrupt it when its lease is lost. `finish`: let it run to its end.
        grace: seconds after which its process is ended when it was interrupted, and goes on.

    Raises:
        SettingsValidationError: a setting breaks a rule.
        TypeError: it is above `@task` or `@shared_task`, or the function is none.
    """
    policy = Policy(
        name=name,
        on_busy=on_busy,
        wait=wait,
        lease_duration=lease_duration,
        max_hold=max_hold,
        min_hold=min_hold,
        on_lost=on_lost,
        grace=grace,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_function(function)

        if iscoroutinefunction(function):

            @wraps(function)
            async def aguarded(*args: Any, **kwargs: Any) -> Any:
                return await arun(policy, lambda: function(*args, **kwargs))

            return aguarded

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return run(policy, lambda _: function(*args, **kwargs))

        return guarded

    return cast(Decorator, decorate)


def _check_function(function: object) -> None:
    if hasattr(function, "enqueue") or hasattr(function, "apply_async"):
        raise TypeError(
            "@singleton is above @task or @shared_task, and would guard no run of the task: write @task or "
            "@shared_task above it, and @singleton directly above the function"
        )
    if not callable(function):
        raise TypeError(f'@singleton("name") guards a function, not {type(function).__name__}')
