"""`install`: one line, on Starlette and on FastAPI."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

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
@pytest.mark.parametrize("when", ["start", "stop"])
def test_a_lifespan_of_the_app_that_fails_leaves_nothing_open(kind: App, when: str) -> None:
    micro = new()

    @asynccontextmanager
    async def mine(app: Any) -> AsyncIterator[None]:
        if when == "start":
            raise ValueError("cannot start")
        yield
        raise ValueError("cannot stop")

    app = kind(lifespan=mine)
    install(app, micro)
    with pytest.raises(ValueError, match=f"cannot {when}"), TestClient(app):
        assert micro.is_open
    assert not micro.is_open


@both
def test_a_lifespan_that_is_wrapped_afterwards_still_runs(kind: App) -> None:
    """As libraries do that have a lifespan of their own to add."""
    micro, seen = new(), []
    app = kind(routes=[Route("/lock", lock_by_name)])
    install(app, micro)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def wrapped(started: Any) -> AsyncIterator[Any]:
        seen.append(micro.is_open)
        async with inner(started) as state:
            yield {**(state or {}), "theirs": True}
        seen.append(micro.is_open)

    app.router.lifespan_context = wrapped
    with TestClient(app) as client:
        assert client.get("/lock").text == "True"
        assert client.app_state["theirs"]
        assert client.app_state["grelmicro"] is micro
    assert seen == [False, False]


@both
def test_a_lifespan_that_was_replaced_afterwards_is_told(kind: App) -> None:
    @asynccontextmanager
    async def theirs(app: Any) -> AsyncIterator[None]:
        yield

    app = kind(routes=[Route("/lock", lock_by_name)])
    install(app, new())
    app.router.lifespan_context = theirs
    with TestClient(app) as client, pytest.raises(OutOfContextError, match="lifespan"):
        client.get("/lock")


def test_start_handlers_of_fastapi_run_inside() -> None:
    micro, seen = new(), []

    def see() -> None:
        seen.append(micro.is_open)

    app = FastAPI(on_startup=[see], on_shutdown=[see])
    app.router.on_startup.append(see)
    install(app, micro)
    app.router.on_startup.append(see)
    app.router.on_shutdown.append(see)
    with TestClient(app):
        assert seen == [True] * 3
    assert seen == [True] * 5


@both
def test_state_of_the_app_is_its_own(kind: App) -> None:
    app, micro = kind(), new()
    app.state.database = "db"
    install(app, micro)
    assert app.state.database == "db"
    assert app.state.grelmicro is micro


@both
def test_middleware_of_the_app_stays_whenever_it_was_added(kind: App) -> None:
    """What is added after `install` is outside of it."""
    micro, other = new(), new()
    seen: list[Any] = []

    class Around:
        def __init__(self, app: ASGIApp, name: str) -> None:
            self._app, self._name = app, name

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                seen.append(self._name)
                with suppress(OutOfContextError):
                    seen.append(Lock("cart").backend is micro.coordination.lock_backend)
            await self._app(scope, receive, send)

    app = kind(routes=[Route("/lock", lock_by_name)], middleware=[Middleware(Around, name="constructor")])
    app.add_middleware(Around, name="before")
    install(app, micro)
    app.add_middleware(Around, name="after")
    second = kind()
    install(second, other)
    with TestClient(app) as client, TestClient(second):
        assert client.get("/lock").text == "True"
    assert [each for each in seen if isinstance(each, str)] == ["after", "before", "constructor"]
    assert seen[-4:] == ["before", True, "constructor", True]


@both
def test_again_is_harmless(kind: App) -> None:
    app, micro = kind(routes=[Route("/busy", busy)]), new()
    install(app, micro)
    context, middleware = app.router.lifespan_context, list(app.user_middleware)
    install(app, micro)
    assert app.router.lifespan_context is context
    assert app.user_middleware == middleware
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
