"""`install`: one line, on Starlette and on FastAPI."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockTimeoutError, WouldBlockError
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro_starlette import install, locked

App = type[Starlette] | type[FastAPI]
both = pytest.mark.parametrize("kind", [Starlette, FastAPI], ids=["starlette", "fastapi"])


def new() -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")])


async def busy(request: Request) -> Response:
    raise WouldBlockError("lock 'cart' is held by another holder")


async def lock_by_name(request: Request) -> Response:
    async with Lock("cart"):
        return PlainTextResponse(str(request.app.state.grelmicro.is_open))


@both
def test_opens_and_answers(kind: App) -> None:
    app = kind(routes=[Route("/busy", busy), Route("/lock", lock_by_name)])
    micro = new()
    install(app, micro)
    for _ in range(3):
        with TestClient(app) as client:
            assert client.get("/lock").text == "True"
            assert client.get("/busy").status_code == 409
        assert not micro.is_open


@both
def test_lifespan_of_the_app_runs_inside(kind: App) -> None:
    seen: list[bool] = []
    micro = new()

    @asynccontextmanager
    async def mine(app: Any) -> AsyncIterator[dict[str, str]]:
        seen.append(micro.is_open)
        yield {"mine": "kept"}
        seen.append(micro.is_open)

    async def show(request: Request) -> Response:
        return PlainTextResponse(request.state.mine)

    app = kind(routes=[Route("/", show)], lifespan=mine)
    install(app, micro)
    with TestClient(app) as client:
        assert client.get("/").text == "kept"
    assert seen == [True, True]


def test_lifespan_of_an_included_router_runs_inside() -> None:
    seen: list[bool] = []
    micro = new()

    @asynccontextmanager
    async def mine(app: Any) -> AsyncIterator[None]:
        seen.append(micro.is_open)
        yield
        seen.append(micro.is_open)

    before, after = APIRouter(lifespan=mine), APIRouter(lifespan=mine)
    app = FastAPI()
    app.include_router(before)
    install(app, micro)
    app.include_router(after)
    with TestClient(app):
        pass
    assert seen == [True] * 4


@both
def test_again_is_harmless(kind: App) -> None:
    app, micro = kind(routes=[Route("/busy", busy)]), new()
    install(app, micro)
    context = app.router.lifespan_context
    install(app, micro)
    assert app.router.lifespan_context is context
    with TestClient(app) as client:
        assert client.get("/busy").status_code == 409


@both
def test_another_grelmicro_is_refused(kind: App) -> None:
    app = kind()
    install(app, new())
    with pytest.raises(SettingsValidationError, match="another Grelmicro"):
        install(app, new())


@both
def test_after_the_start_is_refused(kind: App) -> None:
    app = kind()
    with TestClient(app), pytest.raises(SettingsValidationError, match="after the app was started"):
        install(app, new())


@both
def test_handlers_of_the_app_stay(kind: App) -> None:
    async def mine(request: Request, error: Exception) -> Response:
        return PlainTextResponse("mine", status_code=418)

    async def timed_out(request: Request) -> Response:
        raise LockTimeoutError("too long")

    app = kind(routes=[Route("/busy", busy), Route("/late", timed_out)], exception_handlers={LockTimeoutError: mine})
    install(app, new())
    with TestClient(app) as client:
        assert client.get("/busy").status_code == 409
        assert client.get("/late").text == "mine"


def test_retry_after_is_settable() -> None:
    app = Starlette(routes=[Route("/busy", busy)])
    install(app, new(), retry_after=2.5)
    with TestClient(app) as client:
        assert client.get("/busy").headers["retry-after"] == "3"


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon"])
def test_retry_after_must_be_seconds(wrong: Any) -> None:
    with pytest.raises(SettingsValidationError, match="retry_after"):
        install(Starlette(), new(), retry_after=wrong)


def test_one_grelmicro_serves_two_apps_of_one_server() -> None:
    """The mounted app's own lifespan never runs, and what it shares with the root app is open."""

    @locked("cart:{cart_id}")
    async def checkout(request: Request) -> Response:
        return PlainTextResponse(request.state.lock.name)

    micro = new()
    below = Starlette(routes=[Route("/{cart_id}", checkout)])
    root = Starlette(routes=[Mount("/sub", app=below)])
    install(below, micro)
    install(root, micro)
    with TestClient(root) as client:
        assert client.get("/sub/42").text == "cart:42"


def test_a_mounted_app_with_the_same_grelmicro_refuses_as_the_root_does() -> None:
    micro = new()
    below = Starlette(routes=[Route("/busy", busy)])
    root = Starlette(routes=[Mount("/sub", app=below)])
    install(below, micro)
    install(root, micro)
    with TestClient(root) as client:
        assert client.get("/sub/busy").status_code == 409


@pytest.mark.parametrize("wrong", [(new(), Starlette()), (Starlette(), Coordination), (None, new())])
def test_what_it_takes_is_told(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(SettingsValidationError, match=r"install\(app, micro\)"):
        install(*wrong)


def test_mounted_app_says_that_its_lifespan_did_not_run() -> None:
    @locked("cart:{cart_id}")
    async def checkout(request: Request) -> Response:
        raise AssertionError("must not run")

    below = Starlette(routes=[Route("/{cart_id}", checkout)])
    root = Starlette(routes=[Mount("/sub", app=below)])
    install(below, new())
    with TestClient(root) as client, pytest.raises(OutOfContextError, match="install.. on that one"):
        client.get("/sub/42")


def test_mounted_app_without_install_uses_that_of_the_root() -> None:
    @locked("cart:{cart_id}")
    async def checkout(request: Request) -> Response:
        return PlainTextResponse(request.state.lock.name)

    root = Starlette(routes=[Mount("/sub", app=Starlette(routes=[Route("/{cart_id}", checkout)]))])
    install(root, new())
    with TestClient(root) as client:
        assert client.get("/sub/42").text == "cart:42"
