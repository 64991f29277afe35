"""What a route declares of this package, read from its dependencies before any request."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from fastapi import params, routing
from fastapi.dependencies.models import Dependant

from grelmicro.errors import SettingsValidationError

# Later releases of FastAPI keep an included router as it is; this yields what its routes are there. Before, its
# routes were copied.
effective_routes: Any = getattr(routing, "iter_route_contexts", iter)


class Declared:
    """The base of what FastAPI calls for a dependency of this package."""

    refusals: ClassVar[tuple[int, ...]] = (409, 503)
    """The statuses with which it can refuse a request."""

    templates: tuple[str, ...] = ()
    """The names of the locks that it waits for, all at once."""


class Declaration(params.Depends):
    """What `LockDep` and its like return: a `Depends` that says so when it is given to another `Depends`."""

    @property
    def __signature__(self) -> inspect.Signature:
        raise SettingsValidationError(
            f"{self.dependency!r} is a dependency already: write Annotated[..., LockDep(...)] or "
            "dependencies=[LockDep(...)], without Depends() around it"
        )

    def __call__(self) -> None:
        """FastAPI asks for the signature of what can be called; nothing calls it."""


class Called(NamedTuple):
    """What FastAPI calls for a request: the handler, or something that it depends on."""

    dependant: Dependant
    depth: int
    """0 is that of the handler, 1 that of what it depends on itself."""
    for_name: bool
    """Whether the name of a lock is made of it."""


def called(dependant: Dependant, depth: int = 0, *, for_name: bool = False) -> Iterator[Called]:
    """A handler and all that it depends on, in the order in which FastAPI calls them: the handler is the last."""
    inside = for_name or isinstance(dependant.call, Declared)
    for dependency in dependant.dependencies:
        yield from called(dependency, depth + 1, for_name=inside)
    yield Called(dependant, depth, for_name)


def declared(dependant: Dependant) -> list[Declared]:
    """What of this package a handler depends on, itself and through other dependencies."""
    calls: list[Any] = [each.dependant.call for each in called(dependant)]
    return [call for call in calls if isinstance(call, Declared)]


def all_routes(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Those of FastAPI and what texts call them, also in the apps that are mounted among them."""
    for route in effective_routes(routes):
        if getattr(route, "dependant", None) is not None:
            yield _title(route, prefix), route
        yield from all_routes(getattr(route, "routes", None) or (), prefix + (getattr(route, "path", None) or ""))


def check_locks(routes: Iterable[Any]) -> None:
    """Refuse routes that wait for one lock while they hold another one.

    Raises:
        SettingsValidationError: a route, or one of an app that is mounted among them, has two lock dependencies.
    """
    for title, route in all_routes(routes):
        check_locks_of(route, title)


def check_locks_of(route: Any, title: str = "") -> None:
    """Refuse one such route."""
    locks = dict.fromkeys(each.templates for each in declared(route.dependant) if each.templates)
    if len(locks) > 1:
        raise separate_locks(title or _title(route), *locks)


def _title(route: Any, prefix: str = "") -> str:
    methods = "/".join(sorted(getattr(route, "methods", None) or ("websocket",)))
    return f"{methods} {prefix}{route.path}"


def separate_locks(who: str, *locks: tuple[str, ...]) -> SettingsValidationError:
    """The error about a request that would take one lock after the other.

    Args:
        who: the route, for the text.
        locks: the names that each dependency takes at once.
    """
    names = dict.fromkeys(name for lock in locks for name in lock)
    whole = next((lock for lock in locks if names.keys() == set(lock)), None)
    together = ", ".join(f'"{name}"' for name in whole or names)
    if whole is None:
        remedy = f"take all at once with LocksDep({together})"
    else:
        parts = [", ".join(map(repr, lock)) for lock in locks if lock is not whole]
        remedy = f"leave out the dependency on {' and '.join(parts)}, which is part of LocksDep({together})"
    return SettingsValidationError(
        f"{who} takes {' and then '.join(', '.join(map(repr, lock)) for lock in locks)}: whoever holds one lock and "
        f"waits for another can wait for a request that does the reverse; {remedy}"
    )
