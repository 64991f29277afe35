"""Apps mounted below another one: servers run the root's lifespan alone."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Host, Mount, Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LeaderElection, Lock, LockHandle
from grelmicro.coordination.provider import Provider
from grelmicro.errors import OutOfContextError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import Tasks
from grelmicro_fastapi import LeaderDep, LockDep
from grelmicro_starlette import install, leader_only, lifespan, locked
from tests.helpers.worlds import eventually


class Hiding:
    """Middleware that keeps its app under a name of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.inside = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.inside(scope, receive, send)


Wrap = Callable[[Starlette], Any]
WRAPS: dict[str, Wrap] = {
    "mount": lambda below: Mount("/below", app=below),
    "deeper": lambda below: Mount("/below", routes=[Mount("", app=below)]),
    "below another": lambda below: Mount("/below", app=Starlette(routes=[Mount("", app=below)])),
    "middleware": lambda below: Mount("/below", app=below, middleware=[Middleware(GZipMiddleware)]),
    "hiding middleware": lambda below: Mount("/below", app=below, middleware=[Middleware(Hiding)]),
    "wrapped": lambda below: Mount("/below", app=GZipMiddleware(GZipMiddleware(below))),
    "wrapped below another": lambda below: Mount("/below", app=GZipMiddleware(Starlette(routes=[Mount("", below)]))),
    "host": lambda below: Host("testserver", app=Starlette(routes=[Mount("/below", app=below)])),
}
mounted = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
both = pytest.mark.parametrize("kind", [Starlette, FastAPI], ids=["starlette", "fastapi"])


def new(*uses: object) -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://"), *uses])


@locked("cart:{cart_id}")
async def checkout(request: Request) -> Response:
    async with Lock("by name") as held:
        return PlainTextResponse(f"{request.state.lock.name}, {held.name}")


def app_of_carts(kind: type[Starlette] = Starlette, **settings: Any) -> Starlette:
    return kind(routes=[Route("/carts/{cart_id}", checkout)], **settings)


@both
@mounted
def test_what_was_installed_below_is_opened_by_the_root(kind: type[Starlette], wrap: Wrap) -> None:
    below, other, micro = app_of_carts(kind), new(), new()
    root = kind(routes=[wrap(below)])
    install(below, other)
    install(root, micro)
    for _ in range(2):
        with TestClient(root) as client:
            assert client.get("/below/carts/7").text == "cart:7, by name"
            assert micro.is_open
            assert other.is_open
        assert not micro.is_open
        assert not other.is_open


def test_an_app_in_an_included_router_is_opened() -> None:
    below, other = app_of_carts(), new()
    install(below, other)
    router, root = APIRouter(), FastAPI()
    router.mount("/below", below)
    root.include_router(router)
    install(root, new())
    with TestClient(root) as client:
        reached = client.get("/below/carts/7").status_code != 404  # earlier releases of FastAPI leave mounts out
        assert other.is_open is reached


def test_the_order_of_declaration_does_not_matter() -> None:
    root, below = FastAPI(), app_of_carts()
    install(root, new())
    root.mount("/below", below)
    install(below, new())
    with TestClient(root) as client:
        assert client.get("/below/carts/7").status_code == 200


def test_a_lifespan_by_hand_opens_them_too() -> None:
    below = app_of_carts()
    install(below, new())
    with TestClient(Starlette(routes=[Mount("/below", app=below)], lifespan=lifespan(new()))) as client:
        assert client.get("/below/carts/7").status_code == 200


def test_own_lifespans_of_mounted_apps_do_not_run() -> None:
    """Starlette runs none, and whoever wants one calls it in that of the root."""
    seen: list[bool] = []
    other = new()

    @asynccontextmanager
    async def theirs(app: Any) -> AsyncIterator[None]:
        seen.append(other.is_open)
        yield

    below = app_of_carts(lifespan=theirs)
    install(below, other)
    root = Starlette(routes=[Mount("/below", app=below)])
    install(root, new())
    with TestClient(root):
        assert seen == []

    @asynccontextmanager
    async def composed(app: Any) -> AsyncIterator[None]:
        async with below.router.lifespan_context(below):
            yield

    by_hand = Starlette(routes=[Mount("/below", app=below)], lifespan=composed)
    install(by_hand, new())
    with TestClient(by_hand) as client:
        assert seen == [True]
        assert client.get("/below/carts/7").status_code == 200
    assert not other.is_open


class CountedStore(MemoryStore):
    """A store that counts how often it is opened."""

    opened = closed = 0

    async def open(self) -> None:
        self.opened += 1
        await super().open()

    async def close(self) -> None:
        self.closed += 1
        await super().close()


