"""`CoordinationMiddleware`: what a request uses is its application's, however many apps are open in the process."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic, sleep
from typing import Annotated, Any

import httpx2
import pytest
import uvicorn
from fastapi import BackgroundTasks, Depends, FastAPI
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from grelmicro.errors import OutOfContextError
from grelmicro_starlette import CoordinationMiddleware, install, lifespan
from tests.integrations.asgi import client_of

NAMES = ("one", "two")

Micros = dict[str, Grelmicro]


@pytest.fixture
def micros() -> Micros:
    return {name: Grelmicro(uses=[Coordination.from_url("memory://")]) for name in NAMES}


class Witness:
    """Notes whose locks the code uses that asks it."""

    def __init__(self, micros: Micros) -> None:
        self._micros = micros
        self.seen: list[str] = []

    def __call__(self) -> str:
        backend = Lock("cart").backend
        found = next(name for name, micro in self._micros.items() if micro.coordination.lock_backend is backend)
        self.seen.append(found)
        return found


@pytest.fixture
def serving(micros: Micros) -> Witness:
    return Witness(micros)


def asking(serving: Witness) -> FastAPI:
    """An app that asks from each place where a request's code runs."""
    app = FastAPI()

    async def dependency() -> AsyncIterator[None]:
        serving()
        yield
        serving()

    def sync_dependency() -> Iterator[None]:
        serving()
        yield
        serving()

    async def background() -> None:
        serving()

    @app.get("/")
    async def look(
        tasks: BackgroundTasks,
        one: Annotated[None, Depends(dependency)],
        two: Annotated[None, Depends(sync_dependency)],
    ) -> None:
        tasks.add_task(background)
        tasks.add_task(serving)
        serving()
        await asyncio.create_task(asyncio.to_thread(serving))

    @app.get("/plain")
    def plain() -> str:
        return serving()

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            for _ in range(3):
                await asyncio.sleep(0)
                yield serving()

        return StreamingResponse(body())

    @app.get("/fail")
    async def fail() -> None:
        raise LookupError(serving())

    return app


PLACES = 8
"""How often `/` asks."""


@asynccontextmanager
async def both(micros: Micros, serving: Witness) -> AsyncIterator[dict[str, httpx2.AsyncClient]]:
    """Clients of two root apps that are open on one loop."""
    async with AsyncExitStack() as stack:
        clients = {}
        for name, micro in micros.items():
            app = asking(serving)
            install(app, micro)
            clients[name] = await stack.enter_async_context(client_of(app, raises=True))
        yield clients


async def test_each_root_app_of_a_loop_uses_its_own_everywhere(micros: Micros, serving: Witness) -> None:
    async with both(micros, serving) as clients:
        for name in NAMES * 3:
            serving.seen.clear()
            await clients[name].get("/")
            assert serving.seen == [name] * PLACES
            assert (await clients[name].get("/plain")).json() == name
            assert (await clients[name].get("/stream")).text == name * 3


async def test_requests_at_the_same_time_do_not_meet(micros: Micros, serving: Witness) -> None:
    """A lock of the same name is another one in each app."""
    barrier = asyncio.Barrier(2)

    async def hold(request: Request) -> Response:
        async with Lock("cart"), asyncio.timeout(10):
            await barrier.wait()
            return PlainTextResponse(serving())

    async with AsyncExitStack() as stack:
        clients = []
        for micro in micros.values():
            app = FastAPI(routes=[Route("/", hold)])
            install(app, micro)
            clients.append(await stack.enter_async_context(client_of(app, raises=True)))
        answers = await asyncio.gather(*(client.get("/") for client in clients))
    assert [answer.text for answer in answers] == list(NAMES)


class Served:
    """Several apps, each on a real server, all on one event loop in another thread."""

    def __init__(self, *apps: ASGIApp) -> None:
        configs = [uvicorn.Config(app, port=0, lifespan="on", log_level="warning") for app in apps]
        self._servers = [uvicorn.Server(config) for config in configs]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        await asyncio.gather(*(server.serve() for server in self._servers))

    def __enter__(self) -> list[str]:
        self._thread.start()
        until = monotonic() + 30
        while not all(server.started for server in self._servers):
            assert monotonic() < until
            assert self._thread.is_alive()
            sleep(0.01)
        ports = [server.servers[0].sockets[0].getsockname()[1] for server in self._servers]
        return [f"http://127.0.0.1:{port}" for port in ports]

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_two_root_apps_of_one_process_behind_real_servers(micros: Micros, serving: Witness) -> None:
    apps = [asking(serving) for _ in NAMES]
    for app, micro in zip(apps, micros.values(), strict=True):
        install(app, micro)
    with Served(*apps) as urls, httpx2.Client(trust_env=False, verify=False) as client:
        for name, url in [*zip(NAMES, urls, strict=True)] * 3:
            serving.seen.clear()
            assert client.get(url).status_code == 200
            assert client.get(url + "/fail").status_code == 500
            until = monotonic() + 10
            while len(serving.seen) < PLACES + 1:  # background tasks run when the answer is sent
                assert monotonic() < until
                sleep(0.005)
            assert serving.seen == [name] * (PLACES + 1)


def test_without_it_several_apps_are_told_apart_by_hand(micros: Micros, serving: Witness) -> None:
    apps = [asking(serving) for _ in NAMES]
    for app, micro in zip(apps, micros.values(), strict=True):
        app.router.lifespan_context = lifespan(micro)
    with Served(*apps) as urls, httpx2.Client(trust_env=False, verify=False) as client:
        assert client.get(urls[0] + "/plain").status_code == 500
    wrapped = [CoordinationMiddleware(app, micro) for app, micro in zip(apps, micros.values(), strict=True)]
    with Served(*wrapped) as urls, httpx2.Client(trust_env=False, verify=False) as client:
        assert [client.get(url + "/plain").json() for url in urls] == list(NAMES)


