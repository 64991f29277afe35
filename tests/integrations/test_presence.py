"""Clients that go away while their request waits for a lock."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination
from grelmicro.testing.aids import held_elsewhere
from grelmicro_fastapi import LocksDep
from grelmicro_starlette import install, locked
from grelmicro_starlette.presence import KEY
from tests.helpers.stores import Fault, TroubledStore, refused, reply_never, silence
from tests.helpers.worlds import eventually
from tests.integrations.asgi import CancelWhenLeft, is_free
from tests.integrations.callers import Busy, Caller, open_app
from tests.integrations.shops import JSON, MIDDLEWARE, Shop

both = pytest.mark.parametrize("framework", ["starlette", "fastapi"])


@both
@pytest.mark.parametrize("middleware", MIDDLEWARE)
async def test_client_that_leaves_while_it_waits_leaves_the_queue(
    framework: str, middleware: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(framework, middleware)
    async with open_app(shop.app):
        async with Busy(shop.micro, "cart:1") as busy:
            caller, next_one = Caller("/1", headers=JSON), Caller("/1", headers=JSON)
            for each in (caller, next_one):
                each.body(b"{}")
            request = caller.call(shop.app)
            await eventually(lambda: busy.waiting == 1, "it waits")
            next_request = next_one.call(shop.app)
            await eventually(lambda: busy.waiting == 2, "the next one waits behind")
            caller.leave()
            await asyncio.wait_for(request, 10)
            assert busy.waiting == 1
            assert (caller.status, caller.answer) == (499, b"")
            assert shop.served == []
        await asyncio.wait_for(next_request, 10)
        assert (next_one.status, next_one.answer) == (200, b"{}")
        assert len(shop.served) == 1
        assert await is_free(shop.micro, "cart:1")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@both
@pytest.mark.parametrize("middleware", MIDDLEWARE)
async def test_client_that_left_before_it_was_watched_is_noticed(framework: str, middleware: str) -> None:
    shop = Shop(framework, middleware)
    async with open_app(shop.app), Busy(shop.micro, "cart:1") as busy:
        caller = Caller("/1", headers=JSON)
        caller.body(b"{}")
        caller.leave()
        await asyncio.wait_for(caller.call(shop.app), 10)
        assert caller.status == 499
        assert busy.waiting == 0


async def test_mounted_application_is_watched_by_the_outer_one() -> None:
    shop = Shop("starlette")
    root = Starlette(routes=[Mount("/sub", app=shop.app)])
    install(root, shop.micro)
    async with open_app(root), Busy(shop.micro, "cart:1") as busy:
        caller = Caller("/sub/1")
        request = caller.call(root)
        await eventually(lambda: busy.waiting == 1, "it waits")
        caller.leave()
        await asyncio.wait_for(request, 10)
        assert caller.status == 499


async def test_client_that_leaves_while_it_waits_for_one_of_several_locks_holds_none() -> None:
    app, micro = FastAPI(), Grelmicro(uses=[Coordination(MemoryStore())])
    install(app, micro)

    @app.post("/{giver}/{taker}")
    async def move(giver: int, taker: int, held: Annotated[Any, LocksDep("cart:{giver}", "cart:{taker}")]) -> None:
        raise AssertionError("must not run")

    async with open_app(app):
        async with Busy(micro, "cart:2") as busy:
            caller = Caller("/1/2")
            caller.body()
            request = caller.call(app)
            await eventually(lambda: busy.waiting == 1, "it waits")
            assert not await is_free(micro, "cart:1", within=0)
            caller.leave()
            await asyncio.wait_for(request, 10)
            assert caller.status == 499
            assert await is_free(micro, "cart:1")
        assert await is_free(micro, "cart:2")


@pytest.mark.parametrize("place", ["inside", "outside"])
async def test_middleware_that_cancels_when_the_client_leaves(place: str) -> None:
    """Inside, it reads at the same time as the client is watched; outside, it feeds the application from a copy."""
    micro = Grelmicro(uses=[Coordination(MemoryStore())])

    @locked("cart:{cart_id}", timeout=None)
    async def buy(request: Request) -> Response:
        raise AssertionError("must not run")

    app = Starlette(
        routes=[Route("/{cart_id}", buy, methods=["POST"])],
        middleware=[Middleware(CancelWhenLeft)] if place == "inside" else [],
    )
    install(app, micro)
    if place == "outside":
        app.add_middleware(CancelWhenLeft)
    async with open_app(app):
        async with Busy(micro, "cart:1") as busy:
            caller = Caller("/1")
            request = caller.call(app)
            caller.body()
            await eventually(lambda: busy.waiting == 1, "it waits")
            await asyncio.sleep(0.1)  # it is watched by now
            caller.leave()
            await asyncio.wait_for(request, 10)
            assert busy.waiting == 0
        assert await is_free(micro, "cart:1")


async def test_stream_that_was_waited_for_ends_when_its_client_leaves() -> None:
    """The response listens to the server while what was read ahead is still on its way."""
    micro = Grelmicro(uses=[Coordination(MemoryStore())])
    ended = asyncio.Event()

    @locked("cart:{cart_id}", timeout=None)
    async def show(request: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"."
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        return StreamingResponse(body())

    app = Starlette(routes=[Route("/{cart_id}", show, methods=["POST"])])
    install(app, micro)
    async with open_app(app):
        caller = Caller("/1")
        async with Busy(micro, "cart:1"):
            request = caller.call(app)
            await eventually(lambda: caller.received == 1, "it is watched")
        await eventually(lambda: len(caller.sent) > 3, "it streams")
        caller.leave()
        await asyncio.wait_for(request, 10)
        assert ended.is_set()


@both
@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_leaving_at_the_moment_of_the_grant_leaks_nothing(framework: str, store: str, tmp_path: Path) -> None:
    shop = Shop(framework, store="memory://" if store == "memory" else f"sqlite:///{tmp_path}/locks.db")
    chance = random.Random(7)

    async def a_moment() -> None:
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(chance.choice([0, 0, 0.001]))

    async def wait_and_leave(*, first: bool) -> Caller:
        caller = Caller("/1", headers=JSON)
        caller.body(b"{}")
        async with Busy(shop.micro, "cart:1"):
            request = caller.call(shop.app)
            await eventually(lambda: caller.received == 2, "it is watched")
            if first:
                caller.leave()
                await a_moment()
        if not first:
            await a_moment()
            caller.leave()
        await asyncio.wait_for(request, 10)
        return caller

    async with open_app(shop.app):
        outcomes = set()
        for turn in range(60):
            caller = await wait_and_leave(first=turn % 2 == 0)
            outcomes.add(caller.status)
            assert await is_free(shop.micro, "cart:1")
        assert outcomes == {200, 499}
        assert len(shop.served) <= 60


@both
@pytest.mark.parametrize("fault", [silence, reply_never])
@pytest.mark.parametrize("releases", ["well", "at the second try"])
async def test_leaving_while_the_store_does_not_answer_leaks_nothing(
    framework: str, fault: Fault, releases: str
) -> None:
    store = TroubledStore(MemoryStore())
    shop = Shop(framework, store=store)
    async with open_app(shop.app):
        store.suffer("acquire", fault)
        if releases != "well":
            store.suffer("release", refused)
        caller = Caller("/1", headers=JSON)
        caller.body(b"{}")
        caller.leave()
        await asyncio.wait_for(caller.call(shop.app), 10)
        assert caller.status == 499
        assert shop.served == []
        assert await is_free(shop.micro, "cart:1", within=20)


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_cancelled_while_it_is_watched(how: str) -> None:
    shop = Shop("starlette")
    async with open_app(shop.app):
        async with Busy(shop.micro, "cart:1") as busy:
            caller, scope = Caller("/1"), anyio.CancelScope()

            async def serve() -> None:
                with scope:
                    await shop.app(caller.scope, caller.receive, caller.send)

            request = asyncio.create_task(serve())
            await eventually(lambda: caller.received == 1, "it is watched")
            if how == "task":
                request.cancel()
            else:
                scope.cancel()
            await asyncio.wait({request}, timeout=10)
            assert request.cancelled() is (how == "task")
            assert busy.waiting == 0
        assert await is_free(shop.micro, "cart:1")


async def test_whoever_cancelled_it_sees_it_cancelled_though_the_client_left() -> None:
    shop = Shop("starlette")
    async with open_app(shop.app), Busy(shop.micro, "cart:1") as busy:
        caller = Caller("/1")
        request = caller.call(shop.app)
        await eventually(lambda: caller.received == 1, "it is watched")

        def cancel() -> None:
            request.cancel()

        caller.scope[KEY].watch(cancel)
        caller.leave()
        await asyncio.wait({request}, timeout=10)
        assert request.cancelled()
        assert busy.waiting == 0


async def test_lock_that_is_free_is_not_watched_for() -> None:
    shop = Shop("starlette")
    async with open_app(shop.app):
        caller = Caller("/1")
        caller.body(b"tea")
        await asyncio.wait_for(caller.call(shop.app), 10)
        assert caller.received == 1


def test_test_client_answers_after_the_wait() -> None:
    """Its `receive` waits until the response is complete."""
    shop = Shop("starlette")
    with TestClient(shop.app) as client, held_elsewhere(shop.micro, "cart:1", lease_duration=0.3):
        assert client.post("/1", content=b"tea").content == b"tea"
        assert client.post("/1", content=b"tea").content == b"tea"
