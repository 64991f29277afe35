"""What the proxy can do to one request."""

import asyncio
import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.servers.link import Link

Match = bytes | re.Pattern[bytes] | None
"""Which requests: those that contain these bytes, or fit the pattern; None is all."""

PATIENCE = 10.0
"""Real seconds after which what should happen soon counts as never."""


def fits(match: Match, chunk: bytes) -> bool:
    """Whether it does."""
    if match is None:
        return True
    return match in chunk if isinstance(match, bytes) else match.search(chunk) is not None


class Fault:
    """Something that happens to the next request that fits."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self._struck = asyncio.Event()
        self._answered = asyncio.Event()

    async def apply(self, link: "Link", request: bytes) -> None:
        """Treat the request, in the place of sending it."""
        raise NotImplementedError

    async def strike(self, link: "Link", request: bytes) -> None:
        """Called by the connection on which the request came."""
        self._struck.set()
        await self.apply(link, request)

    def answer(self) -> None:
        """Called when the server says something after the request reached it."""
        self._answered.set()

    async def struck(self, patience: float = PATIENCE) -> None:
        """Wait until it caught a request."""
        await asyncio.wait_for(self._struck.wait(), patience)

    async def answered(self, patience: float = PATIENCE) -> None:
        """Wait until the server has answered the request, whether or not the client gets to see that."""
        await asyncio.wait_for(self._answered.wait(), patience)


class DropReply(Fault):
    """The request reaches the server, and the client never hears of it."""

    def __init__(self, match: Match, then: Literal["reset", "silent"]) -> None:
        super().__init__(match)
        self._then = then

    async def apply(self, link: "Link", request: bytes) -> None:
        link.mute(self, reset=self._then == "reset")
        await link.send(request)


class HoldRequest(Fault):
    """The request is on its way for as long as the test likes."""

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let it arrive, also when its client has gone."""
        self._released.set()

    async def apply(self, link: "Link", request: bytes) -> None:
        await self._released.wait()
        link.expect(self)
        await link.send(request)


class CutAfter(Fault):
    """The connection ends in the middle of what the client sends."""

    def __init__(self, match: Match, number: int) -> None:
        super().__init__(match)
        self._left = number

    async def apply(self, link: "Link", request: bytes) -> None:
        link.sticky = self  # a request may come in several pieces
        await link.send(request[: max(self._left, 0)])
        self._left -= len(request)
        if self._left <= 0:
            await link.cut()
