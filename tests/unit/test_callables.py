"""How a framework runs what it is given to call."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest

from grelmicro.callables import layers, runs_in_thread, yields


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
