"""Requests that hold a lock when they are cut off."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LockHandle
from grelmicro_fastapi import LockDep
from grelmicro_starlette import install, locked
from tests.helpers.worlds import eventually
from tests.integrations.asgi import CancelWhenLeft, is_free
from tests.integrations.callers import Busy, Caller, open_app


class Shop:
    """An application whose handler holds a lock until it is let go."""

    def __init__(self, *middleware: str) -> None:
        self.micro = Grelmicro(uses=[Coordination(MemoryStore())])
        self.ended: list[str] = []
        self.let_go = asyncio.Event()
        app = Starlette(routes=[Route("/{cart_id}", locked("cart:{cart_id}")(self._pay), methods=["POST"])])
        install(app, self.micro)
        if "base" in middleware:
            app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
        if "cancel" in middleware:
            app.add_middleware(CancelWhenLeft)
        self.app: Any = app  # a test may put something around it

    async def _pay(self, request: Request) -> Response:
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("paid")
        return PlainTextResponse("paid")

    async def holder(self, *, waited: bool = True) -> tuple[Caller, "asyncio.Task[None]"]:
        """A request that holds the lock, for which it waited so long that its client was watched, or not at all."""
        caller = Caller("/1")
        caller.body()
        if waited:
            async with Busy(self.micro, "cart:1"):
                request = caller.call(self.app)
                await eventually(lambda: caller.received >= 1, "it is watched")
        else:
            request = caller.call(self.app)
        await eventually(lambda: "state" in caller.scope and "lock" in caller.scope["state"], "it holds")
        return caller, request


@pytest.mark.parametrize("waited", [True, False])
@pytest.mark.parametrize("middleware", ["none", "base"])
async def test_handler_of_a_client_that_leaves_goes_on_to_its_end(middleware: str, waited: bool) -> None:
    shop = Shop(middleware)
    async with open_app(shop.app):
        caller, request = await shop.holder(waited=waited)
        caller.leave()
        assert not await is_free(shop.micro, "cart:1", within=0.2)
        assert not request.done()
        shop.let_go.set()
        await asyncio.wait_for(request, 10)
        assert shop.ended == ["paid"]
        assert await is_free(shop.micro, "cart:1")


@pytest.mark.parametrize("middleware", ["none", "base"])
@pytest.mark.parametrize("how", ["task", "scope", "middleware"])
async def test_cancelled_handler_frees_its_lock_at_once(middleware: str, how: str) -> None:
    shop = Shop(middleware, "cancel" if how == "middleware" else "")
    scope = anyio.CancelScope()
    app = shop.app

    async def scoped(*connection: Any) -> None:
        with scope:
            await app(*connection)

    if how == "scope":
        shop.app = scoped
    async with open_app(app):
        caller, request = await shop.holder()
        if how == "task":
            request.cancel()
        elif how == "scope":
            scope.cancel()
        else:
            caller.leave()
        await asyncio.wait({request}, timeout=10)
        began = time.monotonic()
        assert await is_free(shop.micro, "cart:1")
        assert time.monotonic() - began < 1  # 100 ms, were the machine quiet
        assert shop.ended == ["cancelled"]


async def test_stream_that_its_client_leaves_frees_the_lock_of_its_request() -> None:
    micro, app = Grelmicro(uses=[Coordination(MemoryStore())]), FastAPI()
    install(app, micro)

    @app.post("/{cart_id}")
    async def show(
        cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=None, scope="request")]
    ) -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            while held.valid:
                yield b"."
                await asyncio.sleep(0.01)

        return StreamingResponse(body())

    async with open_app(app):
        caller = Caller("/1")
        caller.body()
        async with Busy(micro, "cart:1"):
            request = caller.call(app)
            await eventually(lambda: caller.received >= 1, "it is watched")
        await eventually(lambda: len(caller.sent) > 3, "it streams")
        assert not await is_free(micro, "cart:1", within=0)
        caller.leave()
        await asyncio.wait_for(request, 10)
        assert await is_free(micro, "cart:1")
