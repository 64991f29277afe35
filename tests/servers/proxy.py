"""A proxy between a client and a server that loses, delays, holds and cuts what passes."""

import asyncio
import socket
import ssl
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Literal, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tests.servers.faults import CutAfter, DropReply, Fault, HoldRequest, Match, fits
from tests.servers.home import free_port
from tests.servers.link import Link
from tests.servers.pushes import without_pushes

F = TypeVar("F", bound=Fault)

PORTS = {"redis": 6379, "postgresql": 5432, "postgres": 5432}


class Proxy:
    """Stands before the TCP server that `url` leads to.

    It knows no protocol: a *request* is what a client wrote in one piece, which is how redis-py, asyncpg and aiohttp
    write theirs. It may be several commands, and is one statement of asyncpg only from the second time on; before, the
    statement is prepared in a request of its own. So match on a parameter, not on the statement.

    A server that speaks TLS is reached without it by way of the proxy, which can then read what passes.

    Args:
        url: of the server; for `https:` that of the proxy begins with `http:`.
        trust: what a server that speaks TLS is recognised by.
    """

    def __init__(self, url: str, trust: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, f"no host in the URL of scheme {parts.scheme}"
        self.host = parts.hostname
        self.port_of_server = parts.port or PORTS[parts.scheme]
        self.trust = trust
        self.port = free_port()
        login, at, _ = parts.netloc.rpartition("@")
        scheme = "http" if trust and parts.scheme == "https" else parts.scheme
        self.url = urlunsplit(parts._replace(scheme=scheme, netloc=f"{login}{at}127.0.0.1:{self.port}"))
        """The same URL by way of the proxy."""

        self.connections = 0
        """Connections so far."""
        self.requests = 0
        self.replies = 0
        """Pieces so far, also those that did not get through."""
        self.bytes_sent = 0
        self.bytes_received = 0
        """Their bytes, as the client sees it."""
        self.swallowed = 0
        """Pushes that were taken out."""
        self.request_delay = 0.0
        self.reply_delay = 0.0
        self._faults: list[Fault] = []
        self._swallows: list[Match] = []
        self._flow = asyncio.Event()
        self._flow.set()
        self._links: dict[asyncio.Task[None], Link] = {}
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.refuse()
        self.reset()
        for task in list(self._links):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @property
    def open(self) -> int:
        """Connections that are open now, at either end."""
        return len(self._links)

    # What happens to one request

    def drop_reply(self, match: Match = None, then: Literal["reset", "silent"] = "reset") -> Fault:
        """Swallow the reply to the next request that fits; then reset the connection, or say nothing on it ever."""
        return self._armed(DropReply(match, then))

    def hold_request(self, match: Match = None) -> HoldRequest:
        """Keep the next request that fits, and what follows on its connection, until it is released."""
        return self._armed(HoldRequest(match))

    def cut_after(self, number: int, match: Match = None) -> Fault:
        """Let only so many bytes arrive from the next request on that fits, then end its connection."""
        return self._armed(CutAfter(match, number))

    def _armed(self, fault: F) -> F:
        self._faults.append(fault)
        return fault

    # What happens to all

    def delay(self, *, requests: float = 0.0, replies: float = 0.0) -> None:
        """Take so many seconds longer in each direction, from now on."""
        self.request_delay, self.reply_delay = requests, replies

    def reset(self) -> None:
        """Reset all connections."""
        for link in self._links.values():
            link.reset()

    def lead_to(self, url: str) -> None:
        """Lead new connections to another server, as a name or an address does after a fail-over."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.host, self.port_of_server = parts.hostname, parts.port or PORTS[parts.scheme]

    def forget(self) -> None:
        """Let nothing pass any more on the connections that are open, as a load balancer that dropped them silently."""
        for link in self._links.values():
            link.forgotten = True

    def black_hole(self) -> None:
        """Let nothing pass, not even the end of a connection; who connects gets no answer.

        What is sent meanwhile arrives when it heals, as TCP sends again what was lost.
        """
        self._flow.clear()

    async def refuse(self) -> None:
        """Refuse new connections. Those that are open stay."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait({self._listener})
            self._listener = None

    def swallow_pushes(self, match: Match = None) -> None:
        """Take out the messages of Redis channels and the notifications of PostgreSQL that fit."""
        self._swallows.append(match)

    async def heal(self) -> None:
        """End all trouble but what holds a request already."""
        self._faults.clear()
        self._swallows.clear()
        self.delay()
        self._flow.set()
        if self._listener is None:
            self._listen()

    # What connections use

    def take(self, request: bytes) -> Fault | None:
        """The fault that a request suffers, which is then used up."""
        for fault in self._faults:
            if fits(fault.match, request):
                self._faults.remove(fault)
                return fault
        return None

    async def passing(self) -> None:
        """Wait for the end of a black hole."""
        await self._flow.wait()

    async def pass_on(self, at: float, delay: float) -> None:
        """Wait until what arrived at `at` may go on."""
        await asyncio.sleep(at + delay - monotonic() if delay else 0.0)
        await self.passing()

    def filtered(self, chunk: bytes) -> bytes:
        """What the server said, without what is to be swallowed."""
        for match in self._swallows:
            chunk, number = without_pushes(chunk, match)
            self.swallowed += number
        return chunk

    # Connections

    def _listen(self) -> None:
        listening = socket.create_server(("127.0.0.1", self.port))
        listening.setblocking(False)
        self._listener = asyncio.create_task(self._accept(listening))

    async def _accept(self, listening: socket.socket) -> None:
        with listening:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                self.connections += 1
                link = Link(self, *await asyncio.open_connection(sock=connection))
                task = asyncio.create_task(link.run())
                self._links[task] = link
                task.add_done_callback(self._links.pop)
