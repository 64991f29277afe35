"""What a client sends while its request waits for a lock: it is read to see the client leave, and nothing is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination
from grelmicro.presence import Presence
from grelmicro_starlette import exception_handlers, install, lifespan, locked
from tests.helpers.worlds import eventually
from tests.integrations.callers import Busy, Caller, open_app
from tests.integrations.shops import BASE, MIDDLEWARE, Shop


async def read_whole(request: Request) -> bytes:
    return await request.body()


async def read_as_stream(request: Request) -> bytes:
    return b"".join([chunk async for chunk in request.stream()])


async def read_json(request: Request) -> bytes:
    assert await request.json() == BODY.decode().strip('"')
    return await request.body()


async def read_receive(request: Request) -> bytes:
    parts = []
    while True:
        message = await request.receive()
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


BODY = b'"' + bytes(ord("a") + place % 26 for place in range(3000)) + b'"'


@pytest.mark.parametrize("read", [read_whole, read_as_stream, read_json, read_receive])
@pytest.mark.parametrize("middleware", MIDDLEWARE)
@pytest.mark.parametrize("early", [0, 1, 5, 10], ids=lambda count: f"{count}-early")
async def test_body_that_arrives_while_waiting_is_read_as_it_was_sent(
    read: Callable[[Request], Awaitable[bytes]], middleware: str, early: int
) -> None:
    micro = Grelmicro(uses=[Coordination(MemoryStore())])

    @locked("cart:{cart_id}", timeout=None)
    async def buy(request: Request) -> Response:
        return PlainTextResponse(await read(request))

    app = Starlette(
        routes=[Route("/{cart_id}", buy, methods=["POST"])], middleware=[BASE] if middleware == "inside" else []
    )
    install(app, micro)
    if middleware == "outside":
        app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    chunks = [BODY[start : start + 301] for start in range(0, len(BODY), 301)]
    assert len(chunks) == 10
    async with open_app(app):
        caller = Caller("/1")
        async with Busy(micro, "cart:1") as busy:
            request = caller.call(app)
            await eventually(lambda: busy.waiting == 1, "it waits")
            for place, chunk in enumerate(chunks[:early], 1):
                caller.body(chunk, more=place < 10)
            await eventually(lambda: caller.unread == 0, "it was read ahead")
        for place, chunk in enumerate(chunks[early:], early + 1):
            caller.body(chunk, more=place < 10)
            await asyncio.sleep(0)
        await asyncio.wait_for(request, 10)
        assert caller.answer == BODY


async def test_form_that_arrives_while_waiting_is_read_as_it_was_sent() -> None:
    micro = Grelmicro(uses=[Coordination(MemoryStore())])

    @locked("cart:{cart_id}", timeout=None)
    async def buy(request: Request) -> Response:
        form = await request.form()
        return PlainTextResponse(f"{form['item']} {form['count']}")

    app = Starlette(routes=[Route("/{cart_id}", buy, methods=["POST"])])
    install(app, micro)
    async with open_app(app):
        caller = Caller("/1", headers=[(b"content-type", b"application/x-www-form-urlencoded")])
        async with Busy(micro, "cart:1"):
            request = caller.call(app)
            caller.body(b"item=tea&co", more=True)
            await eventually(lambda: caller.unread == 0, "it was read ahead")
        caller.body(b"unt=3")
        await asyncio.wait_for(request, 10)
        assert caller.answer == b"tea 3"


async def test_long_body_is_not_read_ahead_and_arrives_whole() -> None:
    shop = Shop("starlette")
    async with open_app(shop.app):
        caller, chunk = Caller("/1"), bytes(4096)
        async with Busy(shop.micro, "cart:1"):
            request = caller.call(shop.app)
            for place in range(100):
                caller.body(chunk, more=place < 99)
            await eventually(lambda: caller.unread < 100, "it was read ahead")
            await asyncio.sleep(0.1)
            assert 80 <= caller.unread <= 90
        await asyncio.wait_for(request, 10)
        assert caller.answer == chunk * 100


def patient(timeout: float) -> tuple[Starlette, Grelmicro]:
    """An application that waits for so long, and one that its client cannot be watched for is no different."""
    micro = Grelmicro(uses=[Coordination(MemoryStore())])

    @locked("cart:{cart_id}", timeout=timeout)
    async def buy(request: Request) -> Response:
        return PlainTextResponse(await request.body())

    routes = [Route("/{cart_id}", buy, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan(micro), exception_handlers=exception_handlers()), micro


async def test_client_behind_a_long_body_waits_for_its_timeout() -> None:
    app, micro = patient(0.5)
    install(app, micro)
    async with open_app(app), Busy(micro, "cart:1"):
        caller = Caller("/1")
        for _ in range(100):
            caller.body(bytes(4096), more=True)
        caller.leave()
        await asyncio.wait_for(caller.call(app), 10)
        assert caller.status == 409


async def test_receive_that_never_waits_is_not_asked_for_ever() -> None:
    app, micro = patient(0.5)
    install(app, micro)
    asked = 0

    async def receive() -> Any:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"", "more_body": False}

    async with open_app(app), Busy(micro, "cart:1"):
        caller = Caller("/1")
        await asyncio.wait_for(app(caller.scope, receive, caller.send), 10)
        assert caller.status == 409
        assert 0 < asked < 1000


async def test_application_without_the_middleware_waits_for_its_timeout_and_loses_nothing() -> None:
    app, micro = patient(0.5)
    async with open_app(app):
        async with Busy(micro, "cart:1"):
            caller = Caller("/1")
            caller.body(b"early")
            caller.leave()
            await asyncio.wait_for(caller.call(app), 10)
            assert caller.status == 409
            assert caller.unread == 2
        caller = Caller("/1")
        caller.body(b"tea")
        await asyncio.wait_for(caller.call(app), 10)
        assert caller.answer == b"tea"


class Listening:
    """A middleware that listens to the server at the same time, and does nothing about it."""

    def __init__(self, app: ASGIApp, *, once: bool) -> None:
        self._app = app
        self._once = once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = asyncio.create_task(self._listen(receive)) if scope["type"] == "http" else None
        await self._app(scope, receive, send)
        if listener is not None:
            listener.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect" and not self._once:
            pass


@pytest.mark.parametrize("once", [True, False], ids=["once", "on"])
@pytest.mark.parametrize("early", [True, False], ids=["before", "meanwhile"])
async def test_somebody_else_listens_to_the_server_at_the_same_time(early: bool, once: bool) -> None:
    micro = Grelmicro(uses=[Coordination(MemoryStore())])

    @locked("cart:{cart_id}", timeout=None)
    async def buy(request: Request) -> Response:
        raise AssertionError("must not run")

    listening = Middleware(Listening, once=once)
    app = Starlette(routes=[Route("/{cart_id}", buy, methods=["POST"])], middleware=[listening])
    install(app, micro)
    async with open_app(app), Busy(micro, "cart:1") as busy:
        caller = Caller("/1")
        if early:
            caller.body()
        request = caller.call(app)
        await eventually(lambda: busy.waiting == 1, "it waits")
        await asyncio.sleep(0.1)  # it is watched by now
        if not early:
            caller.body()
        caller.leave()
        await asyncio.wait_for(request, 10)
        assert caller.status == 499


async def test_client_that_left_is_known_to_have_left() -> None:
    """It is not asked for again: not every server says it twice."""
    caller, told = Caller("/1"), list[str]()
    client = Presence(caller.receive)
    client.watch(lambda: told.append("first"))
    caller.leave()
    await eventually(lambda: told == ["first"], "it is seen")
    client.watch(lambda: told.append("second"))
    assert told == ["first", "second"]
    assert caller.received == 1
    assert (await client.receive())["type"] == "http.disconnect"


async def test_what_was_read_makes_room_for_more() -> None:
    caller, told = Caller("/1", kind="websocket"), list[str]()
    client = Presence(caller.receive)

    def tell() -> None:
        told.append("left")

    for number in range(10):
        client.watch(tell)
        caller.text(f"{number}" * 40_000)
        await eventually(lambda: caller.unread == 0, "it was read ahead")
        client.unwatch(tell)
        assert (await client.receive())["text"][0] == f"{number}"
    client.watch(tell)
    caller.leave()
    await eventually(lambda: told == ["left"], "it is seen")


async def test_error_of_the_server_reaches_who_reads() -> None:
    shop = Shop("starlette")
    async with open_app(shop.app):
        caller = Caller("/1")
        async with Busy(shop.micro, "cart:1") as busy:
            request = caller.call(shop.app)
            caller.fail(OSError("cut off"))
            await eventually(lambda: caller.received == 1 and caller.unread == 0, "it was read ahead")
            await asyncio.sleep(0.05)
            assert busy.waiting == 1
        with pytest.raises(OSError, match="cut off"):
            await asyncio.wait_for(request, 10)
