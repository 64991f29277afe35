"""The values of a request's parameters, as its handler receives them."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_dependant, request_params_to_args
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.requests import HTTPConnection

from grelmicro.errors import SettingsValidationError

GROUPS = {
    "path_params": "path_params",
    "query_params": "query_params",
    "header_params": "headers",
    "cookie_params": "cookies",
}
"""Where a handler's parameters are listed, and where the request has their values."""


class Place(NamedTuple):
    """Where a parameter is taken: by the handler or a dependency, and in which of its lists it stands."""

    dependant: Dependant
    group: str


def received(connection: HTTPConnection, names: tuple[str, ...], title: str) -> Mapping[str, object]:
    """The values of these parameters, converted.

    FastAPI converts what a handler takes when the dependencies have run, so they never see it. Hence the handler's
    signature is read here as FastAPI reads it, and FastAPI converts what is needed of it.

    Args:
        connection: the request or websocket.
        names: the parameters.
        title: who asks, for error texts.

    Raises:
        RequestValidationError: one is not valid; FastAPI answers as it does when the handler's own are not.
        WebSocketRequestValidationError: the same of a websocket.
        SettingsValidationError: neither the handler nor a dependency of it takes one.
    """
    handler = connection.scope["endpoint"]
    places = _places(handler, "".join(f"{{{name}}}" for name in connection.path_params))
    values: dict[str, object] = {}
    errors: list[Any] = []
    for name in names:
        place = places.get(name)
        if place is not None:
            fields = getattr(place.dependant, place.group)
            converted, problems = request_params_to_args(fields, getattr(connection, GROUPS[place.group]))
            if name not in converted:
                errors += [problem for problem in problems if problem not in errors]
            values[name] = converted.get(name)
        elif name in connection.path_params and name not in places:
            values[name] = connection.path_params[name]  # part of a prefix, and nobody converts it
        else:
            raise _unknown(title, handler, name, places)
    if errors:
        refusal = RequestValidationError if connection.scope["type"] == "http" else WebSocketRequestValidationError
        raise refusal(errors)
    return values


@lru_cache(maxsize=4096)
def _places(handler: Callable[..., Any], path: str) -> Mapping[str, Place | None]:
    """Where each parameter is taken: by the handler, else by the dependency nearest to it.

    None stands for what the handler receives as the result of a dependency.
    """
    root = get_dependant(path=path, call=handler)
    places: dict[str, Place | None] = {}
    for dependant in _by_depth(root):
        for group in GROUPS:
            for field in getattr(dependant, group):
                places.setdefault(field.name, Place(dependant, group))
        if dependant is root:
            results = [each.name for each in root.dependencies if each.name is not None]
            places.update(dict.fromkeys(results))
    return places


def _by_depth(root: Dependant) -> Iterator[Dependant]:
    level = [root]
    while level:
        yield from level
        level = [dependency for dependant in level for dependency in dependant.dependencies]


def _unknown(
    title: str, handler: Callable[..., Any], name: str, places: Mapping[str, Place | None]
) -> SettingsValidationError:
    if name in places:
        return SettingsValidationError(
            f"{title}: what {handler.__qualname__} receives as '{name}' is the result of a dependency, which no other "
            "dependency can see: name a path, query, header or cookie parameter"
        )
    known = ", ".join(known for known, place in places.items() if place is not None)
    return SettingsValidationError(
        f"{title}: {handler.__qualname__} takes no path, query, header or cookie parameter '{name}', and no dependency "
        f"of it does: it takes {known or 'none'}"
    )
