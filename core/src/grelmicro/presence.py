"""Whether the client of an ASGI request is still there: looks ahead in what it sends, and loses nothing of it."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_KEPT = 64 * 1024
"""Bytes that are read ahead at most, but for the last message, which is as long as the server makes it."""

MESSAGE_COST = 256
"""Bytes that a message counts for beside what it carries: a `receive` that never waits must not be read forever."""

LEAVING = ("http.disconnect", "websocket.disconnect")

ENDING = ("websocket.close", "websocket.http.response.start")
"""What an app sends to close a websocket, or to deny it."""


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


def _cost(task: asyncio.Task[Message]) -> int:
    if task.exception() is not None:
        return MOST_KEPT
    message = task.result()
    return MESSAGE_COST + sum(len(message.get(part) or ()) for part in ("body", "bytes", "text"))
