"""How a framework runs what it is given to call: in a thread or not, and whether it yields."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any


def layers(call: Any) -> Iterator[Any]:
    """What is called, and what each layer wraps: behind `functools.partial` and decorators, outermost first."""
    while call is not None:
        while isinstance(call, partial):
            call = call.func
        yield call
        call = getattr(call, "__wrapped__", None)


def runs_in_thread(call: Callable[..., object]) -> bool:
    """Whether a framework runs `call` in a thread: neither it nor what it wraps is async."""
    functions = [_function(layer) for layer in layers(call)]
    return not any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in functions)


def yields(call: Callable[..., object]) -> bool:
    """Whether the innermost of its layers is a generator function, or an object whose `__call__` is one."""
    *_, innermost = layers(call)
    function = _function(innermost)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def codes(call: Callable[..., object]) -> set[CodeType]:
    """Of the functions that run when `call` is called; what is not written in Python has none."""
    found = (getattr(_function(layer), "__code__", None) for layer in layers(call))
    return {code for code in found if isinstance(code, CodeType)}


def _function(call: Any) -> Any:
    """The function that runs: of an object, that of its class."""
    return call if inspect.isroutine(call) or inspect.isclass(call) else type(call).__call__
