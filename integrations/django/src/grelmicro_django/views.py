"""`locked`: views, functions and methods that run while they hold a lock."""

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast, get_args

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.http.response import HttpResponseBase
from django.views import View

from grelmicro.callables import layers, title_of
from grelmicro.config import Duration
from grelmicro.coordination import LockTemplate
from grelmicro.errors import CoordinationBackendError, SettingsValidationError, WouldBlockError
from grelmicro.guards import check_guardable
from grelmicro_django.locks import BlockLock, runs_event_loop, template_of
from grelmicro_django.naming import Anonymous, Naming, Value, check_anonymous, check_values, request_of
from grelmicro_django.refusals import REFUSED, advise, refuse
from grelmicro_django.transactions import (
    ATTRIBUTE,
    TakenOver,
    atomic_aliases,
    atomic_requests,
    take_over_atomic_requests,
)

logger = logging.getLogger("grelmicro.django")

F = TypeVar("F", bound=Callable[..., Any])

Until = Literal["return", "closed"]

BEFORE = (
    "of a class-based view decorate `dispatch` or the result of as_view(), which begin the transaction of "
    "ATOMIC_REQUESTS under the lock, write @locked above @transaction.atomic, and call other functions before the "
    "transaction begins"
)


def locked(
    name: str,
    *,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    on_busy: Callable[..., Any] | None = None,
    until: Until = "return",
    anonymous: Anonymous | None = None,
    **values: Value,
) -> Callable[[F], F]:
    """Run the decorated view while it holds a lock: `@locked("order:{pk}", timeout=2)`.

    It decorates views with and without `async`, the result of `as_view()`, `dispatch` and handler methods, and other
    functions and methods. The lock is released when the work is done; with `ATOMIC_REQUESTS`, that is after the commit.
    A view has its handle as `request.lock`. When the lock is lost meanwhile, an async view is cancelled; of a plain one
    the loss shows at the end, when its transaction is rolled back.

    A request that is refused is answered: 409 when it is busy, 503 when the lock was lost or the store failed. Other
    functions raise the error.

    Args:
        name: the lock's name; `{field}` stands for an argument of the view, as its path converter gives it, and
            `{request.user.pk}`, `{request.headers.idempotency_key}` for what the request has. Different values never
            share a name. The environment variables are those of the template: `GREL_LOCK_ORDER_*` for `order:{pk}`.
        timeout: seconds to wait for the lock; None waits as long as it takes, 0 tries once.
        auto_renew: keep the lease alive while the view runs. None: the environment, else on.
        lease_duration: seconds after which the lock frees itself. None: the environment, else 30, or 60 where it is
            not renewed.
        max_hold: seconds after which it is not renewed any more, so that a view that hangs loses it. None: the
            environment, else no limit.
        on_busy: a view that answers instead when the lock is busy, called with what the view is called with.
        until: `return`: release it when the view has returned, which is refused for a response with a stream.
            `closed`: when the body of the response was sent, or its client has left.
        anonymous: what the user in the name stands for when nobody is logged in: the `session`, or one that all of
            them `share`. None: such a request is answered with 403.
        values: functions that make the value of a field, called with what the view is called with.

    Raises:
        SettingsValidationError: the name or a setting breaks a rule, or a field has no value.
        TypeError: it decorates a class, a generator or something else that is over before its work is done.
    """
    template = template_of(name, timeout, auto_renew, lease_duration, max_hold)
    title = f"locked({name!r})"
    check_values(title, template.template.fields, values)
    check_anonymous(title, anonymous)
    if until not in get_args(Until):
        raise SettingsValidationError(f"{title}: until should be 'return' or 'closed'")
    if on_busy is not None and not callable(on_busy):
        raise SettingsValidationError(f"{title}: on_busy should be a view, not {type(on_busy).__name__}")

    def decorate(function: F) -> F:
        _check(function)
        naming = Naming(template, function, values, anonymous)
        return cast(F, _guarded(_Guard(template, naming, function, on_busy=on_busy, until=until)))

    return decorate


