"""The values of a request's parameters, as its handler receives them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import SolvedDependency, solve_dependencies
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.params import Form
from fastapi.requests import HTTPConnection, Request
from fastapi.responses import Response
from starlette.datastructures import FormData, UploadFile

from grelmicro.callables import runs_in_thread
from grelmicro.errors import SettingsValidationError
from grelmicro.fields import fault_of
from grelmicro.names import NoNameError
from grelmicro_fastapi.declared import called

GROUPS = ("path_params", "query_params", "header_params", "cookie_params", "body_params")
"""Where a handler's parameters are listed, in the order of error texts."""

NO_BODY = inspect.signature(solve_dependencies).parameters["body"].default
"""What FastAPI takes for the body of a request that has none; that differs between releases."""

UNUSED = Response()
"""The response that dependencies could set headers of: none is called here, and making one takes time."""


class Place(NamedTuple):
    """Where a parameter is taken: by the handler or a dependency, in which of its lists, and as what."""

    dependant: Dependant
    group: str
    field: Any


class RouteValues:
    """Where the values of some parameters are had in the requests of one route.

    FastAPI converts what a handler takes when the dependencies have run, so they never see it. Hence FastAPI is made
    to convert what is needed of it here, from what it has read already.
    """

    def __init__(self, route: Any, names: Sequence[str], title: str) -> None:
        self.route = route
        self.in_thread = runs_in_thread(route.endpoint)
        self._title = title
        self._names = frozenset(names)
        self._places = _places(route.dependant)
        self._raw = [name for name in names if self._places.get(name) is None]
        self._reads = _reads({name: place for name in names if (place := self._places.get(name)) is not None})

    async def of(self, connection: HTTPConnection) -> dict[str, object]:
        """The values in one request, converted.

        Raises:
            RequestValidationError: one is not valid. It tells all errors of the request, as FastAPI would.
            WebSocketRequestValidationError: the same of a websocket.
            SettingsValidationError: neither the handler nor a dependency of it takes one.
        """
        values: dict[str, object] = {}
        for name in self._raw:
            if name in self._places or name not in connection.path_params:
                raise self._unknown(name)
            values[name] = connection.path_params[name]  # part of a prefix, and nobody converts it
        for dependant, names in self._reads:
            solved = await self._solve(connection, dependant)
            if solved.errors:
                raise await self._refusal(connection, await self._problems(connection))
            values |= {name: solved.values[name] for name in names}
        return values

    async def error(
        self, connection: HTTPConnection, values: Mapping[str, object], error: KeyError | NoNameError
    ) -> Exception:
        """The error about a value that gives no name, or has no such field.

        It is FastAPI's where the client's data chose what stands there, as in a mapping.
        """
        field = error.field if isinstance(error, NoNameError) else str(error.args[0])
        first, *rest = field.split(".")
        place = self._places.get(first) if first in self._names else None
        fault = None if place is None else fault_of(place.field.field_info.annotation, values[first], rest)
        if place is not None and fault is not None:
            fault["loc"] = (*self._loc(place, alone=not rest), *fault["loc"])
            return await self._refusal(connection, [fault])
        if isinstance(error, NoNameError):
            return error
        return SettingsValidationError(f"{self._title}: the value of '{first}' is a mapping without {{{field}}}")

    def _loc(self, place: Place, *, alone: bool) -> tuple[str, ...]:
        """Where a parameter stands in a request, in FastAPI's words; of a model of other parameters they are alone."""
        body = place.group == "body_params"
        named = self.route._embed_body_fields if body else alone
        group = "body" if body else place.field.field_info.in_.value
        return (group, place.field.alias) if named else (group,)

    async def _solve(self, connection: Any, dependant: Dependant) -> SolvedDependency:
        """Let FastAPI convert what a dependant without dependencies takes."""
        body = await self._body(connection) if dependant.body_params else NO_BODY
        parts = [part for _, part in body.multi_items()] if isinstance(body, FormData) else []
        files = [(part, part.file.tell()) for part in parts if isinstance(part, UploadFile)]
        solved = await solve_dependencies(
            request=connection,
            dependant=dependant,
            body=body,
            response=UNUSED,
            async_exit_stack=connection.scope["fastapi_inner_astack"],
            embed_body_fields=self.route._embed_body_fields,
        )
        for file, position in files:  # it was read for a parameter of type bytes
            await file.seek(position)
        return solved

    async def _body(self, connection: HTTPConnection) -> Any:
        """The body as FastAPI read it before the dependencies ran: nothing is read that it did not read."""
        if not isinstance(connection, Request) or self.route.body_field is None:
            return NO_BODY
        if isinstance(self.route.body_field.field_info, Form):
            return await connection.form()
        raw = await connection.body()
        # FastAPI decides by the content type whether it is JSON, and has parsed it then.
        return (await connection.json() if hasattr(connection, "_json") else raw) if raw else NO_BODY

    async def _problems(self, connection: HTTPConnection) -> list[Any]:
        """What is wrong with a request, in the order in which FastAPI tells it."""
        problems: list[Any] = []
        for each in called(self.route.dependant):
            problems += (await self._solve(connection, replace(each.dependant, dependencies=[]))).errors
        return problems

    async def _refusal(self, connection: HTTPConnection, problems: Sequence[Any]) -> Exception:
        if not isinstance(connection, Request):
            return WebSocketRequestValidationError(problems)
        body = await self._body(connection)
        return RequestValidationError(problems, body=None if body is NO_BODY else body)

    def _unknown(self, name: str) -> SettingsValidationError:
        handler = self.route.endpoint.__qualname__
        if name in self._places:
            return SettingsValidationError(
                f"{self._title}: what {handler} receives as '{name}' is the result of a dependency: hand that "
                f"dependency over, too, as {name}=Depends(...)"
            )
        known = ", ".join(known for known, place in self._places.items() if place is not None)
        return SettingsValidationError(
            f"{self._title}: {handler} takes no path, query, header, cookie or body parameter '{name}', and no "
            f"dependency of it does: it takes {known or 'none'}"
        )


def route_of(connection: HTTPConnection) -> Any:
    """The route that serves a request; of one in an included router, what later releases of FastAPI make of it."""
    route = connection.scope["route"]
    included = connection.scope.get("fastapi", {}).get("effective_route_context")
    return included if included is not None and included.original_route is route else route


def _places(root: Dependant) -> Mapping[str, Place | None]:
    """Where each parameter is taken: by the handler, else by the dependency nearest to it.

    None stands for what the handler receives as the result of a dependency.
    """
    places: dict[str, Place | None] = {}
    for dependant, depth, _ in sorted(called(root), key=lambda each: each.depth):
        for group in GROUPS:
            for field in getattr(dependant, group):
                places.setdefault(field.name, Place(dependant, group, field))
        if depth == 0:
            results = [each.name for each in root.dependencies if each.name is not None]
            places.update(dict.fromkeys(results))
    return places


def _reads(places: Mapping[str, Place]) -> list[tuple[Dependant, list[str]]]:
    """What is converted at once, and the names in it that are needed.

    That is each list in which one of them stands, but of a body, which may have files in it, no more than is needed.
    """
    reads: dict[int, tuple[Dependant, list[str]]] = {}
    for name, (dependant, group, field) in places.items():
        part, names = reads.setdefault(id(dependant), (Dependant(), []))
        setattr(part, group, [*part.body_params, field] if group == "body_params" else getattr(dependant, group))
        names.append(name)
    return list(reads.values())
