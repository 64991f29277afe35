"""The messages of a PostgreSQL server: one channel for a namespace, and digests of names on it."""

import asyncio
from collections.abc import Callable

from grelmicro.backends.hints import ANSWER_LIMIT, Feed
from grelmicro.backends.postgres.connections import Requests
from grelmicro.backends.postgres.library import Connection
from grelmicro.backends.postgres.server import Server
from grelmicro.backends.postgres.statements import Statements
from grelmicro.errors import BackendUnavailableError


class PostgresFeed(Feed):
    """A connection that does nothing but listen: to a server itself, since a pooler would not keep it.

    Args:
        server: where to listen.
        requests: what sends messages, as a release does.
        statements: names the channel.
    """

    def __init__(self, server: Server, requests: Requests, statements: Statements) -> None:
        self._server = server
        self._requests = requests
        self._statements = statements

    async def listen(self, heard: Callable[[str], None], connected: Callable[[], None]) -> None:
        """See `Feed.listen`."""
        connecting = asyncio.get_running_loop().create_task(self._server.connect(ANSWER_LIMIT))
        try:
            connection = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(_close)
            raise
        ended = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: ended.set())
            await connection.add_listener(
                self._statements.channel, lambda _connection, _process, _channel, topic: heard(str(topic))
            )
            connected()
            await ended.wait()
            raise BackendUnavailableError("PostgreSQL: the connection on which it listens has ended")
        finally:
            connection.terminate()

    async def follow(self, topic: str) -> None:
        """All topics are on the channel."""

    async def unfollow(self, topic: str) -> None:
        """All topics are on the channel."""

    async def send(self, topic: str) -> None:
        """See `Feed.send`."""
        await self._requests.fetch(self._statements.notify, (topic,), ANSWER_LIMIT)

    async def ping(self) -> None:
        """See `Feed.ping`."""
        await self._requests.fetch(self._statements.time, (), ANSWER_LIMIT)


def _close(connecting: "asyncio.Task[Connection]") -> None:
    """Close a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().terminate()
