"""`LockDep`: from when to when a request holds its lock, whatever becomes of the request."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

import httpx2
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.requests import HTTPConnection
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
async def test_lock_outlives_the_transaction_that_it_guards(scope: Scope) -> None:
    app, _ = new_app()
    committed: list[bool] = []
    held_now: list[LockHandle] = []

    async def session() -> AsyncIterator[str]:
        yield "session"
        committed.append(held_now[0].valid)

    @app.get("/{cart_id}")
    async def buy(
        cart_id: int,
        held: Annotated[LockHandle, held_for(scope)],
        database: Annotated[str, Depends(session, scope=scope)],
    ) -> None:
        held_now.append(held)

    async with client_of(app) as client:
        assert (await client.get("/1")).status_code == 200
    assert committed == [True]
    assert not held_now[0].valid


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


async def test_lost_lease_of_a_plain_handler_shows_at_its_end() -> None:
    app, micro = new_app()
    ended = threading.Event()

    @app.get("/{cart_id}")
    def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", lease_duration=0.3)]) -> None:
        asyncio.run_coroutine_threadsafe(take_away(micro, held), micro.get_loop()).result()
        until = time.monotonic() + 10
        while not held.lost and time.monotonic() < until:
            time.sleep(0.01)
        ended.set()

    async with client_of(app) as client:
        answer = await client.get("/1")
        assert answer.status_code == 503
        assert ended.is_set()


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


async def test_sixty_plain_handlers_take_turns() -> None:
    """More than there are threads: a release never needs one."""
    app, micro = new_app()
    running, most = 0, 0

    @app.get("/{cart_id}")
    def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=50)]) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return held.fencing_token

    async with client_of(app) as client:
        began = time.monotonic()
        answers = await asyncio.gather(*(client.get("/1", timeout=60) for _ in range(60)))
        took = time.monotonic() - began
    assert [answer.status_code for answer in answers] == [200] * 60
    assert most == 1
    assert took < 20


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


async def test_cancelled_plain_handler_keeps_the_lease_while_its_thread_may_run() -> None:
    app, micro = new_app()
    reached, go_on = threading.Event(), threading.Event()

    @app.get("/{cart_id}")
    def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", lease_duration=1.5)]) -> None:
        reached.set()
        go_on.wait(20)

    async with client_of(app):
        request = Visitor(app, "/1").start()
        await eventually(reached.is_set, "the thread runs")
        request.cancel()
        await asyncio.wait({request}, timeout=5)
        assert not await is_free(micro, "cart:1", within=0)
        assert await is_free(micro, "cart:1", within=5)
        go_on.set()


def wrappings(dependency: Callable[..., AsyncIterator[LockHandle]]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The ways in which users wrap a dependency that yields; the first is not a good one."""

    async def bare(connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        async for held in dependency(connection):
            yield held

    async def closing(connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        async with aclosing(dependency(connection)) as holding:  # type: ignore[type-var]
            async for held in holding:
                yield held

    async def managed(connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        async with asynccontextmanager(dependency)(connection) as held:
            yield held

    yield from (("bare", bare), ("closing", closing), ("managed", managed))


@pytest.mark.parametrize("kind", ["bare", "closing", "managed"])
@pytest.mark.parametrize("ends", ["well", "error", "cancelled"])
@scopes
async def test_wrapped_dependency_frees_the_lock(kind: str, ends: str, scope: Scope) -> None:
    app, micro = new_app()
    wrapped = dict(wrappings(LockDep("cart:{cart_id}").dependency))[kind]
    reached = asyncio.Event()

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, Depends(wrapped, scope=scope)]) -> bool:
        reached.set()
        if ends == "error":
            raise HTTPException(418)
        if ends == "cancelled":
            await asyncio.sleep(60)
        return held.valid

    async with client_of(app) as client:
        if ends == "cancelled":
            request = Visitor(app, "/1").start()
            await asyncio.wait_for(reached.wait(), 10)
            request.cancel()
            await asyncio.wait({request}, timeout=5)
        else:
            answer: httpx2.Response = await client.get("/1")
            assert answer.status_code == (418 if ends == "error" else 200)
        del wrapped
        assert await is_free(micro, "cart:1", within=5)
