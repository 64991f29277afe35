"""`TaskLockDep` and requests that end before their route begins: nothing was done, so nothing is kept."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import Body, Depends, FastAPI, HTTPException, Request, Response, WebSocket, WebSocketException
from fastapi.exceptions import RequestValidationError
from fastapi.requests import HTTPConnection
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import LockHandle, TaskLock, WouldBlockError
from grelmicro.testing.aids import held_elsewhere
from grelmicro_fastapi import LockDep, TaskLockDep
from tests.helpers.stores import TroubledStore, request_lost
from tests.integrations.asgi import Visitor, client_of, new_app, take_away

Kept = Annotated[LockHandle, TaskLockDep("t:{x}", min_hold_duration=30)]
KeptLonger = Annotated[LockHandle, TaskLockDep("t:{x}", min_hold_duration=30, scope="request")]


async def stranger() -> None:
    raise HTTPException(401)


def plain_stranger() -> None:
    raise HTTPException(401)


def session() -> Iterator[None]:
    try:
        yield
    except HTTPException as error:
        error.add_note("rolled back")
        raise


def failing_session() -> Iterator[None]:
    raise ZeroDivisionError
    yield


async def nested(inner: Annotated[None, Depends(stranger)]) -> None: ...


async def locked(micro: Grelmicro) -> bool:
    return await TaskLock("t:1", backend=micro.coordination.lock_backend).locked()


def decorated(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(handler)
    async def inner(*args: Any, **kwargs: Any) -> Any:
        if kwargs["x"] == 1:
            raise HTTPException(403)
        return await handler(*args, **kwargs)

    return inner


REFUSALS: dict[str, tuple[Any, int]] = {
    "async dependency": (Depends(stranger), 401),
    "plain dependency": (Depends(plain_stranger), 401),
    "nested dependency": (Depends(nested), 401),
    "dependency that fails": (Depends(failing_session), 500),
    "busy lock": (LockDep("busy", timeout=0), 409),
}


@pytest.mark.parametrize("kept", [Kept, KeptLonger], ids=["function", "request"])
@pytest.mark.parametrize("kind", REFUSALS)
async def test_refused_by_a_dependency(kind: str, kept: Any) -> None:
    refusing, status = REFUSALS[kind]
    app, micro = new_app()
    ran: list[int] = []

    @app.get("/{x}")
    async def work(
        x: int, held: kept, inside: Annotated[None, Depends(session, scope="function")], other: Annotated[Any, refusing]
    ) -> None:
        ran.append(x)

    @app.get("/plain/{x}")
    def plain(x: int, held: kept, other: Annotated[Any, refusing]) -> None:
        ran.append(x)

    async with client_of(app) as client, held_elsewhere(micro, "busy"):
        for url in ("/1", "/1", "/plain/1"):
            assert (await client.get(url)).status_code == status
            assert not await locked(micro)
    assert ran == []


@pytest.mark.parametrize("kept", [Kept, KeptLonger], ids=["function", "request"])
async def test_not_valid(kept: Any) -> None:
    app, micro = new_app()

    @app.post("/{x}")
    async def work(x: int, held: kept, n: Annotated[int, Body()]) -> None: ...

    @app.post("/plain/{x}")
    def plain(x: int, held: kept, n: int) -> None: ...

    async with client_of(app) as client:
        for url in ("/1", "/1", "/plain/1"):
            assert (await client.post(url, json="no number")).status_code == 422
            assert not await locked(micro)
        assert (await client.post("/1", json=7)).status_code == 200
        assert await locked(micro)


async def test_not_valid_and_a_custom_route_says_so() -> None:
    """As the documentation of FastAPI shows: the error that ends the request is another one."""

    class Own(APIRoute):
        def get_route_handler(self) -> Any:
            handle = super().get_route_handler()

            async def handled(request: Request) -> Response:
                try:
                    return await handle(request)
                except RequestValidationError as error:
                    raise HTTPException(400, str(len(error.errors()))) from None

            return handled

    app, micro = new_app()
    app.router.route_class = Own

    @app.post("/{x}")
    async def work(x: int, held: Kept, n: Annotated[int, Body()]) -> None: ...

    async with client_of(app) as client:
        assert (await client.post("/1", json="no number")).status_code == 400
        assert not await locked(micro)


ERRORS = {
    "http": HTTPException(418),
    "busy": WouldBlockError("lock 'x' is held by another holder"),
    "validation": RequestValidationError([]),
    "other": ZeroDivisionError(),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("url", ["/1", "/plain/1"])
async def test_what_the_route_raises_keeps_it(url: str, kind: str) -> None:
    app, micro = new_app()

    @app.get("/{x}")
    async def work(x: int, held: Kept) -> None:
        raise ERRORS[kind]

    @app.get("/plain/{x}")
    def plain(x: int, held: Kept) -> None:
        raise ERRORS[kind]

    async with client_of(app) as client:
        assert (await client.get(url)).status_code >= 400
        assert await locked(micro)
        assert (await client.get(url)).status_code == 409


async def test_decorator_is_part_of_the_route() -> None:
    app, micro = new_app()

    @app.get("/{x}")
    @decorated
    async def work(x: int, held: Kept) -> None: ...

    async with client_of(app) as client:
        assert (await client.get("/1")).status_code == 403
        assert await locked(micro)


async def test_cancelled_before_the_route() -> None:
    app, micro = new_app()
    reached = asyncio.Event()

    async def slow() -> None:
        reached.set()
        await asyncio.sleep(60)

    @app.get("/{x}")
    def work(x: int, held: Kept, other: Annotated[None, Depends(slow)]) -> None: ...

    async with client_of(app):
        request = Visitor(app, "/1").start()
        await asyncio.wait_for(reached.wait(), 10)
        assert await locked(micro)
        request.cancel()
        await asyncio.wait({request}, timeout=10)
        assert not await locked(micro)


async def test_cancelled_in_the_route() -> None:
    app, micro = new_app()
    reached = asyncio.Event()

    @app.get("/{x}")
    async def work(x: int, held: Kept) -> None:
        reached.set()
        await asyncio.sleep(60)

    async with client_of(app):
        request = Visitor(app, "/1").start()
        await asyncio.wait_for(reached.wait(), 10)
        request.cancel()
        await asyncio.wait({request}, timeout=10)
        assert await locked(micro)


async def test_client_that_leaves_while_its_request_waits_for_a_lock() -> None:
    app, micro = new_app()

    @app.get("/{x}")
    async def work(x: int, held: Kept, lock: Annotated[LockHandle, LockDep("busy", timeout=60)]) -> None: ...

    async with client_of(app), held_elsewhere(micro, "busy"):
        visitor = Visitor(app, "/1")
        request = visitor.start()
        async with asyncio.timeout(10):
            while not await locked(micro):
                await asyncio.sleep(0.01)
            visitor.leave()
            await asyncio.wait({request})
        assert not await locked(micro)


async def test_lost_before_the_route() -> None:
    app, micro = new_app()
    ran = threading.Event()

    async def slow(x: int, held: Annotated[LockHandle, TaskLockDep("t:{x}", lease_duration=1)]) -> None:
        await take_away(micro, held)
        await asyncio.sleep(60)

    @app.get("/{x}")
    async def work(x: int, other: Annotated[None, Depends(slow)]) -> None:
        ran.set()

    async with client_of(app) as client:
        answer = await client.get("/1")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:grelmicro:lost")
        assert await locked(micro), "it is the other's"
    assert not ran.is_set()


async def test_dependency_that_holds_it_itself() -> None:
    app, micro = new_app()
    hold = asynccontextmanager(TaskLockDep("t:{x}", min_hold_duration=30).dependency)

    async def checked(connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        async with hold(connection) as held:
            if "x-user" not in connection.headers:
                raise HTTPException(401)
            yield held

    @app.get("/{x}")
    async def work(x: int, held: Annotated[LockHandle, Depends(checked, scope="function")]) -> None:
        raise HTTPException(418)

    async with client_of(app) as client:
        assert (await client.get("/1")).status_code == 401
        assert not await locked(micro)
        assert (await client.get("/1", headers={"x-user": "1"})).status_code == 418
        assert await locked(micro)


async def test_unanswered_end_of_a_refused_request() -> None:
    store = TroubledStore(MemoryStore())
    app, micro = new_app(store)

    async def refuse() -> None:
        store.suffer("release", request_lost)
        raise HTTPException(401)

    @app.get("/{x}")
    async def work(x: int, held: Kept, other: Annotated[None, Depends(refuse)]) -> None: ...

    async with client_of(app) as client:
        assert (await client.get("/1")).status_code == 401
        assert not store.calls["renew"], "the client waits for one request to the failing store"
        async with asyncio.timeout(10):
            while await locked(micro):
                await asyncio.sleep(0.01)


async def test_route_that_calls_another_app_was_entered() -> None:
    inner, (app, micro) = FastAPI(), new_app()

    @inner.get("/", dependencies=[Depends(failing_session)])
    async def show() -> None: ...

    @app.get("/{x}")
    async def work(x: int, held: Kept) -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(inner), base_url="http://inner") as client:
            await client.get("/")

    async with client_of(app) as client:
        assert (await client.get("/1")).status_code == 500
        assert await locked(micro)


def test_websocket() -> None:
    app, micro = new_app()

    async def refuse() -> None:
        raise WebSocketException(1008)

    @app.websocket("/refused/{x}")
    async def refused(websocket: WebSocket, x: int, held: Kept, other: Annotated[None, Depends(refuse)]) -> None: ...

    @app.websocket("/invalid/{x}")
    async def invalid(websocket: WebSocket, x: int, held: Kept, n: int) -> None: ...

    @app.websocket("/fails/{x}")
    async def fails(websocket: WebSocket, x: int, held: Kept) -> None:
        raise WebSocketException(1008)

    def visit(url: str) -> bool:
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(url):
            pass
        assert client.portal is not None
        return client.portal.call(locked, micro)

    with TestClient(app) as client:
        assert [visit(url) for url in ("/refused/1", "/invalid/1", "/fails/1")] == [False, False, True]


async def test_busy_task_lock_behind_another_one() -> None:
    app, micro = new_app()

    @app.get("/{x}")
    async def work(
        x: int, held: Kept, other: Annotated[LockHandle, TaskLockDep("other", min_hold_duration=30)]
    ) -> None: ...

    async with client_of(app) as client:
        other = TaskLock("other", backend=micro.coordination.lock_backend, min_hold_duration=30)
        async with other:
            assert (await client.get("/1")).status_code == 409
            assert not await locked(micro)
