"""What FastAPI calls for the dependencies of this package: it finds out the names, and holds what they name."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import params
from fastapi.requests import HTTPConnection

from grelmicro.callables import yields
from grelmicro.coordination import LeaderElection, LeaderRecord
from grelmicro.errors import SettingsValidationError
from grelmicro.names import NoNameError
from grelmicro_fastapi.declared import Declared, called
from grelmicro_fastapi.sharing import Key, share
from grelmicro_fastapi.tasklock import TaskFamily
from grelmicro_fastapi.values import RouteValues, route_of
from grelmicro_starlette import LockFamily, check_takes_part, hold_all

logger = logging.getLogger("grelmicro.fastapi")

REQUEST = inspect.Parameter("connection", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection)
"""The parameter by which the callables of this package get the request or websocket."""

MOST_ROUTES = 1000
"""Routes that one declaration remembers. An application has fewer; tests build many."""


class Guard(Declared):
    """Holds something with a name while a request is served. Equal ones are one to FastAPI, which calls it once.

    Args:
        families: what is held together, as `LockFamily` or `TaskFamily`.
        results: the dependencies whose results are values of fields.
    """

    title: ClassVar[str] = "LockDep"
    family: ClassVar[type[LockFamily] | type[TaskFamily]] = LockFamily
    kind: ClassVar[str] = "lock"
    waits: ClassVar[bool] = True
    """Whether it waits for what it holds; then it is taken before anything else of its kind."""

    def __init__(self, families: Sequence[Any], results: Mapping[str, params.Depends]) -> None:
        self.families = tuple(families)
        self.templates = tuple(family.template.text for family in families) if self.waits else ()
        self.__signature__ = _signature(results)
        fields = dict.fromkeys(field for family in families for field in family.template.fields)
        self._fields = [field for field in fields if field not in results]
        self._key = (type(self), self.families, _identity(results))
        self._hash = hash(self._key)
        self._routes: dict[int, RouteValues] = {}
        self.__name__ = repr(self)  # FastAPI tells it in errors

    async def __call__(self, connection: HTTPConnection, **results: object) -> AsyncIterator[Any]:
        """Hold it for this request."""
        source = self._values(connection)
        values = {**await source.of(connection), **results}
        try:
            names = tuple(family.template.name(values) for family in self.families)
        except (KeyError, NoNameError) as error:
            raise await source.error(connection, values, error) from None
        key = Key(self.waits, self.kind, names)
        task = asyncio.current_task()
        async with share(connection, key, lambda: self.hold(names, connection, in_thread=source.in_thread)) as held:
            try:
                yield self.value(held)
            except GeneratorExit:
                if asyncio.current_task() is not task:  # the garbage collector is at work
                    logger.warning(
                        "%r was left unfinished, so its lock is freed late: "
                        "wrap it with contextlib.aclosing() or asynccontextmanager()",
                        self,
                    )
                raise

    def hold(
        self, names: Sequence[str], connection: HTTPConnection, *, in_thread: bool
    ) -> AbstractAsyncContextManager[Any]:
        """Hold what has these names."""
        held: AbstractAsyncContextManager[Any] = self.families[0].hold(names[0], connection, in_thread=in_thread)
        return held

    def value(self, held: Any) -> object:
        """What the handler gets of it."""
        return held

    def _values(self, connection: HTTPConnection) -> RouteValues:
        route = route_of(connection)
        known = self._routes.get(id(route))
        if known is None or known.route is not route:
            if yields(route.endpoint) and self._ends_before_response(route):
                raise SettingsValidationError(
                    f"{self!r}: {route.endpoint.__qualname__} yields its response, which is sent when the lock "
                    "is given back already: use scope='request'"
                )
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            known = self._routes[id(route)] = RouteValues(route, self._fields, repr(self))
        return known

    def _ends_before_response(self, route: Any) -> bool:
        dependants = [each.dependant for each in called(route.dependant)]
        return any(each.call == self and each.scope == "function" for each in dependants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Guard) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{self.title} {', '.join(repr(family.template.text) for family in self.families)}"


class HeldLock(Guard):
    """Behind `LockDep`."""


class HeldFence(Guard):
    """Behind `FenceDep`."""

    title = "FenceDep"

    def value(self, held: Any) -> object:
        """Its fencing token."""
        return held.fencing_token


class HeldLocks(Guard):
    """Behind `LocksDep`."""

    title = "LocksDep"
    kind = "locks"

    def hold(
        self, names: Sequence[str], connection: HTTPConnection, *, in_thread: bool
    ) -> AbstractAsyncContextManager[Any]:
        """Hold all of them."""
        return hold_all(self.families, names, connection, in_thread=in_thread)


class HeldTaskLock(Guard):
    """Behind `TaskLockDep`."""

    title = "TaskLockDep"
    family = TaskFamily
    kind = "tasklock"
    waits = False


def _identity(results: Mapping[str, Any]) -> Hashable:
    """What makes equal declarations equal; in early releases of FastAPI a `Depends` has no hash."""
    return tuple(
        (name, type(given), given.dependency, given.use_cache, given.scope, tuple(getattr(given, "scopes", None) or ()))
        for name, given in sorted(results.items())
    )


def _signature(results: Mapping[str, Any]) -> inspect.Signature:
    """What FastAPI calls a dependency with: the request, and the results of others."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    given = [inspect.Parameter(name, keyword, default=each, annotation=Any) for name, each in results.items()]
    return inspect.Signature([REQUEST, *given])


@dataclass(frozen=True)
class PresentTerm(Declared):
    """Behind `LeaderDep`."""

    refusals = (503,)

    leader: LeaderElection

    async def __call__(self, connection: HTTPConnection) -> LeaderRecord:
        """The term in which this request is served."""
        check_takes_part(connection, self.leader)
        return self.leader.guard()
