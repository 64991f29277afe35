"""`warn_of_transactions`: what may commit outside of a lock, which no test of one request would show."""

import logging
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from fastapi.dependencies.models import Dependant

from grelmicro.callables import layers, yields
from grelmicro_fastapi.declared import Declared, all_routes, called

logger = logging.getLogger("grelmicro.fastapi")

MOST_TOLD = 10
"""Routes that the log names."""


class Beside(NamedTuple):
    """A dependency that yields, and is not inside the lock of its route."""

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
        for lock, outside in _outside_locks(route.dependant)
        if outside
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


def _outside_locks(dependant: Dependant) -> Iterator[tuple[str, list[Beside]]]:
    """The lock of a route, if it has one, and what is not inside of it."""
    *entered, _ = called(dependant)
    locks = [at for at, (each, _, _) in enumerate(entered) if _is_lock(each.call)]
    if not locks:
        return
    longer = any(entered[at].dependant.scope == "request" for at in locks)
    beside: dict[Hashable, Beside] = {}
    wanted = set()
    for at, (each, _, for_name) in enumerate(entered):
        if _yields(each.call):
            use = (each.call, each.scope) if each.use_cache else id(each)
            late = each.scope != "function" and not longer
            beside.setdefault(use, Beside(_name(each.call), for_name, at < locks[0], late))
            if not for_name:  # what only tells the name of a lock guards nothing
                wanted.add(use)
    outside = [each for use, each in beside.items() if use in wanted and (each.early or each.late)]
    yield repr(entered[locks[0]].dependant.call), outside


def _is_lock(call: Any) -> bool:
    return isinstance(call, Declared) and bool(call.templates)


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
    *_, innermost = layers(call)
    return str(getattr(innermost, "__qualname__", type(innermost).__qualname__)).rpartition("<locals>.")[2]


def _yields(call: Any) -> bool:
    return yields(call) and not any(isinstance(layer, Declared) for layer in layers(call))
