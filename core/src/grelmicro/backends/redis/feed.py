"""Hints by Redis: one subscribing connection, with a channel for each name that somebody waits for."""

import asyncio
from collections import deque
from collections.abc import Callable

from grelmicro.backends.hints import Feed
from grelmicro.backends.redis.connections import Connections
from grelmicro.backends.redis.errors import reason
from grelmicro.backends.redis.library import AbstractConnection, ResponseError
from grelmicro.backends.redis.scripts import pack
from grelmicro.errors import BackendUnavailableError


class RedisFeed(Feed):
    """A channel has the name of the key whose release is told on it.

    Args:
        connections: to the server.
        prefix: what the keys begin with.
    """

    def __init__(self, connections: Connections, prefix: bytes) -> None:
        self._connections = connections
        self._prefix = prefix
        self._connection: AbstractConnection | None = None
        self._unconfirmed: deque[asyncio.Future[None]] = deque()  # in the order in which they were asked for

    async def listen(self, heard: Callable[[str], None], connected: Callable[[], None]) -> None:
        """See `Feed.listen`."""
        async with self._connections.dedicated() as connection:
            self._connection = connection
            connected()
            try:
                while True:
                    await self._next_message(connection, heard)
            finally:
                self._connection = None
                while self._unconfirmed:
                    self._confirm(BackendUnavailableError("the connection for messages ended"))

    async def follow(self, topic: str) -> None:
        """See `Feed.follow`."""
        await self._change(b"SUBSCRIBE", topic)

    async def unfollow(self, topic: str) -> None:
        """See `Feed.unfollow`."""
        await self._change(b"UNSUBSCRIBE", topic)

    async def send(self, topic: str) -> None:
        """See `Feed.send`."""
        [answer] = await self._connections.ask(pack(b"PUBLISH", self._channel(topic), b""), 1, "sending a message")
        if isinstance(answer, ResponseError):
            raise BackendUnavailableError(f"sending a message: {reason(answer)}")

    async def ping(self) -> None:
        """See `Feed.ping`; a server that refuses even this is there."""
        await self._connections.ask(pack(b"PING"), 1, "asking for a sign of life", changes=False)

    async def _change(self, command: bytes, topic: str) -> None:
        if self._connection is None:
            raise BackendUnavailableError("there is no connection for messages")
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unconfirmed.append(confirmed)
        try:
            await self._connection.send_packed_command(pack(command, self._channel(topic)), check_health=False)
            await confirmed
        except BaseException:
            confirmed.cancel()  # it keeps its place, for the answer may still come
            raise

    async def _next_message(self, connection: AbstractConnection, heard: Callable[[str], None]) -> None:
        try:
            kind, channel, _ = await connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except ResponseError as error:  # the answer to a command, such as that of a user without the right to a channel
            if not self._unconfirmed:
                raise
            self._confirm(BackendUnavailableError(f"subscribing to a channel: {reason(error)}"))
            return
        if kind == b"message":
            heard(channel.removeprefix(self._prefix).decode(errors="replace"))
        else:
            self._confirm()

    def _confirm(self, error: Exception | None = None) -> None:
        """Tell the one who has waited longest for an answer."""
        future = self._unconfirmed.popleft()
        if future.done():  # given up
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def _channel(self, topic: str) -> bytes:
        return self._prefix + topic.encode()
