"""`warn_of_transactions`: what may commit outside of a lock, which no test of one request would show."""

import logging
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from inspect import isasyncgenfunction, isclass, isgeneratorfunction, isroutine, unwrap
from typing import Any, NamedTuple

from fastapi.dependencies.models import Dependant

from grelmicro_fastapi.declared import Declared, all_routes

logger = logging.getLogger("grelmicro.fastapi")

MOST_TOLD = 10
"""Routes that the log names."""


class Entered(NamedTuple):
    """A dependency of a route."""

    dependant: Dependant
    for_name: bool
    """Whether the name of a lock is made of it."""


class Beside(NamedTuple):
    """A dependency that yields beside a lock."""

    name: str
    for_name: bool
    early: bool
    """Whether it begins before the lock is taken."""
    late: bool
    """Whether its scope is longer than that of the lock."""


def warn_of_transactions(routes: Iterable[Any]) -> None:
    """Log which routes have a lock, and beside it a dependency that yields and is not inside of it."""
    found = [
        (title, lock, outside)
        for title, route in all_routes(routes)
        for lock, beside in _beside_locks(route.dependant)
        if (outside := [each for each in beside if each.early or each.late])
    ]
    for title, lock, outside in found[:MOST_TOLD]:
        logger.warning(
            "%s: %s is not inside %s, but begins before or ends after it; if it commits at its end, the next request "
            "may read what was there before: %s",
            title,
            _names(outside),
            lock,
            _remedy(outside),
        )
    if len(found) > MOST_TOLD:
        logger.warning("%d more routes have dependencies that are not inside their locks", len(found) - MOST_TOLD)


def _beside_locks(dependant: Dependant) -> Iterator[tuple[str, list[Beside]]]:
    """The lock of a route, if it has one, and what yields beside it."""
    entered = list(_entered(dependant))
    locks = [at for at, (each, _) in enumerate(entered) if isinstance(each.call, Declared) and each.call.templates]
    if not locks:
        return
    longer = any(entered[at].dependant.scope == "request" for at in locks)
    uses: dict[Hashable, list[int]] = {}
    for at, (each, _) in enumerate(entered):
        if _yields(each.call):
            uses.setdefault((each.call, each.scope) if each.use_cache else id(each), []).append(at)
    yield (
        repr(entered[locks[0]].dependant.call),
        [
            Beside(_name(each.call), for_name, early=at < locks[0], late=each.scope != "function" and not longer)
            for at, *others in uses.values()
            for each, for_name in [entered[at]]
            if not (for_name and all(entered[other].for_name for other in others))
        ],
    )


def _entered(dependant: Dependant, *, for_name: bool = False) -> Iterator[Entered]:
    """All dependencies of a route, in the order in which FastAPI enters them."""
    for each in dependant.dependencies:
        yield from _entered(each, for_name=for_name or isinstance(each.call, Declared))
        yield Entered(each, for_name)


def _remedy(outside: list[Beside]) -> str:
    remedies = []
    if any(each.early and not each.for_name for each in outside):
        remedies.append("declare the lock first")
    if shared := [each for each in outside if each.early and each.for_name]:
        remedies.append(f"let the lock find its name without {_names(shared)}")
    if late := [each for each in outside if each.late]:
        remedies.append(f'give both one scope, like Depends({late[0].name}, scope="function")')
    return ", and ".join(remedies)


def _names(dependencies: list[Beside]) -> str:
    return ", ".join(dict.fromkeys(each.name for each in dependencies))


def _name(call: Any) -> str:
    call = _unwrapped(call)
    return str(getattr(call, "__qualname__", type(call).__qualname__)).rpartition("<locals>.")[2]


def _yields(call: Any) -> bool:
    call = _unwrapped(call)
    if isinstance(call, Declared):
        return False
    called = call if isroutine(call) or isclass(call) else type(call).__call__
    return isgeneratorfunction(called) or isasyncgenfunction(called)


def _unwrapped(call: Any) -> Any:
    """The function in which a `yield` would stand."""
    while isinstance(call, partial):
        call = call.func
    return unwrap(call)