def mounted(micros: Micros, serving: Witness, *, kind: type[Starlette] = Starlette) -> Starlette:
    """A root app with `one`, and below it an app with `two`; the root looks before and after."""

    async def show(request: Request) -> Response:
        return PlainTextResponse(serving())

    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(serving())
        await websocket.close()

    async def fail(request: Request) -> Response:
        raise LookupError(serving())

    def routes() -> list[Any]:
        return [Route("/show", show), Route("/fail", fail), WebSocketRoute("/socket", socket)]

    below = kind(routes=routes())
    root = kind(routes=[*routes(), Mount("/below", app=below)])

    class Around:
        def __init__(self, app: ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
                return
            serving()
            try:
                await self._app(scope, receive, send)
            finally:
                serving()

    root.add_middleware(Around)
    install(root, micros["one"])
    install(below, micros["two"])
    return root


@pytest.mark.parametrize("kind", [Starlette, FastAPI])
def test_a_mounted_app_uses_its_own_and_the_root_its_own_again(
    micros: Micros, serving: Witness, kind: type[Starlette]
) -> None:
    with TestClient(mounted(micros, serving, kind=kind)) as client:
        assert client.get("/show").text == "one"
        assert client.get("/below/show").text == "two"
        with pytest.raises(LookupError):
            client.get("/below/fail")
        for path, name in (("/socket", "one"), ("/below/socket", "two")):
            with client.websocket_connect(path) as socket:
                assert socket.receive_text() == name
    assert serving.seen == ["one", "one", "one"] + ["one", "two", "one"] * 2 + ["one"] * 3 + ["one", "two", "one"]


def test_a_middleware_with_tasks_of_its_own_changes_nothing(micros: Micros, serving: Witness) -> None:
    class Base(BaseHTTPMiddleware):
        async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
            serving()
            return await call_next(request)

    app = asking(serving)
    app.add_middleware(Base)
    install(app, micros["one"])
    with TestClient(app) as client, TestClient(_other(micros["two"])):
        assert client.get("/plain").json() == "one"
    assert serving.seen == ["one", "one"]


def _other(micro: Grelmicro) -> Starlette:
    app = Starlette()
    install(app, micro)
    return app


async def test_nothing_is_bound_before_and_after(micros: Micros, serving: Witness) -> None:
    """The server calls all of these in one context, unlike those that have a task for each request."""
    gone = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        serving()
        if scope["path"] == "/fail":
            raise LookupError
        if scope["path"] == "/wait":
            gone.set()
            await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise OSError("the client is gone")

    middleware = CoordinationMiddleware(app, micros["one"])
    async with in_other_context(micros["one"]):
        for path in ("/", "/fail", "/", "/wait"):
            call = middleware({"type": "http", "path": path}, receive, send)
            if path == "/":
                await call
            elif path == "/fail":
                with pytest.raises(LookupError):
                    await call
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call, 0.05)
            assert bound_here() == []
    assert serving.seen == ["one"] * 4


def bound_here() -> list[Any]:
    """The apps that are bound to this context."""
    return [value for value in contextvars.copy_context().values() if isinstance(value, Grelmicro)]


@asynccontextmanager
async def in_other_context(micro: Grelmicro) -> AsyncIterator[None]:
    """`micro` open as a server's lifespan does it: in a task of its own, whose context nobody else sees."""
    opened, close = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        async with micro:
            opened.set()
            await close.wait()

    task = asyncio.create_task(run())
    await opened.wait()
    try:
        yield
    finally:
        close.set()
        await task


async def test_a_request_that_nobody_finished_ends_without_complaint(micros: Micros) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)

    async def nothing() -> Message:
        return {}

    async def drop(message: Message) -> None:
        return

    call = CoordinationMiddleware(app, micros["one"])({"type": "http"}, nothing, drop)
    contextvars.copy_context().run(call.send, None)
    call.close()
    assert bound_here() == []


async def test_lifespan_and_what_else_a_server_says_pass_as_they_are(micros: Micros) -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send, bound_here()))

    async def nothing() -> Message:
        return {}

    async def drop(message: Message) -> None:
        return

    scopes = [{"type": "lifespan"}, {"type": "another"}]
    for scope in scopes:
        await CoordinationMiddleware(app, micros["one"])(scope, nothing, drop)
    assert seen == [(scope, nothing, drop, []) for scope in scopes]


def test_a_thread_without_a_context_says_so_and_can_have_one(micros: Micros, serving: Witness) -> None:
    results: list[str] = []

    def bare() -> None:
        try:
            results.append(serving())
        except OutOfContextError:
            results.append("several")

    def with_one() -> None:
        with micros["one"].bound():
            results.append(serving())

    async def start(request: Request) -> Response:
        for work in (bare, with_one):
            thread = threading.Thread(target=work)
            thread.start()
            await asyncio.to_thread(thread.join)
        return PlainTextResponse(", ".join(results))

    app = Starlette(routes=[Route("/", start)])
    install(app, micros["one"])
    with TestClient(app) as client, TestClient(_other(micros["two"])):
        assert client.get("/").text == "several, one"


def test_an_app_whose_lifespan_did_not_run_says_what_to_do(micros: Micros, serving: Witness) -> None:
    app = asking(serving)
    install(app, micros["one"])
    with pytest.raises(OutOfContextError, match="not open.*the lifespan of the root app alone"):
        TestClient(app).get("/plain")
