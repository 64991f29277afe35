"""`FenceDep` and `LeaderDep`; and what all dependencies have in common."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import wraps
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import pytest
from fastapi import Depends, FastAPI, WebSocket
from fastapi.requests import HTTPConnection
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LeaderElection, LeaderRecord, LockHandle
from grelmicro.errors import SettingsValidationError
from grelmicro.task import Tasks
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import FenceDep, LeaderDep, LockDep, LocksDep, TaskLockDep, install
from tests.helpers.worlds import eventually
from tests.integrations.asgi import client_of, is_free, new_app

Scope = Literal["function", "request"]
scopes = pytest.mark.parametrize("scope", ["function", "request"])

Fence = Annotated[int, FenceDep("cart:{cart_id}", timeout=0.1)]


def test_fence_rises_with_each_request() -> None:
    app, micro = new_app()

    @app.get("/{cart_id}")
    async def show(cart_id: int, fence: Fence) -> int:
        return fence

    with TestClient(app) as client:
        assert [client.get(url).json() for url in ("/1", "/01", "/2", "/1")] == [1, 2, 1, 3]
        with held_elsewhere(micro, "cart:1"):
            assert client.get("/1").status_code == 409


def test_lock_and_fence_of_a_name_are_one() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(
        cart_id: int, fence: Fence, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=0.1)]
    ) -> bool:
        return held.fencing_token == fence

    with TestClient(app) as client:
        assert client.get("/1").json() is True


def test_settings_of_a_lock_are_those_of_the_dependency_that_is_entered_first() -> None:
    app, micro = new_app()
    first = LockDep("a:{x}", timeout=0, lease_duration=7)
    second = LockDep("a:{x}", timeout=None, lease_duration=90)

    @app.get("/{x}", dependencies=[first])
    async def show(x: int, held: Annotated[LockHandle, second]) -> bool:
        return 6 < held.expires_in <= 7

    with TestClient(app) as client:
        assert client.get("/1").json() is True
        with held_elsewhere(micro, "a:1"):
            assert client.get("/1").status_code == 409


@pytest.mark.parametrize("leader", ["index", None, LeaderElection])
def test_leader_is_an_election(leader: Any) -> None:
    with pytest.raises(SettingsValidationError, match=r"^LeaderDep\(leader\): .* LeaderElection"):
        LeaderDep(leader)


DECLARATIONS: dict[str, tuple[Any, str]] = {
    "lock": (lambda: LockDep("a:{x}", timeout=0.1), "a:1"),
    "fence": (lambda: FenceDep("a:{x}", timeout=0.1), "a:1"),
    "locks": (lambda: LocksDep("a:{x}", "b:{x}", timeout=0.1), "a:1"),
    "task": (lambda: TaskLockDep("a:{x}"), ""),
}
every = pytest.mark.parametrize("kind", DECLARATIONS)


@every
def test_override_in_a_test(kind: str) -> None:
    """An equal declaration is the key, so a test need not have the one of the route."""
    declare, busy = DECLARATIONS[kind]
    app, micro = new_app()

    @app.get("/{x}")
    async def show(x: int, held: Annotated[Any, declare()]) -> str:
        return str(held)

    @app.websocket("/{x}")
    async def follow(websocket: WebSocket, x: int, held: Annotated[Any, declare()]) -> None:
        await websocket.accept()
        await websocket.send_text(str(held))

    app.dependency_overrides[declare().dependency] = lambda: "no lock"
    with TestClient(app) as client:
        holder = held_elsewhere(micro, busy or "unused")
        with holder:
            assert client.get("/1").json() == "no lock"
            with client.websocket_connect("/1") as socket:
                assert socket.receive_text() == "no lock"
        app.dependency_overrides.clear()
        assert client.get("/1").json() != "no lock"


def test_override_of_a_leader() -> None:
    tasks = Tasks()
    micro = Grelmicro(uses=[Coordination(MemoryStore()), tasks])
    leader = micro.coordination.leaderelection("index")
    tasks.add_task(leader)
    app = FastAPI()
    install(app, micro)

    @app.get("/")
    async def show(term: Annotated[LeaderRecord, LeaderDep(leader)]) -> object:
        return term.fence

    now = datetime.now(UTC)
    app.dependency_overrides[LeaderDep(leader).dependency] = lambda: LeaderRecord("test", 7, 15, now, now, 1)
    with TestClient(app) as client:
        assert client.get("/").json() == 7


@every
def test_websocket_holds_it_to_its_end(kind: str) -> None:
    declare, _ = DECLARATIONS[kind]
    app, _ = new_app()

    @app.websocket("/{x}")
    async def follow(websocket: WebSocket, x: int, held: Annotated[Any, declare()]) -> None:
        await websocket.accept()
        if await websocket.receive_text() == "fail":
            raise ZeroDivisionError

    with TestClient(app) as client:
        with pytest.raises(ZeroDivisionError), client.websocket_connect("/1") as socket:
            with pytest.raises(WebSocketDisconnect), client.websocket_connect("/01"):
                pass
            socket.send_text("fail")
            socket.receive_text()
        if kind != "task":
            with client.websocket_connect("/1") as socket:
                socket.send_text("done")


@every
@scopes
async def test_dependency_of_a_collected_request_frees_its_lock(
    kind: str, scope: Scope, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrapper that forgets its generator leaves it to the garbage collector, which says so and frees the lock."""
    declare, _ = DECLARATIONS[kind]
    dependency = declare().dependency
    app, _ = new_app()

    async def forgets(connection: HTTPConnection) -> AsyncIterator[object]:
        left = dependency(connection)
        yield await anext(left)
        connection.scope["left"] = [left, left]

    @app.get("/{x}")
    async def show(x: int, held: Annotated[Any, Depends(forgets, scope=scope)]) -> None: ...

    async with client_of(app) as client:
        with caplog.at_level(logging.WARNING):
            assert (await client.get("/1")).status_code == 200
            gc.collect()
            await eventually(lambda: "left unfinished" in caplog.text, "it is told")
        assert "didn't stop" not in caplog.text
        if kind == "task":
            return
        async with asyncio.timeout(10):
            while (await client.get("/1")).status_code == 409:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("decorated", [False, True])
