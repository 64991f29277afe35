"""Clients whose every message a test sends by itself, as a server would pass it on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Scope

from grelmicro import Grelmicro
from grelmicro.coordination import LockHandle
from grelmicro.testing.aids import held_elsewhere


class Caller:
    """One request or websocket. Each message is given out once, and a disconnect is not repeated."""

    def __init__(self, path: str, *, kind: Literal["http", "websocket"] = "http", **scope: Any) -> None:
        self._kind = kind
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self._asked = False
        self.received = 0
        """How often the application asked for a message."""
        self.sent: list[Message] = []
        self.scope: Scope = {
            "type": kind,
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "client": ("test", 1),
            "server": ("test", 80),
            **scope,
        }

    def call(self, app: ASGIApp) -> "asyncio.Task[None]":
        """Let the application serve it."""
        return asyncio.create_task(app(self.scope, self.receive, self.send))  # type: ignore[arg-type]

    async def receive(self) -> Message:
        """What the application receives."""
        assert not self._asked, "there are servers that hear one at a time only"
        self.received += 1
        self._asked = True
        try:
            message = await self._messages.get()
        finally:
            self._asked = False
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        """What the application answers."""
        self.sent.append(message)

    def body(self, data: bytes = b"", *, more: bool = False) -> None:
        """Send a part of the request's body, by default the last one."""
        self._messages.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def fail(self, error: Exception) -> None:
        """Let the server's `receive` raise this."""
        self._messages.put_nowait(error)

    def connect(self) -> None:
        """Begin a websocket."""
        self._messages.put_nowait({"type": "websocket.connect"})

    def text(self, text: str) -> None:
        """Send a message of a websocket."""
        self._messages.put_nowait({"type": "websocket.receive", "text": text})

    def leave(self) -> None:
        """Close the connection."""
        message: Message = {"type": f"{self._kind}.disconnect"}
        self._messages.put_nowait({**message, "code": 1006} if self._kind == "websocket" else message)

    @property
    def unread(self) -> int:
        """How many messages the application has not received yet."""
        return self._messages.qsize()

    @property
    def status(self) -> int | None:
        """The status of the answer; None when there is none."""
        return self.sent[0].get("status") if self.sent else None

    @property
    def answer(self) -> bytes:
        """The body of the answer."""
        return b"".join(message.get("body", b"") for message in self.sent)


@asynccontextmanager
async def open_app(app: Starlette) -> AsyncIterator[None]:
    """Run an application, and see that it leaves no task behind."""
    before = asyncio.all_tasks()
    async with app.router.lifespan_context(app):
        yield
    for _ in range(3):  # a task that was cancelled ends in the next turn of the loop
        await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


class Busy:
    """A lock that another worker holds for a block, and those who wait for it here."""

    def __init__(self, micro: Grelmicro, name: str) -> None:
        self._elsewhere = held_elsewhere(micro, name)
        self._lines = micro.coordination.lock_backend.queues.lines
        self._key = f"lock:{name}"

    @property
    def waiting(self) -> int:
        """How many wait."""
        line = self._lines.get(self._key)
        return 0 if line is None else len(line.places)

    async def __aenter__(self) -> "Busy":
        self.handle: LockHandle = await self._elsewhere.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._elsewhere.__aexit__(*error)
