"""One request over one connection of redis-py."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from grelmicro.backends.redis.library import AbstractConnection, RedisError, ResponseError

CLOSING_LIMIT = 1.0
"""Seconds for which closing a connection may take."""

_has_data = getattr(AbstractConnection, "can_read", None) or AbstractConnection.can_read_destructive
"""Whether something came that nobody asked for, or the server closed it. Its name depends on the version."""


class Request:
    """Commands, and as many replies as were read.

    Args:
        commands: as they are sent.
        replies: how many they are.
    """

    __slots__ = ("_commands", "_replies", "answers", "connection", "is_sent")

    def __init__(self, commands: bytes, replies: int) -> None:
        self._commands = commands
        self._replies = replies
        self.connection: AbstractConnection | None = None
        """The one it is sent over."""
        self.is_sent = False
        """Whether all of it was sent."""
        self.answers: list[Any] = []

    async def send(self) -> None:
        """Send the commands."""
        assert self.connection is not None
        await self.connection.send_packed_command(self._commands, check_health=False)
        self.is_sent = True

    async def read(self) -> None:
        """Read the replies that are still to come. When it is cancelled, it can be called again to go on."""
        assert self.connection is not None
        while len(self.answers) < self._replies:
            try:
                answer = await self.connection.read_response(disable_decoding=True, disconnect_on_error=False)
            except ResponseError as error:
                answer = error
            self.answers.append(answer)


async def connect(connection: AbstractConnection) -> None:
    """Make the connection."""
    make: Callable[[], Awaitable[None]] = connection.connect
    await make()


async def works(connection: AbstractConnection) -> bool:
    """Whether the server neither closed it nor sent something that nobody asked for.

    That is looked at before each request: one that is sent into a dead connection may have been done, for all one
    knows.
    """
    try:
        await connection.send_packed_command([], check_health=False)  # it fails when the connection was reset
        return not await _has_data(connection)
    except (RedisError, OSError):
        return False


async def disconnect(connection: AbstractConnection) -> None:
    """Close it, however that ends."""
    with suppress(RedisError, OSError, TimeoutError):
        async with asyncio.timeout(CLOSING_LIMIT):
            await connection.disconnect()
