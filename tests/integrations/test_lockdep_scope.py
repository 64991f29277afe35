"""`LockDep`: from when to when a request holds its lock, whatever becomes of the request."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import pytest
from fastapi import BackgroundTasks, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import LockHandle
from grelmicro_fastapi import LockDep
from tests.helpers.stores import Fault, TroubledStore, refused, reply_lost, request_lost
from tests.helpers.worlds import eventually
from tests.integrations.asgi import CancelWhenLeft, Visitor, client_of, is_free, new_app, take_away

Scope = Literal["function", "request"]

scopes = pytest.mark.parametrize("scope", ["function", "request"])


def held_for(scope: Scope) -> Any:
    return LockDep("cart:{cart_id}", timeout=5, scope=scope)


class Shop:
    """An application whose handlers say when they got how far, and wait to be let on."""

    def __init__(self, scope: Scope) -> None:
        self.app, self.micro = new_app()
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        held = held_for(scope)

        @self.app.get("/json/{cart_id}")
        async def json(cart_id: int, lock: Annotated[LockHandle, held]) -> bool:
            return lock.valid

        @self.app.get("/stream/{cart_id}")
        async def stream(cart_id: int, lock: Annotated[LockHandle, held]) -> StreamingResponse:
            async def body() -> AsyncIterator[str]:
                yield f"{lock.valid}"
                await self._stop_here()

            return StreamingResponse(body())

        @self.app.get("/broken-stream/{cart_id}")
        async def broken_stream(cart_id: int, lock: Annotated[LockHandle, held]) -> StreamingResponse:
            async def body() -> AsyncIterator[str]:
                yield "begun"
                raise ValueError("broken stream")

            return StreamingResponse(body())

        @self.app.get("/background/{cart_id}")
        async def background(cart_id: int, lock: Annotated[LockHandle, held], tasks: BackgroundTasks) -> None:
            tasks.add_task(self._stop_here)

        @self.app.get("/refuses/{cart_id}")
        async def refuses(cart_id: int, lock: Annotated[LockHandle, held]) -> None:
            raise HTTPException(404)

        @self.app.get("/fails/{cart_id}")
        async def fails(cart_id: int, lock: Annotated[LockHandle, held]) -> None:
            raise ValueError("broken handler")

    async def _stop_here(self) -> None:
        self.reached.set()
        await self.go_on.wait()


@scopes
@pytest.mark.parametrize("url", ["/stream/1", "/background/1"])
async def test_scope_says_whether_the_rest_of_the_response_is_covered(scope: Scope, url: str) -> None:
    shop = Shop(scope)
    async with client_of(shop.app) as client:
        request = asyncio.create_task(client.get(url))
        await asyncio.wait_for(shop.reached.wait(), 10)
        assert await is_free(shop.micro, "cart:1", within=0.2) is (scope == "function")
        shop.go_on.set()
        answer = await request
        assert answer.text == ("null" if "background" in url else f"{scope == 'request'}")
        assert await is_free(shop.micro, "cart:1")


@scopes
@pytest.mark.parametrize(
    ("url", "status"), [("/json/1", 200), ("/refuses/1", 404), ("/fails/1", 500), ("/broken-stream/1", 200)]
)
async def test_lock_is_free_however_it_ends(scope: Scope, url: str, status: int) -> None:
    shop = Shop(scope)
    async with client_of(shop.app) as client:
        for _ in range(2):
            answer = await client.get(url)
            assert answer.status_code == status
            assert await is_free(shop.micro, "cart:1", within=1)


@scopes
async def test_lost_lease_ends_the_handler(scope: Scope) -> None:
    app, micro = new_app()
    seen: list[str] = []

    @app.get("/{cart_id}")
    async def buy(
        cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", lease_duration=0.3, scope=scope)]
    ) -> None:
        await take_away(micro, held)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(f"cancelled, lost: {held.lost}")
            raise

    async with client_of(app) as client:
        answer = await client.get("/1")
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:grelmicro:lost"
        assert seen == ["cancelled, lost: True"]
        # The connection and the task are as good as before.
        assert (await client.get("/2/none")).status_code == 404


async def test_own_error_of_the_handler_stays_when_the_lease_is_lost_too() -> None:
    app, micro = new_app()

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", lease_duration=0.3)]) -> None:
        await take_away(micro, held)
        try:
            await held.wait_lost()
        finally:
            raise HTTPException(418)

    async with client_of(app) as client:
        assert (await client.get("/1")).status_code == 418


async def test_lock_that_the_handler_gave_back_itself() -> None:
    app, micro = new_app()

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> bool:
        await held.release()
        return await is_free(micro, "cart:1")

    async with client_of(app) as client:
        assert (await client.get("/1")).json() is True


async def test_unanswered_release_keeps_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    """The handler had the lock to its end; only others wait a little longer."""
    store = TroubledStore(MemoryStore())
    app, micro = new_app(store)

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> str:
        store.suffer("release", request_lost)
        return "done"

    async with client_of(app) as client:
        answer = await client.get("/1")
        assert (answer.status_code, answer.json()) == (200, "done")
        assert any("released in the background" in record.message for record in caplog.records)
        assert await is_free(micro, "cart:1")


@pytest.mark.parametrize(("fault", "kind"), [(refused, "unavailable"), (reply_lost, "unknown")])
async def test_store_that_fails_refuses_before_the_handler_runs(fault: Fault, kind: str) -> None:
    store = TroubledStore(MemoryStore())
    app, micro = new_app(store)

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> None:
        raise AssertionError("must not run")

    async with client_of(app) as client:
        store.suffer("acquire", fault)
        answer = await client.get("/1")
        assert answer.status_code == 503
        assert answer.json()["type"] == f"urn:grelmicro:{kind}"
        assert await is_free(micro, "cart:1")


def middleware(kind: str, app: FastAPI) -> Any:
    if kind == "base":
        app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    app.add_middleware(CancelWhenLeft)
    return app


@scopes
@pytest.mark.parametrize("kind", ["plain", "base"])
async def test_client_that_leaves_while_it_waits_leaves_the_queue(scope: Scope, kind: str) -> None:
    app, micro = new_app()
    middleware(kind, app)

    @app.get("/{cart_id}")
    async def buy(
        cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=None, scope=scope)]
    ) -> None:
        raise AssertionError("must not run")

    async with client_of(app):
        lines = micro.coordination.lock_backend.queues.lines
        async with app_holds(micro):
            visitor = Visitor(app, "/1")
            request = visitor.start()
            await eventually(lambda: lines, "it waits")
            visitor.leave()
            await asyncio.wait_for(request, 5)
            assert not lines
            assert visitor.sent == []
        assert await is_free(micro, "cart:1")


@asynccontextmanager
async def app_holds(micro: Grelmicro) -> AsyncIterator[None]:
    async with micro.coordination.lock("cart:1"):
        yield


@scopes
@pytest.mark.parametrize("kind", ["plain", "base"])
@pytest.mark.parametrize("native", [True, False], ids=["task-cancel", "scope-cancel"])
async def test_cancelled_holder_releases_at_once(scope: Scope, kind: str, native: bool) -> None:
    app, micro = new_app()
    middleware(kind, app)
    reached = asyncio.Event()

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", scope=scope)]) -> None:
        reached.set()
        await asyncio.sleep(60)

    async with client_of(app):
        visitor = Visitor(app, "/1")
        request = visitor.start()
        await asyncio.wait_for(reached.wait(), 10)
        if native:
            request.cancel()
        else:
            visitor.leave()
        await asyncio.wait({request}, timeout=5)
        assert request.done()
        began = time.monotonic()
        assert await is_free(micro, "cart:1")
        assert time.monotonic() - began < 1  # 100 ms, were the machine quiet
