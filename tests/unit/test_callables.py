"""How a framework runs what it is given to call."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest

from grelmicro.callables import codes, layers, runs_in_thread, yields


def plain() -> None: ...


async def coroutine() -> None: ...


def generator() -> Iterator[None]:
    yield


async def async_generator() -> AsyncIterator[None]:
    yield


class Object:
    def __call__(self) -> None: ...


class AsyncObject:
    async def __call__(self) -> None: ...

    async def method(self) -> None: ...


class Yielding:
    def __call__(self) -> Iterator[None]:
        yield


def decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def outer() -> Any:
        return inner()

    return outer


def async_decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    async def outer() -> Any:
        return inner()

    return outer


def test_layers_are_told_outermost_first() -> None:
    inner = decorated(partial(plain))
    outer = async_decorated(inner)
    assert list(layers(partial(partial(outer)))) == [outer, inner, plain]


@pytest.mark.parametrize("call", [plain, generator, Object(), Object, AsyncObject, partial(plain), decorated(plain)])
def test_what_runs_in_a_thread(call: Callable[..., Any]) -> None:
    assert runs_in_thread(call)


@pytest.mark.parametrize(
    "call",
    [
        coroutine,
        async_generator,
        AsyncObject(),
        AsyncObject().method,
        partial(coroutine),
        decorated(coroutine),
        async_decorated(plain),
        decorated(async_decorated(plain)),
        decorated(partial(AsyncObject())),
    ],
)
def test_what_runs_on_the_event_loop(call: Callable[..., Any]) -> None:
    assert not runs_in_thread(call)


@pytest.mark.parametrize("call", [generator, async_generator, Yielding(), decorated(partial(generator))])
def test_what_yields(call: Callable[..., Any]) -> None:
    assert yields(call)


@pytest.mark.parametrize("call", [plain, coroutine, Object(), Yielding, decorated(plain)])
def test_what_does_not_yield(call: Callable[..., Any]) -> None:
    assert not yields(call)


@pytest.mark.parametrize("call", [plain, partial(plain), Object(), Yielding(), AsyncObject().method])
def test_the_code_that_runs_is_known(call: Callable[..., Any]) -> None:
    function = call.func if isinstance(call, partial) else call
    function = function if inspect.isroutine(function) else type(function).__call__
    assert codes(call) == {function.__code__}


def test_the_code_of_a_decorator_and_of_what_it_decorates_are_known() -> None:
    assert codes(decorated(plain)) == {decorated(plain).__code__, plain.__code__}


def test_what_is_not_written_in_python_has_no_code() -> None:
    assert not codes(len)
