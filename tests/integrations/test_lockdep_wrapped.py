"""Dependencies of users that wrap one of ours: the lock is freed when the request ends, however that is written."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Literal

import pytest
from fastapi import Depends, HTTPException
from fastapi.requests import HTTPConnection
from starlette.middleware.base import BaseHTTPMiddleware

from grelmicro.coordination import LockHandle
from grelmicro_fastapi import LockDep
from tests.integrations.asgi import CancelWhenLeft, Visitor, client_of, is_free, new_app

Scope = Literal["function", "request"]
Wrapped = Callable[[HTTPConnection], AsyncGenerator[LockHandle, None]]


def wrappings(dependency: Wrapped) -> Iterator[tuple[str, Wrapped]]:
    """The ways in which users wrap a dependency that yields; the first two are not good ones."""

    async def bare(connection: HTTPConnection) -> AsyncGenerator[LockHandle, None]:
        async for held in dependency(connection):
            yield held

    async def named(connection: HTTPConnection) -> AsyncGenerator[LockHandle, None]:
        holding = dependency(connection)
        async for held in holding:
            yield held

    async def closing(connection: HTTPConnection) -> AsyncGenerator[LockHandle, None]:
        async with aclosing(dependency(connection)) as holding:
            async for held in holding:
                yield held

    async def managed(connection: HTTPConnection) -> AsyncGenerator[LockHandle, None]:
        async with asynccontextmanager(dependency)(connection) as held:
            yield held

    yield from (("bare", bare), ("named", named), ("closing", closing), ("managed", managed))


@pytest.mark.parametrize("kind", ["bare", "named", "closing", "managed"])
@pytest.mark.parametrize("ends", ["well", "refused", "failed", "cancelled", "left", "left behind a middleware"])
@pytest.mark.parametrize("scope", ["function", "request"])
async def test_wrapped_dependency_frees_the_lock(
    kind: str, ends: str, scope: Scope, caplog: pytest.LogCaptureFixture
) -> None:
    app, micro = new_app()
    if ends == "left behind a middleware":
        app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    app.add_middleware(CancelWhenLeft)
    wrapped = dict(wrappings(LockDep("cart:{cart_id}").dependency))[kind]
    reached = asyncio.Event()

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, Depends(wrapped, scope=scope)]) -> bool:
        reached.set()
        if ends == "refused":
            raise HTTPException(418)
        if ends == "failed":
            raise ZeroDivisionError
        if ends != "well":
            await asyncio.sleep(60)
        return held.valid

    caplog.set_level(logging.WARNING)
    async with client_of(app) as client:
        if ends in ("well", "refused", "failed"):
            answer = await client.get("/1")
            assert answer.status_code == {"well": 200, "refused": 418, "failed": 500}[ends]
        else:
            visitor = Visitor(app, "/1")
            request = visitor.start()
            await asyncio.wait_for(reached.wait(), 10)
            if ends == "cancelled":
                request.cancel()
            else:
                visitor.leave()
            await asyncio.wait({request}, timeout=5)
            assert request.done()
        assert await is_free(micro, "cart:1", within=5)
    assert "didn't stop" not in caplog.text
    told = [record for record in caplog.records if "left unfinished" in record.message]
    assert len(told) == (1 if kind in ("bare", "named") and ends != "well" else 0)
