"""Websockets that hold a lock or need the leader."""

import asyncio
from contextlib import nullcontext
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.endpoints import WebSocketEndpoint
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LeaderElection, LockHandle
from grelmicro.testing.aids import held_elsewhere
from grelmicro_fastapi import LockDep
from grelmicro_starlette import install, leader_only, lifespan, locked
from tests.helpers.worlds import eventually
from tests.integrations.asgi import is_free
from tests.integrations.callers import Busy, Caller, open_app


class Chat:
    """An application with one locked websocket route, in either framework; it echoes one message."""

    def __init__(self, framework: str, *, timeout: float | None) -> None:
        self.micro = Grelmicro(uses=[Coordination(MemoryStore())])
        self.timeout = timeout
        self.heard: list[str] = []
        self.app = getattr(self, f"_{framework}")()
        install(self.app, self.micro)

    async def _talk(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            self.heard.append(await websocket.receive_text())
            await websocket.send_text(self.heard[-1])
        except WebSocketDisconnect:
            self.heard.append("left")

    def _starlette(self) -> Starlette:
        return Starlette(routes=[WebSocketRoute("/{room}", locked("room:{room}", timeout=self.timeout)(self._talk))])

    def _method(self) -> Starlette:
        talk = self._talk

        class Room(WebSocketEndpoint):
            @locked("room:{room}", timeout=self.timeout)
            async def on_connect(self, websocket: WebSocket) -> None:
                await talk(websocket)

        return Starlette(routes=[WebSocketRoute("/{room}", Room)])

    def _fastapi(self) -> Starlette:
        app = FastAPI()

        @app.websocket("/{room}")
        async def chat(
            websocket: WebSocket, room: str, held: Annotated[LockHandle, LockDep("room:{room}", timeout=self.timeout)]
        ) -> None:
            await self._talk(websocket)

        return app


kinds = pytest.mark.parametrize("framework", ["starlette", "method", "fastapi"])


@kinds
async def test_client_that_leaves_while_its_websocket_waits_leaves_the_queue(framework: str) -> None:
    chat = Chat(framework, timeout=None)
    async with open_app(chat.app):
        async with Busy(chat.micro, "room:a") as busy:
            caller = Caller("/a", kind="websocket")
            caller.connect()
            session = caller.call(chat.app)
            await eventually(lambda: busy.waiting == 1, "it waits")
            caller.leave()
            await asyncio.wait_for(session, 10)
            assert busy.waiting == 0
            assert caller.sent == []
            assert chat.heard == []
        assert await is_free(chat.micro, "room:a")


@kinds
async def test_websocket_that_waited_opens_and_hears_what_it_is_told(framework: str) -> None:
    chat = Chat(framework, timeout=None)
    async with open_app(chat.app):
        caller = Caller("/a", kind="websocket")
        caller.connect()
        async with Busy(chat.micro, "room:a"):
            session = caller.call(chat.app)
            await eventually(lambda: caller.received == 2, "it is watched")
        await eventually(lambda: len(caller.sent) == 1, "it is open")
        caller.text("hello")
        if framework == "method":
            caller.leave()
        await asyncio.wait_for(session, 10)
        assert caller.sent[0]["type"] == "websocket.accept"
        assert caller.sent[1]["text"] == "hello"


@kinds
async def test_lock_is_free_when_the_client_of_an_open_websocket_leaves(framework: str) -> None:
    chat = Chat(framework, timeout=None)
    async with open_app(chat.app):
        caller = Caller("/a", kind="websocket")
        caller.connect()
        session = caller.call(chat.app)
        await eventually(lambda: len(caller.sent) == 1, "it is open")
        assert not await is_free(chat.micro, "room:a", within=0)
        caller.leave()
        second = pytest.raises(RuntimeError, match="once a disconnect message")
        with second if framework == "method" else nullcontext():  # it receives again after a disconnect
            await asyncio.wait_for(session, 10)
        assert chat.heard == ["left"]
        assert await is_free(chat.micro, "room:a")


@kinds
def test_busy_websocket_is_denied_before_it_opens(framework: str) -> None:
    chat = Chat(framework, timeout=0)
    with TestClient(chat.app) as client, held_elsewhere(chat.micro, "room:a"):
        with pytest.raises(WebSocketDenialResponse) as denial, client.websocket_connect("/a"):
            pass
        assert denial.value.status_code == 409
        assert denial.value.json()["type"] == "urn:grelmicro:busy"


@kinds
async def test_busy_websocket_is_closed_where_the_server_cannot_deny(framework: str) -> None:
    chat = Chat(framework, timeout=0)
    async with open_app(chat.app), Busy(chat.micro, "room:a"):
        caller = Caller("/a", kind="websocket")
        caller.connect()
        await asyncio.wait_for(caller.call(chat.app), 10)
        assert [(message["type"], message.get("code")) for message in caller.sent] == [("websocket.close", 1013)]


class Counter(WebSocketEndpoint):
    """Takes the lock for each message."""

    encoding = "text"

    @locked("count:{name}", timeout=None)
    async def on_receive(self, websocket: WebSocket, data: Any) -> None:
        await websocket.send_text(f"{data} {websocket.state.lock.name}")


def counting(endpoint: type[WebSocketEndpoint]) -> tuple[Starlette, Grelmicro]:
    app, micro = Starlette(routes=[WebSocketRoute("/{name}", endpoint)]), Grelmicro(uses=[Coordination(MemoryStore())])
    install(app, micro)
    return app, micro


async def test_messages_that_arrive_while_one_waits_are_heard_in_order() -> None:
    app, micro = counting(Counter)
    async with open_app(app):
        caller = Caller("/n", kind="websocket")
        caller.connect()
        session = caller.call(app)
        async with Busy(micro, "count:n") as busy:
            caller.text("1")
            await eventually(lambda: busy.waiting == 1, "it waits")
            for number in "234":
                caller.text(number)
            await eventually(lambda: caller.unread == 0, "they were read ahead")
        await eventually(lambda: len(caller.sent) == 5, "all are answered")
        assert [message["text"] for message in caller.sent[1:]] == [f"{number} count:n" for number in "1234"]
        async with Busy(micro, "count:n") as busy:
            caller.text("5")
            await eventually(lambda: busy.waiting == 1, "it waits")
            caller.leave()
            await asyncio.wait_for(session, 10)
            assert len(caller.sent) == 5


async def test_what_is_done_when_the_client_has_left_waits_for_its_lock() -> None:
    class Tidy(WebSocketEndpoint):
        @locked("count:{name}", timeout=None)
        async def on_disconnect(self, websocket: WebSocket, close_code: int) -> None:
            tidied.append(close_code)

    tidied: list[int] = []
    app, micro = counting(Tidy)
    async with open_app(app):
        caller = Caller("/n", kind="websocket")
        caller.connect()
        async with Busy(micro, "count:n") as busy:
            session = caller.call(app)
            caller.leave()
            await eventually(lambda: busy.waiting == 1, "it waits")
            await asyncio.sleep(0.1)
            assert tidied == []
        await asyncio.wait_for(session, 10)
        assert tidied == [1006]


async def test_open_websocket_that_is_refused_is_closed() -> None:
    class Impatient(WebSocketEndpoint):
        encoding = "text"

        @locked("count:{name}", timeout=0)
        async def on_receive(self, websocket: WebSocket, data: Any) -> None:
            raise AssertionError("must not run")

    app, micro = counting(Impatient)
    async with open_app(app), Busy(micro, "count:n"):
        caller = Caller("/n", kind="websocket", extensions={"websocket.http.response": {}})
        caller.connect()
        caller.text("1")
        await asyncio.wait_for(caller.call(app), 10)
        told = [(message["type"], message.get("code")) for message in caller.sent]
        assert told == [("websocket.accept", None), ("websocket.close", 1013)]


async def test_websocket_of_a_worker_that_does_not_lead_is_denied() -> None:
    leader, other = LeaderElection("feed"), LeaderElection("feed")

    @leader_only(other)
    async def chat(websocket: WebSocket) -> None:
        raise AssertionError("must not run")

    micro = Grelmicro(uses=[Coordination(MemoryStore())])
    app = Starlette(routes=[WebSocketRoute("/", chat)])
    app.router.lifespan_context = lifespan(micro, lead={leader: asyncio.Event().wait, other: asyncio.Event().wait})
    install(app, micro)
    async with open_app(app):
        await asyncio.wait_for(leader.wait_for_leader(), 10)
        await eventually(lambda: other.record is not None, "the other one knows it")
        caller = Caller("/", kind="websocket", extensions={"websocket.http.response": {}})
        caller.connect()
        await asyncio.wait_for(caller.call(app), 10)
        assert caller.status == 503


async def test_open_websocket_is_closed_when_the_term_ends() -> None:
    leader = LeaderElection("feed")

    @leader_only(leader)
    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive_text()

    micro, stop = Grelmicro(uses=[Coordination(MemoryStore())]), asyncio.Event()
    app = Starlette(routes=[WebSocketRoute("/", chat)])
    install(app, micro)
    async with open_app(app):
        election = asyncio.create_task(leader(stop=stop))
        await asyncio.wait_for(leader.wait_for_leader(), 10)
        caller = Caller("/", kind="websocket")
        caller.connect()
        session = caller.call(app)
        await eventually(lambda: len(caller.sent) == 1, "it is open")
        stop.set()
        await asyncio.wait_for(session, 10)
        assert [message.get("code") for message in caller.sent] == [None, 1013]
        await election


async def test_lost_lock_closes_an_open_websocket() -> None:
    chat = Chat("starlette", timeout=None)
    async with open_app(chat.app):
        caller = Caller("/a", kind="websocket")
        caller.connect()
        session = caller.call(chat.app)
        await eventually(lambda: len(caller.sent) == 1, "it is open")
        held: LockHandle = caller.scope["state"]["lock"]
        held.lose("another one took it")
        await asyncio.wait_for(session, 10)
        assert [message.get("code") for message in caller.sent] == [None, 1013]