def test_route_that_yields_its_response_needs_the_longer_scope(decorated: bool) -> None:
    app, _ = new_app()

    async def stream(x: int, held: Annotated[LockHandle, LockDep("a:{x}")]) -> AsyncIterator[int]:
        yield 1

    @wraps(stream)
    def traced(**values: Any) -> AsyncIterator[int]:
        return stream(**values)

    endpoint = traced if decorated else stream
    app.add_api_route("/{x}", endpoint, response_class=StreamingResponse, response_model=None)

    with TestClient(app) as client, pytest.raises(SettingsValidationError, match=r"use scope='request'"):
        client.get("/1")


@pytest.mark.skipif(find_spec("fastapi.sse") is None, reason="earlier releases of FastAPI know no such routes")
async def test_route_that_yields_its_response_is_covered_by_the_longer_scope() -> None:
    app, micro = new_app()

    @app.get("/{x}", response_class=StreamingResponse, response_model=None)
    async def stream(x: int, held: Annotated[LockHandle, LockDep("a:{x}", scope="request")]) -> AsyncIterator[str]:
        yield f"{held.valid} "
        yield str(await is_free(micro, "a:1", within=0))

    async with client_of(app) as client:
        assert (await client.get("/1")).text == "True False"
        assert await is_free(micro, "a:1", within=0)


async def test_lock_that_a_dependency_gave_back_is_taken_anew() -> None:
    app, _ = new_app()
    dependency = LockDep("a:{x}", timeout=0.1).dependency

    async def peek(connection: HTTPConnection) -> int:
        async for held in dependency(connection):
            fence = held.fencing_token
        return int(fence)

    @app.get("/{x}")
    async def show(
        x: int, before: Annotated[int, Depends(peek)], held: Annotated[LockHandle, LockDep("a:{x}")]
    ) -> list[object]:
        return [before, held.fencing_token, held.valid]

    @app.get("/other/{x}")
    async def other(
        x: int, before: Annotated[int, Depends(peek)], held: Annotated[LockHandle, LockDep("b:{x}")]
    ) -> list[object]:
        return [before, held.name]

    async with client_of(app) as client:
        assert (await client.get("/1")).json() == [1, 2, True]
        assert (await client.get("/other/1")).json() == [3, "b:1"]


async def test_lock_that_was_not_had_can_be_tried_again() -> None:
    app, micro = new_app()
    dependency = LockDep("a:{x}", timeout=0).dependency

    async def attempt(connection: HTTPConnection) -> bool:
        try:
            async for _ in dependency(connection):
                return True
        except TimeoutError:
            await holder.__aexit__(None, None, None)
        return False

    @app.get("/{x}")
    async def show(
        x: int, had: Annotated[bool, Depends(attempt)], held: Annotated[LockHandle, LockDep("a:{x}")]
    ) -> list[object]:
        return [had, held.valid]

    async with client_of(app) as client:
        holder = held_elsewhere(micro, "a:1")
        await holder.__aenter__()
        assert (await client.get("/1")).json() == [False, True]
