"""A server's messages without the server, for tests of who believes them."""

import asyncio
from collections import Counter
from collections.abc import Callable

from grelmicro.backends.hints import Feed


class Switchboard(Feed):
    """A server's messages, and the ways in which they fail to come."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.down = False
        self.deaf = False  # messages are lost, as behind a pooler that gives each statement another connection
        self.hanging: set[str] = set()
        self.slow: set[str] = set()
        self._heard: Callable[[str], None] | None = None
        self._connected: Callable[[], None] | None = None
        self._broken: asyncio.Future[None] | None = None

    async def listen(self, heard: Callable[[str], None], connected: Callable[[], None]) -> None:
        await self._request("listen")
        self._heard, self._broken = heard, asyncio.get_running_loop().create_future()
        self._connected = connected
        connected()
        try:
            await self._broken
        finally:
            self._heard = None
            self.topics.clear()

    async def follow(self, topic: str) -> None:
        await self._request("follow")
        self.topics.add(topic)

    async def unfollow(self, topic: str) -> None:
        await self._request("unfollow")
        self.topics.discard(topic)

    async def send(self, topic: str) -> None:
        await self._request("send")
        self.deliver(topic)

    async def ping(self) -> None:
        await self._request("ping")

    def deliver(self, topic: str) -> None:
        if self._heard is not None and topic in self.topics and not self.deaf:
            self._heard(topic)

    def cut(self) -> None:
        """Break the connection."""
        assert self._broken is not None
        if not self._broken.done():
            self._broken.set_exception(ConnectionResetError("connection reset"))

    def connect_again(self) -> None:
        """Go on after a gap, on the same connection."""
        assert self._connected is not None
        self._connected()

    async def _request(self, kind: str) -> None:
        self.calls[kind] += 1
        if self.down:
            raise ConnectionRefusedError("connection refused")
        if kind in self.hanging:
            await asyncio.Event().wait()
        for _ in range(5 if kind in self.slow else 1):
            await asyncio.sleep(0)
