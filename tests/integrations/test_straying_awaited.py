"""Whatever a request awaits in a thread when it is cancelled goes on there, and its lock is held until it has ended.

The clock of the store is moved past the lease, so that one that is not renewed any more is seen to end.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Depends
from fastapi.concurrency import run_in_threadpool
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import LockHandle, MultiLockHandle
from grelmicro.testing import MovableClock
from grelmicro_fastapi import LockDep, LocksDep
from tests.helpers.worlds import eventually
from tests.integrations.asgi import Visitor, client_of, freed, is_free, new_app, take_away

pytestmark = pytest.mark.slow

LEASE = 30.0

LONGER = 45.0
"""Seconds after which a lease that nobody renews has ended."""

FunctionLock = Annotated[LockHandle, LockDep("cart", lease_duration=LEASE)]
RequestLock = Annotated[LockHandle, LockDep("cart", lease_duration=LEASE, scope="request")]

Endpoint = Callable[..., Any]


class Work:
    """Plain work that stands still until it is let go on, and the ways in which a request comes to await it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        self.go_on.wait(30)

    def do(self) -> None:
        self()

    def transaction(self) -> Iterator[None]:
        yield
        self()

    def chunks(self) -> Iterator[str]:
        self()
        yield ""

    def added_task(self) -> Endpoint:
        async def endpoint(held: RequestLock, tasks: BackgroundTasks) -> None:
            tasks.add_task(self.do)

        return endpoint

    def returned_task(self) -> Endpoint:
        async def endpoint(held: RequestLock) -> Response:
            return PlainTextResponse(background=BackgroundTask(self.do))

        return endpoint

    def object_as_task(self) -> Endpoint:
        async def endpoint(held: RequestLock) -> Response:
            return PlainTextResponse(background=BackgroundTask(self))

        return endpoint

    def stream(self) -> Endpoint:
        async def endpoint(held: RequestLock) -> Response:
            return StreamingResponse(self.chunks())

        return endpoint

    def in_pool(self) -> Endpoint:
        async def endpoint(held: FunctionLock) -> None:
            await run_in_threadpool(self.do)

        return endpoint

    def to_thread(self) -> Endpoint:
        async def endpoint(held: FunctionLock) -> None:
            await asyncio.to_thread(self.do)

        return endpoint

    def dependency(self) -> Endpoint:
        async def endpoint(held: FunctionLock, done: Annotated[None, Depends(self.do)]) -> None: ...

        return endpoint

    def commit(self) -> Endpoint:
        async def endpoint(
            held: FunctionLock, database: Annotated[None, Depends(self.transaction, scope="function")]
        ) -> None: ...

        return endpoint

    def commit_of_plain(self) -> Endpoint:
        def endpoint(
            held: FunctionLock, database: Annotated[None, Depends(self.transaction, scope="function")]
        ) -> None: ...

        return endpoint


WAYS = [
    Work.added_task,
    Work.returned_task,
    Work.object_as_task,
    Work.stream,
    Work.in_pool,
    Work.to_thread,
    Work.dependency,
    Work.commit,
    Work.commit_of_plain,
]


async def goes_on_under_its_lock(work: Work, endpoint: Endpoint, *, cancelled: bool = True) -> None:
    clock = MovableClock()
    app, micro = new_app(MemoryStore(clock=clock))
    app.add_api_route("/", endpoint, response_model=None)
    async with client_of(app):
        try:
            request = Visitor(app, "/").start()
            await eventually(work.reached.is_set, "the thread runs")
            if cancelled:
                request.cancel()
            await asyncio.wait({request}, timeout=0.3)  # some last as long as the thread
            await clock.advance(LONGER)
            assert not await is_free(micro, "cart", within=0)
        finally:
            work.go_on.set()
        await asyncio.gather(request, return_exceptions=True)
        await freed(micro, "cart")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_it_goes_on_under_its_lock(way: Callable[[Work], Endpoint]) -> None:
    work = Work()
    await goes_on_under_its_lock(work, way(work))


async def too_slow() -> AsyncIterator[None]:
    async with asyncio.timeout(0.3):
        yield


async def failing() -> AsyncIterator[None]:
    async def fail() -> None:
        await asyncio.sleep(0.3)
        raise ZeroDivisionError

    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        yield


@pytest.mark.parametrize("guard", [too_slow, failing], ids=["timeout", "group"])
async def test_another_error_in_place_of_the_cancellation_changes_nothing(guard: Endpoint) -> None:
    work = Work()

    def endpoint(held: FunctionLock, guarded: Annotated[None, Depends(guard, scope="function")]) -> None:
        work()

    await goes_on_under_its_lock(work, endpoint, cancelled=False)


async def test_a_timeout_in_the_handler_leaves_the_lock_to_the_thread() -> None:
    work = Work()

    async def endpoint(held: FunctionLock) -> None:
        async with asyncio.timeout(0.3):
            await asyncio.to_thread(work.do)

    await goes_on_under_its_lock(work, endpoint, cancelled=False)


async def test_what_is_not_written_in_python_goes_on_under_its_lock() -> None:
    """It is not seen in any stack, so its context has to go."""
    work = Work()

    async def endpoint(held: RequestLock) -> Response:
        return PlainTextResponse(background=BackgroundTask(all, work.chunks()))

    await goes_on_under_its_lock(work, endpoint)


async def test_a_cancelled_handler_that_awaits_no_thread_frees_its_lock_at_once() -> None:
    app, micro = new_app()
    reached = asyncio.Event()

    @app.get("/")
    async def wait(held: FunctionLock) -> None:
        await asyncio.to_thread(int)
        reached.set()
        await asyncio.sleep(3600)

    async with client_of(app):
        request = Visitor(app, "/").start()
        await asyncio.wait_for(reached.wait(), 10)
        request.cancel()
        await asyncio.wait({request}, timeout=10)
        assert await is_free(micro, "cart", within=0)


async def test_a_loss_is_told_while_the_thread_goes_on_and_the_other_locks_last_as_long() -> None:
    clock = MovableClock()
    app, micro = new_app(MemoryStore(clock=clock))
    work = Work()

    @app.get("/")
    async def endpoint(held: Annotated[MultiLockHandle, LocksDep("cart", "stock", lease_duration=LEASE)]) -> None:
        await take_away(micro, held.handles[0])
        await run_in_threadpool(work)

    async with client_of(app) as client:
        try:
            request = asyncio.ensure_future(client.get("/"))
            await eventually(work.reached.is_set, "the thread runs")
            await clock.advance(LEASE / 2)  # a renewal finds out
            answer = await request
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:grelmicro:lost")
            await clock.advance(LONGER)
            assert not await is_free(micro, "stock", within=0)
        finally:
            work.go_on.set()
        await freed(micro, "stock")
