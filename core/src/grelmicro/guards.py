"""Functions that a decorator guards, and those of them that run without their guard."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from grelmicro.callables import layers


class Bypassed(NamedTuple):
    """A function that is used as it was before it was decorated."""

    function: Callable[..., Any]
    decorator: str
    """The decorator that it passes by, such as `@locked('cart:{cart_id}')`."""


_guards: weakref.WeakKeyDictionary[Callable[..., Any], dict[str, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()


def note_guard(decorator: str, function: Callable[..., Any], guard: Callable[..., Any]) -> None:
    """Note that `decorator` made `guard` of `function`, which may be a layer around others."""
    for layer in layers(function):
        if inspect.isfunction(layer):
            _guards.setdefault(layer, {}).setdefault(decorator, []).append(weakref.ref(guard))


def check_guardable(decorator: str, function: object) -> None:
    """See that a call of `function` is over when its work is done.

    Args:
        decorator: the name of the decorator, for the error.
        function: what is to be guarded.

    Raises:
        TypeError: it is a class or a generator, or above `@classmethod` or `@staticmethod`.
    """
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise TypeError(f"{decorator} is above @{kind} of '{function.__qualname__}': write it below @{kind}")
    *_, called = layers(function)
    if inspect.isclass(called) or inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        kind = "class" if inspect.isclass(called) else "generator"
        raise TypeError(
            f"'{called.__qualname__}' is a {kind}: {decorator} guards functions and methods, whose work is done when "
            "they return; of a class decorate its methods, of a generator what goes over it"
        )


def bypassed(used: Iterable[Callable[..., Any]]) -> Iterator[Bypassed]:
    """Which of the functions in use pass their guards by.

    A function that is used with its guard as well, or whose name still stands for the function without it, is meant to
    be used both ways.
    """
    outermost = list(used)
    guarding = {id(layer) for function in outermost for layer in layers(function)}
    for function in outermost:
        for decorator, guards in _guards.get(function, {}).items() if inspect.isfunction(function) else ():
            if not any(id(guard()) in guarding for guard in guards) and not _keeps_its_name(function):
                yield Bypassed(function, decorator)


def _keeps_its_name(function: Callable[..., Any]) -> bool:
    """Whether its name in its module stands for it. A decorator that is written above a function takes it over."""
    found: object = sys.modules.get(function.__module__)
    for step in function.__qualname__.split("."):
        found = getattr(found, step, None)
    return found is function
