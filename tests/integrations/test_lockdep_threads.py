"""Dependencies of plain handlers, which run in threads: there are few of them, and they cannot be cancelled."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import anyio.to_thread
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from grelmicro.coordination import Lock, LockHandle, LockReentrantError
from grelmicro_fastapi import LockDep
from tests.helpers.worlds import eventually
from tests.integrations.asgi import Visitor, client_of, is_free, new_app, take_away


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


class Crowd:
    """Requests that take all threads, and a few more that wait for one."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._go_on = threading.Event()

        @app.get("/crowd/{number}")
        def wait(number: int) -> None:
            self._go_on.wait(30)

    @asynccontextmanager
    async def there(self) -> AsyncIterator[None]:
        """All threads but those that are in use already are taken, and whoever gives one back gets none again."""
        limiter = anyio.to_thread.current_default_thread_limiter()
        size = int(limiter.total_tokens) + 5
        requests = [Visitor(self._app, f"/crowd/{number}").start() for number in range(size)]
        try:
            await eventually(lambda: limiter.statistics().tasks_waiting >= 3, "all threads are taken")
            yield
            assert limiter.available_tokens == 0
        finally:
            self._go_on.set()
            await asyncio.wait_for(asyncio.gather(*requests), 30)


async def test_release_needs_no_thread() -> None:
    app, micro = new_app()
    crowd = Crowd(app)
    reached, go_on = threading.Event(), threading.Event()

    @app.get("/{cart_id}")
    def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> None:
        reached.set()
        go_on.wait(20)

    async with client_of(app):
        request = Visitor(app, "/1").start()
        await eventually(reached.is_set, "the thread runs")
        async with crowd.there():
            assert not await is_free(micro, "cart:1", within=0)
            go_on.set()
            await asyncio.wait_for(request, 10)
            assert await is_free(micro, "cart:1", within=0)


async def test_waiting_for_a_lock_needs_no_thread() -> None:
    app, micro = new_app()
    crowd = Crowd(app)

    @app.get("/{cart_id}")
    async def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> int:
        return held.fencing_token

    async with client_of(app) as client, crowd.there():
        answers = await asyncio.gather(*(client.get("/1") for _ in range(10)))
        assert sorted(answer.json() for answer in answers) == list(range(1, 11))


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


class OddError(BaseException):
    """An error of a class that nobody expects."""


@pytest.mark.parametrize(
    "error",
    [
        StopIteration(),
        StopAsyncIteration(),
        GeneratorExit(),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        OddError(),
        BaseExceptionGroup("several", [OddError()]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_however_a_plain_handler_ends_its_locks_are_given_back(error: BaseException) -> None:
    """What then becomes of the request, or of the server, is the framework's business."""
    app, micro = new_app()
    ended: list[BaseException] = []

    @app.get("/{cart_id}")
    def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", lease_duration=3600)]) -> None:
        with Lock("inner", backend=micro.coordination.lock_backend, lease_duration=3600).from_thread:
            raise type(error)(*error.args)

    async def contained(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except BaseException as left:  # or asyncio raises some of them out of the event loop
            ended.append(left)

    async with client_of(app):
        await Visitor(contained, "/1").start()
        assert ended
        assert await is_free(micro, "cart:1", within=2)
        assert await is_free(micro, "inner", within=2)


async def test_a_plain_handler_does_not_wait_for_the_lock_of_its_request() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    def buy(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=5)]) -> str:
        with pytest.raises(LockReentrantError, match="by this task, thread or request already"):
            Lock(f"cart:{cart_id}").from_thread.acquire()
        with Lock("order").from_thread:
            return "refused"

    async with client_of(app) as client:
        for _ in range(2):
            assert (await client.get("/1", timeout=30)).json() == "refused"