def test_a_provider_that_two_apps_share_is_opened_once() -> None:
    store = CountedStore()
    provider = Provider(store)
    apps = [app_of_carts(), app_of_carts()]
    root = Starlette(routes=[Mount(f"/{number}", app=app) for number, app in enumerate(apps)])
    for app in (*apps, root):
        install(app, Grelmicro(uses=[provider, Coordination(provider)]))
    with TestClient(root) as client:
        assert [client.get(f"/{number}/carts/7").status_code for number in range(2)] == [200, 200]
        assert (store.opened, store.closed) == (1, 0)
    assert (store.opened, store.closed) == (1, 1)


class Broken:
    """What cannot be opened."""

    async def __aenter__(self) -> None:
        raise ConnectionError("no store")

    async def __aexit__(self, *_: object) -> None:
        return


def test_when_one_below_cannot_be_opened_nothing_is_left_open() -> None:
    first, second, micro = new(), new(Broken()), new()
    root = Starlette(routes=[Mount("/a", app=(a := Starlette())), Mount("/b", app=(b := Starlette()))])
    for app, own in ((a, first), (b, second), (root, micro)):
        install(app, own)
    with pytest.raises(ConnectionError, match="no store"), TestClient(root):
        pass
    assert not any(each.is_open for each in (first, second, micro))


async def test_leaders_below_are_handed_over_at_the_signal_too() -> None:
    leaders = [LeaderElection("duty"), LeaderElection("duty")]
    micros = [new(Tasks(tasks=[leader])) for leader in leaders]
    below = Starlette()
    root = Starlette(routes=[Mount("/below", app=below)])
    install(below, micros[0])
    install(root, micros[1])
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        async with root.router.lifespan_context(root):
            await eventually(lambda: all(leader.is_leader() for leader in leaders), "both lead, each in its store")
            signal.raise_signal(signal.SIGTERM)
            await eventually(lambda: not any(leader.is_running() for leader in leaders), "both resign")
            assert all(micro.is_open for micro in micros)
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_the_lifespan_of_the_root_uses_its_own() -> None:
    micro, seen = new(), []

    @asynccontextmanager
    async def mine(app: Any) -> AsyncIterator[None]:
        seen.append(Lock("cart").backend)
        yield
        seen.append(Lock("cart").backend)

    below = Starlette()
    root = Starlette(routes=[Mount("/below", app=below)], lifespan=mine)
    install(below, new())
    install(root, micro)
    async with root.router.lifespan_context(root):
        pass
    assert seen == [micro.coordination.lock_backend] * 2


def alone(micro: Grelmicro) -> FastAPI:
    """An app with each way to use coordination, and nobody who opens it."""
    leader = micro.coordination.leaderelection("duty")
    app = FastAPI()

    async def by_decorator(request: Request) -> Response:
        raise AssertionError("must not run")

    async def by_name() -> None:
        async with Lock("cart"):
            raise AssertionError("must not run")

    def in_thread() -> None:
        with Lock("cart").from_thread:
            raise AssertionError("must not run")

    async def by_dependency(held: Annotated[LockHandle, LockDep("cart")]) -> None:
        raise AssertionError("must not run")

    async def by_leader(term: Annotated[object, LeaderDep(leader)]) -> None:
        raise AssertionError("must not run")

    app.add_route("/locked", locked("cart")(by_decorator))
    app.add_route("/leader_only", leader_only(leader)(by_decorator))
    app.add_api_route("/name", by_name)
    app.add_api_route("/thread", in_thread)
    app.add_api_route("/dep", by_dependency)
    app.add_api_route("/leader", by_leader)
    install(app, micro)
    return app


@pytest.mark.parametrize("path", ["locked", "leader_only", "name", "thread", "dep", "leader"])
@pytest.mark.parametrize("other_open", [False, True], ids=["nothing open", "another open"])
def test_first_use_says_at_once_what_to_do_when_only_the_mounted_app_has_it(path: str, other_open: bool) -> None:
    """Also where another app is open in the process, whose store would be the wrong one."""
    root = Starlette(routes=[Mount("/below", app=alone(new()))])
    another = Starlette()
    if other_open:
        install(another, new())
    with TestClient(root) as client, TestClient(another):
        took = []
        for _ in range(3):
            began = monotonic()
            with pytest.raises(OutOfContextError, match="lifespan.*of the root app alone"):
                client.get(f"/below/{path}")
            took.append(monotonic() - began)
    assert min(took) < 0.1


def test_an_app_that_was_wrapped_in_something_else_says_so_too() -> None:
    """A closure does not show what it contains."""

    def wrapped(app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)

        return call

    below = app_of_carts()
    install(below, new())
    root = Starlette(routes=[Mount("/below", app=wrapped(below))])
    install(root, new())
    with TestClient(root) as client, pytest.raises(OutOfContextError, match="without an attribute `app`"):
        client.get("/below/carts/7")


def test_nothing_else_on_an_app_is_mistaken_for_it() -> None:
    below = Starlette(routes=[Route("/", checkout)])
    provider = below.state.grelmicro = MemoryProvider()
    root = Starlette(routes=[Mount("/below", app=below), Route("/", checkout)])
    install(root, new())
    with TestClient(root):
        assert not provider.is_open
