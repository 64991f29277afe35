"""Which `Grelmicro` serves a request."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.types import Scope

from grelmicro import Grelmicro
from grelmicro.coordination import LeaderElection, LockBackend
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.guards import bypassed

KEY = "grelmicro"
"""Where an app's `Grelmicro` is found: in `app.state` and in the lifespan state."""

INNER = ("app", "_base_app", "original_router")
"""Where middleware, a mount with middleware, and an included router have what is inside of them."""

WEBSOCKET = "grelmicro.websocket"
"""Where a scope has the websocket that its handler uses: a class-based one shares it with nobody else."""


def lock_backend(connection: HTTPConnection) -> LockBackend | None:
    """The backend for locks of the app that serves this request; None when the app says nothing about it.

    Raises:
        OutOfContextError: the app's `Grelmicro` is not open.
    """
    micro = _grelmicro(connection)
    return None if micro is None else micro.coordination.lock_backend


def check_takes_part(connection: HTTPConnection, leader: LeaderElection) -> None:
    """Refuse an election that was never started: it would turn every request away, and look like a busy leader.

    Raises:
        OutOfContextError: it was not started, or the app's `Grelmicro` is not open.
    """
    _grelmicro(connection)
    if leader.record is None and not leader.is_running():
        raise OutOfContextError(
            f"election '{leader.name}' was never started: give the app Grelmicro(uses=[..., Tasks(tasks=[leader])]), "
            "or run it with lifespan(micro, lead={leader: work})"
        )


def installed_below(app: Any) -> Iterator[Grelmicro]:
    """What was installed on the apps that are mounted below `app`."""
    for below in reachable(app):
        if isinstance(below, Starlette) and isinstance(own := getattr(below.state, KEY, None), Grelmicro):
            yield own


def check_guards(app: Any) -> None:
    """Refuse routes that run a function without the guard that it was decorated with.

    Raises:
        SettingsValidationError: a route of `app`, or of an app below it, is such a one.
    """
    endpoints = [endpoint for each in reachable(app) if (endpoint := getattr(each, "endpoint", None)) is not None]
    for function, decorator in bypassed(endpoints):
        raise SettingsValidationError(
            f"{decorator} stands above the decorator that makes '{function.__qualname__}' a route, so requests pass it "
            f"by: write the route's decorator, such as @app.get(...), above {decorator}"
        )


def reachable(app: Any) -> Iterator[Any]:
    """`app` and the routes, routers and apps below it, each once, also those that middleware is wrapped around."""
    found: dict[int, Any] = {}
    left = [app]
    while left:
        each = left.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        yield each
        inner = [below for name in INNER if (below := getattr(each, name, None)) is not None]
        left += reversed([*(getattr(each, "routes", None) or ()), *inner])


def route_title(connection: HTTPConnection) -> str:
    """What the log calls the route of a request: `POST /orders/{order_id}`, without the values of its parameters.

    The path of a mount has its values, percent-encoded. A request that no route served has the name of what was called.
    """
    scope = connection.scope
    method = scope.get("method", "websocket")
    endpoint = scope.get("endpoint")
    # The framework sets the route, if it is recent, and FastAPI beside it what an included router makes of it.
    route = scope.get("fastapi", {}).get("effective_route_context") or scope.get("route") or _route_of(scope, endpoint)
    if hasattr(route, "endpoint"):  # else it is a mount
        return f"{method} {quote(scope.get('root_path', ''))}{route.path}"
    return f"{method} {getattr(endpoint, '__qualname__', type(endpoint).__qualname__)}"


def _route_of(scope: Scope, endpoint: object) -> Any:
    """The first route of the request's app that has its endpoint."""
    routes = reachable(scope.get("app"))
    return next((each for each in routes if endpoint is not None and getattr(each, "endpoint", None) is endpoint), None)


def _grelmicro(connection: HTTPConnection) -> Grelmicro | None:
    """The app's own, else the one that the server's lifespan opened."""
    app_state = getattr(connection.scope.get("app"), "state", None)
    own = getattr(app_state, KEY, None)
    found = own if isinstance(own, Grelmicro) else connection.scope.get("state", {}).get(KEY)
    if not isinstance(found, Grelmicro):
        return None
    if not found.is_open:
        raise OutOfContextError(
            "the Grelmicro of this app is not open, since the app's lifespan did not run: servers run the lifespan of "
            "the root app alone, so call install() on that one, too, which opens those of apps mounted below it; "
            "one that is hidden in a wrapper without an attribute `app` is opened in the root's lifespan with `async "
            "with`; in a test use `with TestClient(app)`, or, around an httpx.AsyncClient, "
            "`async with app.router.lifespan_context(app)`"
        )
    return found
