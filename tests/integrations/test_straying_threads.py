"""A plain handler whose request is cancelled goes on in its thread, and what it holds is renewed until that has ended.

The clock of the store is moved past the lease, so that one that is not renewed any more is seen to end.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import anyio.to_thread
import pytest
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import LockHandle, MultiLockHandle
from grelmicro.testing import MovableClock
from grelmicro_fastapi import LockDep, LocksDep, TaskLockDep
from grelmicro_starlette import locked
from tests.helpers.worlds import eventually
from tests.integrations.asgi import Visitor, client_of, freed, is_free, new_app

pytestmark = pytest.mark.slow

LEASE = 30.0
LONGER = 45.0
"""Seconds after which a lease that nobody renews has ended."""

KINDS = ["function", "request", "locked", "locks", "tasklock"]


class Shop:
    """An application whose plain handler stands still until it is let go on, under a lock of each kind."""

    def __init__(self) -> None:
        self.clock = MovableClock()
        self.app, self.micro = new_app(MemoryStore(clock=self.clock))
        self.reached: set[int] = set()
        self.go_on = {cart: threading.Event() for cart in range(3)}
        for kind in KINDS:
            self._add(kind)

    def _work(self, cart_id: int) -> None:
        self.reached.add(cart_id)
        self.go_on[cart_id].wait(30)

    def _add(self, kind: str) -> None:
        work, path = self._work, f"/{kind}/{{cart_id:int}}"
        options: Any = {"lease_duration": LEASE, "timeout": None}

        if kind == "locked":

            def plain(request: Request) -> Response:
                work(request.path_params["cart_id"])
                return PlainTextResponse()

            self.app.add_route(path, locked("cart:{cart_id}", **options)(plain))
        elif kind == "locks":

            @self.app.get(path)
            def many(cart_id: int, held: Annotated[MultiLockHandle, LocksDep("cart:{cart_id}", **options)]) -> None:
                work(cart_id)

        elif kind == "tasklock":
            lock = TaskLockDep("cart:{cart_id}", lease_duration=LEASE, min_hold_duration=0.1)

            @self.app.get(path)
            def task(cart_id: int, held: Annotated[LockHandle, lock]) -> None:
                work(cart_id)

        else:

            @self.app.get(path)
            def one(
                cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", scope=kind, **options)]
            ) -> None:
                work(cart_id)

    async def is_free(self, kind: str, name: str) -> bool:
        """Whether another worker gets a lock, or a task lock."""
        return await (is_task_free(self.micro, name) if kind == "tasklock" else is_free(self.micro, name, within=0))

    async def cancelled(self, kind: str, cart: int = 1) -> None:
        """A request that was cancelled when its handler had begun."""
        request = Visitor(self.app, f"/{kind}/{cart}").start()
        await eventually(lambda: cart in self.reached, "the thread runs")
        request.cancel()
        await asyncio.wait({request}, timeout=10)
        assert request.cancelled()


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop()
    async with client_of(shop.app):
        try:
            yield shop
        finally:
            for event in shop.go_on.values():
                event.set()


async def is_task_free(micro: Grelmicro, name: str) -> bool:
    """Whether another worker gets a task lock."""
    backend = micro.coordination.lock_backend
    lease = await backend.acquire(f"tasklock:{name}", "another", 60.0)
    return lease.granted_to("another") and await backend.release(lease)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_lease_lasts_until_the_thread_has_ended(shop: Shop, kind: str) -> None:
    await shop.cancelled(kind)
    await shop.clock.advance(LONGER)
    assert not await shop.is_free(kind, "cart:1")
    shop.go_on[1].set()
    async with asyncio.timeout(10):
        while not await shop.is_free(kind, "cart:1"):
            await asyncio.sleep(0.01)


async def test_a_request_does_not_wait_for_the_thread_of_another(shop: Shop) -> None:
    await shop.cancelled("function", 1)
    await shop.cancelled("function", 2)
    shop.go_on[2].set()
    await freed(shop.micro, "cart:2")
    await shop.clock.advance(LONGER)
    assert not await is_free(shop.micro, "cart:1", within=0)
    shop.go_on[1].set()
    await freed(shop.micro, "cart:1")


@contextmanager
def no_threads() -> Iterator[None]:
    """Whoever needs a thread waits."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    before, limiter.total_tokens = limiter.total_tokens, 1
    try:
        limiter.acquire_on_behalf_of_nowait(limiter)
        try:
            yield
        finally:
            limiter.release_on_behalf_of(limiter)
    finally:
        limiter.total_tokens = before


@pytest.mark.parametrize("kind", ["function", "locked"])
async def test_a_handler_that_never_got_a_thread_frees_its_lock(shop: Shop, kind: str) -> None:
    with no_threads():
        request = Visitor(shop.app, f"/{kind}/1").start()
        await eventually(
            lambda: anyio.to_thread.current_default_thread_limiter().statistics().tasks_waiting == 1, "it waits"
        )
        await shop.clock.advance(LONGER)
        assert not await is_free(shop.micro, "cart:1", within=0)
        request.cancel()
        await asyncio.wait({request}, timeout=10)
        await freed(shop.micro, "cart:1")
    assert not shop.reached


async def test_what_a_request_left_behind_does_not_keep_its_lock() -> None:
    clock = MovableClock()
    app, micro = new_app(MemoryStore(clock=clock))
    reached, go_on = threading.Event(), threading.Event()
    left: list[asyncio.Task[None]] = []

    async def leave(held: Annotated[LockHandle, LockDep("cart", lease_duration=LEASE)]) -> None:
        left.append(asyncio.create_task(asyncio.sleep(3600)))

    @app.get("/")
    def buy(
        held: Annotated[LockHandle, LockDep("cart", lease_duration=LEASE)],
        left: Annotated[None, Depends(leave, scope="function")],
    ) -> None:
        reached.set()
        go_on.wait(30)

    async with client_of(app):
        request = Visitor(app, "/").start()
        await eventually(reached.is_set, "the thread runs")
        request.cancel()
        await asyncio.wait({request}, timeout=10)
        await clock.advance(LONGER)
        assert not await is_free(micro, "cart", within=0)
        go_on.set()
        await freed(micro, "cart")
        left.pop().cancel()


async def test_closing_does_not_wait_for_a_thread() -> None:
    shop = Shop()
    async with asyncio.timeout(10.0):
        async with client_of(shop.app):
            await shop.cancelled("function")
    shop.go_on[1].set()