def _check(function: object) -> None:
    """Raise `TypeError` for what would be over before its work is done."""
    if inspect.isclass(function) and issubclass(function, View):
        raise TypeError(
            f"'{function.__qualname__}' is a class: write @method_decorator(locked(...), name='dispatch') above it, "
            "or decorate the result of as_view()"
        )
    check_guardable("locked()", function)


def _guarded(guard: "_Guard") -> Callable[..., Any]:
    if iscoroutinefunction(guard.function):

        @wraps(guard.function)
        async def aguarded(*args: Any, **kwargs: Any) -> Any:
            return await guard.acall(args, kwargs)

        return aguarded

    @wraps(guard.function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return guard.call(args, kwargs)

    take_over_atomic_requests(guard.function, guarded)
    return guarded


class _Guard:
    """What `locked` makes of a function."""

    def __init__(
        self,
        template: LockTemplate,
        naming: Naming,
        function: Callable[..., Any],
        *,
        on_busy: Callable[..., Any] | None,
        until: Until,
    ) -> None:
        self.function = function
        self._template = template
        self._naming = naming
        self._on_busy = on_busy
        self._until = until
        self._title = title_of(function)
        self._is_innermost = not isinstance(getattr(function, ATTRIBUTE, None), TakenOver)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function in this thread; what an async class-based view returns is to be awaited."""
        view = self._view_of(args)
        if view is not None and view.view_is_async:
            return self.acall(args, kwargs)
        if runs_event_loop():
            if any(iscoroutinefunction(layer) for layer in layers(self.function)):
                return self.acall(args, kwargs)
            raise SynchronousOnlyOperation(
                f"{self._title} is locked, and would block the event loop of this thread while it waits: call it by "
                "sync_to_async, or write it with 'async def'"
            )
        request = request_of(args, kwargs)
        if not self._is_view(request, args):
            return self._run(request, args, kwargs, [])
        try:
            return self._run(request, args, kwargs, self._atomic_aliases(request))
        except REFUSED as error:
            return self._answer(request, args, kwargs, error)

    def _run(self, request: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], aliases: list[str]) -> Any:
        block = BlockLock(self._template, self._naming.name(args, kwargs, request), before=BEFORE)
        held = block.__enter__()
        try:
            if request is not None:
                request.lock = held
            with atomic_requests(aliases, held):
                result = self.function(*args, **kwargs)
                self._check_result(result, aliases)
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        if inspect.isawaitable(result):
            return self._await(result, block)
        if self._until == "closed" and isinstance(result, HttpResponseBase):
            _release_when_closed(result, block)
        else:
            _release(block)
        return result

    async def _await(self, result: Any, block: BlockLock) -> Any:
        """Await what the function returned, and release the lock then."""
        try:
            value = await result
        except BaseException as error:
            await asyncio.to_thread(block.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(_release, block)
        return value

    async def acall(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function on the running event loop, and await what it returns."""
        request = request_of(args, kwargs)
        if not self._is_view(request, args):
            return await self._arun(request, args, kwargs)
        if self._atomic_aliases(request):
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")  # as Django says it
        try:
            return await self._arun(request, args, kwargs)
        except REFUSED as error:
            return await self._aanswer(request, args, kwargs, error)

    async def _arun(self, request: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        block = BlockLock(self._template, await self._naming.aname(args, kwargs, request), abefore=BEFORE)
        held = await block.__aenter__()
        try:
            if request is not None:
                request.lock = held
            result = self.function(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
            self._check_result(result, [])
        except BaseException as error:
            await block.__aexit__(type(error), error, error.__traceback__)
            raise
        try:
            await block.__aexit__(None, None, None)
        except CoordinationBackendError as failure:
            _log_unreleased(block, failure)
        return result

    def _answer(self, request: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> Any:
        if self._on_busy is None or not isinstance(error, WouldBlockError):
            return refuse(request, error)
        view = async_to_sync(self._on_busy) if iscoroutinefunction(self._on_busy) else self._on_busy
        return _advised(view(*_from(request, args), **kwargs), error)

    async def _aanswer(self, request: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> Any:
        if self._on_busy is None or not isinstance(error, WouldBlockError):
            return await sync_to_async(refuse)(request, error)
        view = self._on_busy if iscoroutinefunction(self._on_busy) else sync_to_async(self._on_busy)
        return _advised(await view(*_from(request, args), **kwargs), error)

    def _check_result(self, result: object, aliases: list[str]) -> None:
        """Refuse work that is done only when the lock is released, or the transaction committed.

        Raises:
            TypeError: `result` is a response with a stream, a generator, or to be awaited.
        """
        if isinstance(result, HttpResponseBase):
            if result.streaming and self._until == "return":
                _close(result)
                raise TypeError(
                    f"{self._title} returned a response with a stream, which is sent when the lock is released "
                    "already: use locked(..., until='closed')"
                )
        elif inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise TypeError(
                f"{self._title} returned a {type(result).__name__}, which would run without the lock: decorate what "
                "goes over it"
            )
        elif aliases and inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")

    def _atomic_aliases(self, request: Any) -> list[str]:
        """The databases whose transactions the function is to run in."""
        match = getattr(request, "resolver_match", None)
        return atomic_aliases(match.func) if match is not None and self._is_innermost else []

    def _is_view(self, request: Any, args: tuple[Any, ...]) -> bool:
        """Whether it is called to answer the request: what else takes one returns something that is no response."""
        if request is None:
            return False
        name = getattr(self.function, "__name__", None)
        if (view := self._view_of(args)) is not None:
            return name == "dispatch" or name in view.http_method_names
        match = getattr(request, "resolver_match", None)
        if match is None:
            return True
        called = match.func
        return name == getattr(called, "__name__", None) and self.function.__module__ == called.__module__

    def _view_of(self, args: tuple[Any, ...]) -> View | None:
        """The class-based view whose method it is."""
        function: Any = self.function
        if isinstance(function, partial):  # as `method_decorator` makes it
            function = function.func
        owner = getattr(function, "__self__", args[0] if args else None)
        return owner if isinstance(owner, View) else None


def _from(request: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a view, without the `self` of a method."""
    return next((args[index:] for index, value in enumerate(args) if value is request), args)


def _advised(response: Any, error: Exception) -> Any:
    if isinstance(response, HttpResponseBase):
        advise(response, error)
    return response


def _close(response: Any) -> None:
    """Close what a response would send. It sends no signal, unlike `response.close`: the request goes on."""
    for close in response._resource_closers:
        with suppress(Exception):
            close()
    response._resource_closers.clear()


def _release(block: BlockLock) -> None:
    """Release the lock; it was held for as long as the work took, whatever the store says to the release.

    Raises:
        LockLostError: it was lost meanwhile.
    """
    try:
        block.__exit__(None, None, None)
    except CoordinationBackendError as failure:
        _log_unreleased(block, failure)


def _log_unreleased(block: BlockLock, failure: CoordinationBackendError) -> None:
    logger.warning("lock '%s' was not released in time, and is released in the background: %s", block.name, failure)


def _release_when_closed(response: Any, block: BlockLock) -> None:
    """Release the lock when the response is closed, or dropped by what replaced it."""
    finalizer = weakref.finalize(response, _release_in_thread, block)
    finalizer.atexit = False

    def release() -> None:
        if finalizer.detach() is not None:
            _release_after_response(block)

    response._resource_closers.append(release)


def _release_after_response(block: BlockLock) -> None:
    try:
        _release(block)
    except REFUSED as error:
        logger.warning("lock '%s' was lost while the body of a response was sent: %s", block.name, error)


def _release_in_thread(block: BlockLock) -> None:
    threading.Thread(target=_release_after_response, args=[block], name="grelmicro-release", daemon=True).start()
