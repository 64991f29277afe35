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
