"""`LocksDep`: several locks of one request, all or none, and never in a circle."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx2
import pytest
from fastapi import Depends, FastAPI, WebSocket
from fastapi.requests import HTTPConnection
from fastapi.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LockHandle, MultiLockHandle
from grelmicro.errors import SettingsValidationError
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import LockDep, LocksDep, TaskLockDep, install
from tests.helpers.stores import TroubledStore, request_lost
from tests.helpers.worlds import eventually
from tests.integrations.asgi import Visitor, client_of, is_free, new_app, take_away

Move = Annotated[MultiLockHandle, LocksDep("stock:{source}", "stock:{target}", timeout=0.1)]
Back = Annotated[MultiLockHandle, LocksDep("stock:{target}", "stock:{source}", timeout=0.1)]


def test_handles_are_in_the_order_of_the_names() -> None:
    app, _ = new_app()

    @app.get("/{source}/{target}")
    async def move(source: int, target: int, held: Move) -> list[object]:
        return [held.valid, *(handle.name for handle in held.handles), *(each.fencing_token for each in held.handles)]

    with TestClient(app) as client:
        assert client.get("/2/01").json() == [True, "stock:2", "stock:1", 1, 1]


def test_equal_names_are_one_lock() -> None:
    app, _ = new_app()

    @app.get("/{source}/{target}")
    async def move(source: int, target: int, held: Move) -> list[object]:
        return [held.valid, *(handle.name for handle in held.handles)]

    with TestClient(app) as client:
        assert client.get("/2/02").json() == [True, "stock:2", "stock:2"]


def test_all_or_none() -> None:
    app, micro = new_app()

    @app.get("/{source}/{target}")
    async def move(source: int, target: int, held: Move) -> None: ...

    with TestClient(app) as client:
        for busy, free in (("stock:1", "stock:2"), ("stock:2", "stock:1")):
            with held_elsewhere(micro, busy):
                answer = client.get("/1/2")
                assert (answer.status_code, answer.json()["type"]) == (409, "urn:grelmicro:busy")
                with held_elsewhere(micro, free, timeout=0):
                    pass
        assert client.get("/1/2").status_code == 200
        with held_elsewhere(micro, "stock:1", timeout=0), held_elsewhere(micro, "stock:2", timeout=0):
            pass


def test_settings_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_A_LEASE_DURATION", "7")
    app, _ = new_app()

    @app.get("/{x}")
    async def show(x: int, held: Annotated[MultiLockHandle, LocksDep("a:{x}", "b:{x}")]) -> list[object]:
        return [(math.ceil(handle.expires_in), handle.renewed_automatically) for handle in held.handles]

    with TestClient(app) as client:
        assert client.get("/1").json() == [[7, True], [30, True]]


def pair(store: Callable[[], Any]) -> list[FastAPI]:
    """Two workers: one takes the locks in one order, the other in the opposite one."""
    apps = []
    running: set[int] = set()
    for locks in (
        LocksDep("stock:{source}", "stock:{target}", timeout=50),
        LocksDep("stock:{target}", "stock:{source}", timeout=50),
    ):
        app = FastAPI()
        install(app, Grelmicro(uses=[store()]))

        @app.get("/{source}/{target}")
        async def move(source: int, target: int, held: Annotated[MultiLockHandle, locks]) -> bool:
            alone = not running & {source, target}
            running.update((source, target))
            await asyncio.sleep(0.001)
            running.difference_update((source, target))
            return alone and held.valid

        apps.append(app)
    return apps


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_opposite_orders_never_wait_in_a_circle(kind: str, tmp_path: Path) -> None:
    shared = MemoryStore()
    first, second = pair(
        lambda: Coordination(shared) if kind == "memory" else Coordination.from_url(f"sqlite:///{tmp_path}/locks.db")
    )
    async with client_of(first) as one, client_of(second) as other:
        urls = [f"/{x}/{y}" for x in range(3) for y in range(3)] * 4
        answers = await asyncio.wait_for(
            asyncio.gather(*(client.get(url, timeout=60) for url in urls for client in (one, other))), 50
        )
    assert [answer.json() for answer in answers] == [True] * 72


async def test_plain_handlers() -> None:
    app, micro = new_app()

    @app.get("/{source}/{target}")
    def move(source: int, target: int, held: Move) -> bool:
        time.sleep(0.001)
        held.from_thread.raise_if_lost()
        return held.valid

    async with client_of(app) as client:
        assert (await client.get("/1/2")).json() is True
        assert await is_free(micro, "stock:1", within=0)
        assert await is_free(micro, "stock:2", within=0)


Scope = Literal["function", "request"]


@pytest.mark.parametrize("scope", ["function", "request"])
async def test_scope(scope: Scope) -> None:
    app, micro = new_app()
    valid: list[bool] = []

    async def session() -> AsyncIterator[None]:
        yield
        valid.append(held_now[0].valid)

    held_now: list[MultiLockHandle] = []

    @app.get("/{x}")
    async def show(
        x: int,
        held: Annotated[MultiLockHandle, LocksDep("a:{x}", "b:{x}", scope=scope)],
        database: Annotated[None, Depends(session, scope=scope)],
    ) -> None:
        held_now.append(held)

    async with client_of(app) as client:
        await client.get("/1")
        assert valid == [True]
        assert held_now[0].released
        assert await is_free(micro, "a:1", within=0)
        assert await is_free(micro, "b:1", within=0)


async def test_losing_one_ends_the_handler_and_frees_the_others() -> None:
    app, micro = new_app()
    seen: list[str] = []

    @app.get("/{source}/{target}")
    async def move(
        source: int,
        target: int,
        held: Annotated[MultiLockHandle, LocksDep("stock:{source}", "stock:{target}", lease_duration=0.6)],
    ) -> None:
        await take_away(micro, held.handles[1])
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async with client_of(app) as client:
        answer = await client.get("/1/2")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:grelmicro:lost")
        assert seen == ["cancelled"]
        assert await is_free(micro, "stock:1", within=0.3)
        assert not await is_free(micro, "stock:2", within=0)


async def test_client_that_is_cancelled_while_it_waits_leaves_nothing_held() -> None:
    app, micro = new_app()

    @app.get("/{source}/{target}")
    async def move(
        source: int, target: int, held: Annotated[Any, LocksDep("stock:{source}", "stock:{target}", timeout=None)]
    ) -> None:
        raise AssertionError("must not run")

    async with client_of(app):
        lines = micro.coordination.lock_backend.queues.lines
        async with held_elsewhere(micro, "stock:2"):
            request = Visitor(app, "/1/2").start()
            await eventually(lambda: lines, "it waits")
            request.cancel()
            await asyncio.wait({request}, timeout=5)
            assert await is_free(micro, "stock:1")
        assert await is_free(micro, "stock:2")


async def test_unanswered_release_keeps_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    store = TroubledStore(MemoryStore())
    app, micro = new_app(store)

    @app.get("/{source}/{target}")
    async def move(source: int, target: int, held: Move) -> str:
        store.suffer("release", request_lost)
        return "done"

    async with client_of(app) as client:
        answer: httpx2.Response = await client.get("/1/2")
        assert (answer.status_code, answer.json()) == (200, "done")
        assert any("released in the background" in record.message for record in caplog.records)
        assert await is_free(micro, "stock:1")
        assert await is_free(micro, "stock:2")


def test_websocket() -> None:
    app, micro = new_app()

    @app.websocket("/{source}/{target}")
    async def follow(websocket: WebSocket, source: int, target: int, held: Move) -> None:
        await websocket.accept()
        await websocket.send_text(held.name)
        await websocket.receive_text()

    with TestClient(app) as client:
        with client.websocket_connect("/2/1") as socket:
            assert socket.receive_text() == "stock:1, stock:2"
            for name in ("stock:1", "stock:2"):
                with pytest.raises(TimeoutError), held_elsewhere(micro, name, timeout=0.05):
                    pass
            socket.send_text("done")
        for name in ("stock:1", "stock:2"):
            with held_elsewhere(micro, name, timeout=2):
                pass


def test_equal_declarations_are_equal() -> None:
    one = LocksDep("a:{x}", "b:{x}").dependency
    assert one == LocksDep("a:{x}", "b:{x}").dependency
    assert hash(one) == hash(LocksDep("a:{x}", "b:{x}").dependency)
    assert one != LocksDep("b:{x}", "a:{x}").dependency
    assert one != LocksDep("a:{x}", "b:{x}", timeout=1).dependency
    assert LocksDep("a:{x}").dependency != LockDep("a:{x}").dependency


def test_second_lock_is_refused_where_only_a_request_shows_it() -> None:
    """A dependency that wraps one of ours hides it from the look at the routes."""
    app, _ = new_app()

    @asynccontextmanager
    async def wrapped(connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        async with asynccontextmanager(LockDep("stock:{target}").dependency)(connection) as held:
            yield held

    async def later(connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        async with AsyncExitStack() as stack:
            yield await stack.enter_async_context(wrapped(connection))

    @app.get("/{source}/{target}")
    async def move(
        source: int,
        target: int,
        first: Annotated[LockHandle, LockDep("stock:{source}")],
        second: Annotated[LockHandle, Depends(later, scope="function")],
    ) -> str:
        return f"{first.name} {second.name}"

    with TestClient(app) as client:
        assert client.get("/1/1").json() == "stock:1 stock:1"
        with pytest.raises(SettingsValidationError, match=r'LocksDep\("stock:1", "stock:2"\)'):
            client.get("/1/2")


def test_task_lock_beside_a_lock() -> None:
    """It never waits, so no circle can come of it."""
    app, _ = new_app()

    @app.get("/{source}/{target}")
    async def move(
        source: int,
        target: int,
        once: Annotated[LockHandle, TaskLockDep("move:{source}")],
        held: Move,
    ) -> str:
        return f"{once.name} {held.name}"

    with TestClient(app) as client:
        assert client.get("/1/2").json() == "move:1 stock:1, stock:2"
