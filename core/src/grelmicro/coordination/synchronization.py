"""`synchronized`: a function that runs while it holds a lock, whose name is made of its arguments."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from grelmicro.callables import Parameters, runs_in_thread, title_of
from grelmicro.config import Duration
from grelmicro.coordination.lock import Lock
from grelmicro.coordination.protocols import LockBackendSource
from grelmicro.coordination.template import LockTemplate
from grelmicro.errors import SettingsValidationError
from grelmicro.guards import check_guardable, note_guard

P = ParamSpec("P")
R = TypeVar("R")


def synchronized(
    name: str,
    *,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    backend: LockBackendSource | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the decorated function or method while it holds a lock: `@synchronized("cart:{cart_id}")`.

    It decorates functions with and without `async`. One without runs in a thread that is not the event loop's, as in a
    script, a WSGI application or a worker. The lock is given back when the function has ended. When it is lost
    meanwhile, an async function is cancelled; of a plain one the loss shows at the end.

    Write it below `@classmethod`, `@staticmethod` and decorators that make a route or a task of a function.

    Args:
        name: the lock's name; `{field}` stands for an argument, also one that is left to its default, and `{order.id}`
            for a field of one, as `{self.id}` in a method. Different values never share a name;
            `grelmicro.names.NameTemplate` says what is encoded for that. The environment variables are those of the
            template: `GREL_LOCK_CART_*` for `cart:{cart_id}`.
        timeout: seconds to wait for the lock; None waits as long as it takes, 0 tries once.
        auto_renew: keep the lease alive while the function runs. None: the environment, else on.
        lease_duration: seconds after which the lock frees itself. None: the environment, else 30, or 60 where it is
            not renewed.
        max_hold: seconds after which it is not renewed any more, so that a function that hangs loses it. None: the
            environment, else no limit.
        backend: where: a backend, a `Coordination` or the name of one; None: that of the app which serves the caller,
            found at each call.

    Raises:
        SettingsValidationError: the template or a setting breaks a rule, or a field is no parameter of the function.
        TypeError: it decorates a class, a generator or something else that is over before its work is done.
    """
    template = LockTemplate.of(
        name, timeout=timeout, auto_renew=auto_renew, lease_duration=lease_duration, max_hold=max_hold
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        _check(function)
        lock_of = _Locks(template, function, backend)
        guarded = (_guarded_plain if runs_in_thread(function) else _guarded_async)(function, lock_of, template.timeout)
        note_guard(f"@synchronized({name!r})", function, guarded)
        return cast("Callable[P, R]", guarded)

    return decorate


def _check(function: Callable[..., Any]) -> None:
    """Refuse what is over before its work is done, and objects that would be no more than functions afterwards."""
    check_guardable("synchronized()", function)
    if not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        raise TypeError(
            f"synchronized() guards functions and methods, not {type(function).__qualname__}: write it directly above "
            "the function, below the decorator that makes something else of it"
        )


def _guarded_async(
    function: Callable[..., Any], lock_of: "_Locks", timeout: float | None
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(function)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        async with await lock_of(args, kwargs).acquire(timeout=timeout):
            return await function(*args, **kwargs)

    return guarded


def _guarded_plain(function: Callable[..., Any], lock_of: "_Locks", timeout: float | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with lock_of(args, kwargs).from_thread.acquire(timeout=timeout):
            result = function(*args, **kwargs)
            _refuse_unfinished(function, result)
            return result

    return guarded


class _Locks:
    """The lock of each call of a function."""

    def __init__(self, template: LockTemplate, function: Callable[..., Any], backend: LockBackendSource | None) -> None:
        self._template = template
        self._backend = backend
        self._fields = template.template.fields
        self._parameters = Parameters(function)
        self._title = title_of(function)
        for field in self._fields:
            if self._parameters.has(field):
                continue
            raise SettingsValidationError(
                f"lock name {template.template.text!r} has the field {{{field}}}, but {self._title} has no such "
                f"parameter: it has {', '.join(self._parameters.names) or 'none'}"
            )

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Lock:
        values = self._parameters.arguments(args, kwargs) if self._fields else {}
        try:
            name = self._template.name(values)
        except KeyError as missing:
            raise SettingsValidationError(
                f"lock name {self._template.template.text!r} has the field {{{missing.args[0]}}}, but "
                f"{self._title} was called without it"
            ) from None
        return self._template.lock(name, self._backend)


def _refuse_unfinished(function: Callable[..., Any], result: object) -> None:
    """Tell where work is done only when the lock is given back already, which no declaration shows."""
    if inspect.iscoroutine(result):
        result.close()
    elif not inspect.isgenerator(result) and not inspect.isasyncgen(result):
        return
    raise TypeError(
        f"{title_of(function)} is no coroutine function and returned a {type(result).__name__}, which would run "
        "without the lock: write it with 'async def', or decorate what does the work"
    )
