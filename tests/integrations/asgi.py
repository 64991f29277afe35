"""Requests to an application in this process: many at a time, and clients that go away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx2
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LockHandle
from grelmicro.leases import LeaseStore
from grelmicro.testing.aids import held_elsewhere
from grelmicro_fastapi import install


def new_app(store: LeaseStore | None = None) -> tuple[FastAPI, Grelmicro]:
    """An application on a store of its own."""
    app, micro = FastAPI(), Grelmicro(uses=[Coordination(store or MemoryStore())])
    install(app, micro)
    return app, micro


@asynccontextmanager
async def client_of(app: FastAPI, *, raises: bool = False) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the running application; with `raises`, what the application raises reaches the caller."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=raises)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


async def is_free(micro: Grelmicro, name: str, *, within: float = 2.0) -> bool:
    """Whether another worker gets a lock within some seconds."""
    try:
        async with held_elsewhere(micro, name, timeout=within):
            return True
    except TimeoutError:
        return False


async def freed(micro: Grelmicro, name: str) -> None:
    """Wait until another worker gets a lock, also when the clock of the store stands still."""
    async with asyncio.timeout(10):
        while not await is_free(micro, name, within=0):
            await asyncio.sleep(0.01)


async def take_away(micro: Grelmicro, handle: LockHandle) -> None:
    """Let another worker have the lease, as happens to a holder that was frozen for longer than it lasts."""
    backend = micro.coordination.lock_backend
    await backend.release(handle.lease)
    await backend.acquire(handle.lease.name, "another", 60)


class Visitor:
    """A client that sends one request and can go away before the answer."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path
        self._left = asyncio.Event()
        self.sent: list[Message] = []

    def start(self) -> "asyncio.Task[None]":
        """Send the request."""
        path = self._path
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)

        return asyncio.create_task(self._app(scope, receive, send))  # type: ignore[arg-type]

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()


class CancelWhenLeft:
    """A middleware that cancels the application when its client goes away."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            async def body() -> Message:
                return {"type": "http.request", "body": b"", "more_body": False}

            group.start_soon(watch)
            await self._app(scope, body, send)
            group.cancel_scope.cancel()
