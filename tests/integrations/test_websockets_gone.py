"""A real server, each implementation of websockets: nobody is told of a lost lock when the client has gone."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from starlette.endpoints import WebSocketEndpoint
from starlette.routing import WebSocketRoute
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, Lock, LockHandle
from grelmicro_fastapi import LockDep, install
from grelmicro_starlette import locked
from tests.helpers.worlds import eventually
from tests.integrations.callers import Busy

LEGACY = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::uvicorn.config.UvicornDeprecationWarning")

servers = pytest.mark.parametrize("ws", ["websockets-sansio", pytest.param("websockets", marks=LEGACY), "wsproto"])

leaving = pytest.mark.parametrize("way", ["close", "abort", "shutdown"])


class Plain(WebSocketEndpoint):
    """Takes a lock by itself for each message; the app's handlers know nothing of its websocket."""

    encoding = "text"

    async def on_receive(self, websocket: WebSocket, data: str) -> None:
        if data == "bye":
            await websocket.close()
        await Lock("room").acquire(timeout=0)


class Site:
    """An application whose websockets last until their lock is lost, and the server that runs it."""

    def __init__(self, ws: str) -> None:
        self.micro = Grelmicro(uses=[Coordination(MemoryStore())])
        self.held: list[LockHandle] = []
        self.ended: list[str] = []
        app = FastAPI()
        app.router.routes.append(WebSocketRoute("/deaf", locked("room", timeout=10)(self._last)))
        app.router.routes.append(WebSocketRoute("/plain", Plain))
        app.add_api_websocket_route("/reads", self._read)
        install(app, self.micro)
        config = uvicorn.Config(app, port=0, ws=ws, log_config=None, lifespan="on", timeout_graceful_shutdown=10)
        self.server = uvicorn.Server(config)

    async def _last(self, websocket: WebSocket) -> None:
        """Does not read."""
        await self._serve(websocket, websocket.state.lock)

    async def _read(self, websocket: WebSocket, held: Annotated[LockHandle, LockDep("room", timeout=10)]) -> None:
        """Reads, and goes on when its client has left."""
        await self._serve(websocket, held, reads=True)

    async def _serve(self, websocket: WebSocket, held: LockHandle, *, reads: bool = False) -> None:
        await websocket.accept()
        self.held.append(held)
        try:
            while reads and (await websocket.receive())["type"] != "websocket.disconnect":
                pass
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("interrupted")
            raise

    def connect(self, path: str) -> connect:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return connect(f"ws://127.0.0.1:{port}{path}", proxy=None)

    async def leave(self, client: ClientConnection, way: str) -> None:
        """Let the client go, or the server send it away, and wait until the server has no connection any more."""
        if way == "shutdown":
            self.server.should_exit = True
        elif way == "abort":
            client.transport.abort()
        else:
            await client.close()
        await eventually(lambda: not self.server.server_state.connections, "the connection is gone")

    async def lose(self) -> None:
        """Let the lock be lost, and wait for the end of the websocket."""
        self.held[0].lose("another one took it")
        await eventually(lambda: not self.server.server_state.tasks, "the websocket has ended")
        assert self.ended == ["interrupted"]


@asynccontextmanager
async def served(ws: str) -> AsyncIterator[Site]:
    site = Site(ws)
    serving = asyncio.create_task(site.server.serve())
    try:
        await eventually(lambda: site.server.started, "the server runs")
        yield site
    finally:
        site.server.should_exit = True
        await serving


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@servers
@leaving
@pytest.mark.parametrize("path", ["/reads", "/deaf"])
async def test_lost_lock_of_a_client_that_has_gone(
    ws: str, way: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(ws) as site, site.connect(path) as client:
        await eventually(lambda: site.held, "it is open")
        await site.leave(client, way)
        await site.lose()
    assert errors(caplog) == []


@servers
@leaving
async def test_lost_lock_of_a_client_whose_leaving_was_read_ahead(
    ws: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(ws) as site:
        async with Busy(site.micro, "room") as busy:
            opening = asyncio.ensure_future(site.connect("/deaf").__aenter__())
            await eventually(lambda: busy.waiting == 1, "it waits")
            await asyncio.sleep(0.1)  # by then it is watched
        client = await opening
        await eventually(lambda: site.held, "it is open")
        await site.leave(client, way)
        await asyncio.sleep(0.05)
        await site.lose()
        await client.close()
    assert errors(caplog) == []


@servers
@pytest.mark.parametrize("way", ["abort", "shutdown"])
@pytest.mark.parametrize("path", ["/reads", "/deaf"])
async def test_client_that_goes_while_its_websocket_waits(
    ws: str, way: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(ws) as site, Busy(site.micro, "room") as busy:
        opening = asyncio.ensure_future(site.connect(path).__aenter__())
        await eventually(lambda: busy.waiting == 1, "it waits")
        await asyncio.sleep(0.1)  # by then it is watched
        if way == "shutdown":
            site.server.should_exit = True
        else:
            opening.cancel()
        await eventually(lambda: not site.server.server_state.tasks, "the websocket has ended")
        assert busy.waiting == 0
        with suppress(asyncio.CancelledError, Exception):
            await opening
    assert site.held == []
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@servers
@pytest.mark.parametrize("path", ["/reads", "/deaf"])
async def test_client_that_is_there_is_told(ws: str, path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(ws) as site, site.connect(path) as client:
        await eventually(lambda: site.held, "it is open")
        site.held[0].lose("another one took it")
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(client.recv(), 10)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "Interrupted")
    assert errors(caplog) == []


@servers
@pytest.mark.parametrize(("text", "told"), [("1", (1013, "Busy")), ("bye", (1000, ""))])
async def test_websocket_of_a_class_that_is_refused_is_closed_once(
    ws: str, text: str, told: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with served(ws) as site, Busy(site.micro, "room"), site.connect("/plain") as client:
        await client.send(text)
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(client.recv(), 10)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == told
    assert errors(caplog) == []
