"""Whether the client of a request is still there: looks ahead in what it sends, and loses nothing of it."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from grelmicro.errors import GrelmicroError

KEY = "grelmicro.presence"
"""Where the scope of a request or websocket has its `Presence`."""

MOST_KEPT = 64 * 1024
"""Bytes that are read ahead at most, but for the last message, which is as long as the server makes it."""

MESSAGE_COST = 256
"""Bytes that a message counts for beside what it carries: a `receive` that never waits must not be read forever."""

AT_ONCE = 0.02
"""Seconds within which a lock that is free is got as a rule: before that a client is not watched."""

LEAVING = ("http.disconnect", "websocket.disconnect")

ENDING = ("websocket.close", "websocket.http.response.start")
"""What an app sends to close a websocket, or to deny it."""


class ClientLeftError(GrelmicroError, ClientDisconnect):
    """The client went away while its request waited for a lock: it was not taken, and the handler did not run."""


class Presence:
    """The `receive` of one request or websocket, which can be watched for the client's leaving.

    Servers tell it by a message after all that the client sent, so what comes before is read and kept for the app.
    Nobody reads ahead while the app reads, and a reader is not cancelled while the app runs: some servers hear only
    one, or take a cancelled one for the end of the connection.
    """

    __slots__ = (
        "_ahead",
        "_kept",
        "_left",
        "_readers",
        "_receive",
        "_room",
        "_told",
        "_watchers",
        "is_accepted",
        "is_ended",
    )

    def __init__(self, receive: Receive) -> None:
        self.is_accepted = False
        """Whether the app accepted a websocket."""
        self.is_ended = False
        """Whether it closed or denied one."""
        self._receive = receive
        self._readers = 0  # of the app, inside `receive` now
        self._ahead: asyncio.Task[Message] | None = None
        self._kept: list[asyncio.Task[Message]] = []
        self._room = MOST_KEPT
        self._left = False
        self._told = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def has_left(self) -> bool:
        """Whether the server said that the client left, which the app may not have heard yet."""
        return self._left

    async def receive(self) -> Message:
        """The next message, or error, as the server gives it."""
        while not self._kept and self._ahead is not None:
            await asyncio.wait({self._ahead})
        if self._kept:
            task = self._kept.pop(0)
            self._room += _cost(task)
            message = task.result()
        else:
            self._readers += 1
            try:
                message = await self._receive()
            finally:
                self._readers -= 1
                self._look_ahead()
            self._look_at(message)
        if message["type"] in LEAVING:
            self._told = True
        return message

    def noting(self, send: Send) -> Send:
        """The `send` of a websocket, which notes how far the app is: its objects know no more than was done by them."""

        async def noted(message: Message) -> None:
            if message["type"] == "websocket.accept":
                self.is_accepted = True
            elif message["type"] in ENDING:
                self.is_ended = True
            await send(message)

        return noted

    def watch(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the client leaves, until `unwatch`.

        It is not seen behind more than `MOST_KEPT`. Nor does it matter any more when the app was told: what it does
        then, such as to tidy up behind a websocket, it does for nobody.
        """
        if self._told:
            return
        if self._left:
            tell()
            return
        self._watchers.append(tell)
        self._look_ahead()

    def unwatch(self, tell: Callable[[], None]) -> None:
        """Do not call `tell` any more; harmless when it is not watching."""
        if tell in self._watchers:
            self._watchers.remove(tell)

    def close(self) -> None:
        """The app is done: nobody reads any more."""
        if self._ahead is not None:
            self._ahead.cancel()

    def _look_ahead(self) -> None:
        if self._watchers and self._ahead is None and not self._readers and self._room > 0:
            self._ahead = asyncio.create_task(self._read())
            self._ahead.add_done_callback(self._keep)

    async def _read(self) -> Message:
        return await self._receive()

    def _keep(self, task: asyncio.Task[Message]) -> None:
        self._ahead = None
        if task.cancelled():
            return
        self._kept.append(task)
        self._room -= _cost(task)
        if task.exception() is None:
            self._look_at(task.result())
        self._look_ahead()

    def _look_at(self, message: Message) -> None:
        if message["type"] in LEAVING:
            self._left = True
            watchers, self._watchers = self._watchers, []
            for tell in watchers:
                tell()


class WhilePresent:
    """A block that waits for the lock `title`, and ends with `ClientLeftError` when the client leaves.

    Its task is cancelled and that taken back, as `asyncio.timeout` does.
    """

    __slots__ = ("_cancelling", "_client", "_left", "_loop", "_start", "_task", "_title")

    def __init__(self, client: Presence, title: str) -> None:
        self._client = client
        self._title = title
        self._left = False

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("there is nothing to cancel outside a task")
        self._task = task
        self._cancelling = task.cancelling()
        # What never waits never comes here, and is spared the timer.
        self._start: asyncio.Handle = self._loop.call_soon(self._watch_later)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._start.cancel()
        self._client.unwatch(self._leave)
        if self._left and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise ClientLeftError(f"the client left while its request waited for lock '{self._title}'") from None

    def _watch_later(self) -> None:
        self._start = self._loop.call_later(AT_ONCE, self._client.watch, self._leave)

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()


def _cost(task: asyncio.Task[Message]) -> int:
    if task.exception() is not None:
        return MOST_KEPT
    message = task.result()
    return MESSAGE_COST + sum(len(message.get(part) or ()) for part in ("body", "bytes", "text"))


def presence(connection: HTTPConnection) -> Presence | None:
    """Of the client of a request or websocket; None where it is not served by `watched`."""
    found = connection.scope.get(KEY)
    return found if isinstance(found, Presence) else None


async def watched(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request or websocket with `app`, and let its client be watched; once is enough, however apps nest."""
    if KEY in scope:
        await app(scope, receive, send)
        return
    client = scope[KEY] = Presence(receive)
    try:
        await app(scope, client.receive, client.noting(send) if scope["type"] == "websocket" else send)
    finally:
        client.close()
