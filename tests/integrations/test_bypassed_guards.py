"""A guard that stands above the decorator of its route is refused at the start: the route would run without it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.errors import SettingsValidationError
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import install
from grelmicro_starlette import leader_only, lifespan, locked

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

GUARDS: dict[str, Decorator] = {
    "@locked('cart:{cart_id}')": locked("cart:{cart_id}", timeout=0),
    "@leader_only": leader_only(LeaderElection("feed")),
}
guards = pytest.mark.parametrize(("title", "guard"), GUARDS.items(), ids=["locked", "leader_only"])


def new() -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")])


async def show(request: Request) -> Response:
    return PlainTextResponse("ran")


def refused(app: Starlette, title: str) -> None:
    with pytest.raises(SettingsValidationError) as told, TestClient(app):
        pass
    assert str(told.value).startswith(f"{title} stands above the decorator that makes '")


@guards
def test_guard_above_a_route(title: str, guard: Decorator) -> None:
    app, micro = FastAPI(), new()
    install(app, micro)

    @guard
    @app.get("/carts/{cart_id}")
    async def unguarded(cart_id: int, request: Request) -> str:
        return "ran"

    refused(app, title)
    assert not micro.is_open


@pytest.mark.parametrize("kind", ["get", "websocket"])
def test_guard_above_a_route_of_a_router(kind: str) -> None:
    app, router = FastAPI(), APIRouter()
    route: Callable[[str], Decorator] = getattr(router, kind)
    install(app, new())

    @locked("cart")
    @route("/cart")
    async def unguarded(request: Request) -> str:
        return "ran"

    app.include_router(router)
    refused(app, "@locked('cart')")


def test_guard_above_another_decorator_above_a_route() -> None:
    app = FastAPI(lifespan=lifespan(new()))

    def other(handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        async def called(*args: Any, **kwargs: Any) -> Any:
            return await handler(*args, **kwargs)

        return called

    @locked("cart")
    @other
    @app.get("/cart")
    async def unguarded(request: Request) -> str:
        return "ran"

    refused(app, "@locked('cart')")


def test_guard_above_a_route_of_a_mounted_app() -> None:
    below, root = FastAPI(), Starlette()

    @locked("cart")
    @below.get("/cart")
    async def unguarded(request: Request) -> str:
        return "ran"

    root.router.routes.append(Mount("/below", app=below, middleware=[Middleware(GZipMiddleware)]))
    install(root, new())
    refused(root, "@locked('cart')")


def test_a_function_that_keeps_its_name_is_meant_to_be_used_unguarded() -> None:
    """It may be guarded in another app of the process."""
    locked("cart")(show)
    app = Starlette(routes=[Route("/cart", show)])
    install(app, new())
    with TestClient(app) as client:
        assert client.get("/cart").text == "ran"


def test_a_function_that_is_used_both_ways_is_meant_to_be() -> None:
    async def mine(request: Request) -> Response:
        return PlainTextResponse("ran")

    both = locked("cart:{cart_id}", timeout=0)(mine)
    app, micro = Starlette(routes=[Route("/plain/{cart_id}", mine), Route("/carts/{cart_id}", both)]), new()
    install(app, micro)
    with TestClient(app) as client, held_elsewhere(micro, "cart:7"):
        assert client.get("/plain/7").text == "ran"
        assert client.get("/carts/7").status_code == 409
