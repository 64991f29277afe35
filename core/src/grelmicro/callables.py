"""How a framework runs what it is given to call: in a thread or not, and whether it yields; and its arguments."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

ARGS, KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Parameters:
    """The parameters of a function, by whose names the arguments of its calls are known.

    Args:
        function: what is called.
        follow_wrapped: whether it takes what the function takes that it wraps.
    """

    def __init__(self, function: Callable[..., Any], *, follow_wrapped: bool = True) -> None:
        self._signature = inspect.signature(function, follow_wrapped=follow_wrapped)
        parameters = self._signature.parameters
        self._more = next((name for name, parameter in parameters.items() if parameter.kind is KWARGS), None)
        self.names = [name for name, parameter in parameters.items() if parameter.kind is not ARGS]

    def has(self, name: str) -> bool:
        """Whether a call can have an argument of this name."""
        return name in self.names or (self._more is not None and name not in self._signature.parameters)

    def arguments(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """The arguments of a call by their names; raises `TypeError` where the function itself would."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments if self._more is None else {**bound.arguments[self._more], **bound.arguments}


def title_of(function: Callable[..., object]) -> str:
    """What texts call a function."""
    return f"'{getattr(function, '__qualname__', type(function).__qualname__)}'"


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
