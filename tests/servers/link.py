"""One connection through the proxy: what passes in each direction, in order, and what is done to it."""

import asyncio
import socket
import struct
from asyncio import IncompleteReadError, Queue, StreamReader, StreamWriter
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from tests.servers.faults import Fault

if TYPE_CHECKING:
    from tests.servers.proxy import Proxy

SIZE = 1 << 16
GONE = (OSError, IncompleteReadError)

Arrivals = Queue[tuple[float, bytes]]
"""What was read, and when; no bytes stand for the end."""


class Link:
    """A client, the server, and what is on its way between them."""

    def __init__(self, proxy: "Proxy", reader: StreamReader, writer: StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._server: StreamWriter | None = None
        self._expecting: list[Fault] = []
        self._muted = False
        self._reset_by_reply = False
        self.forgotten = False
        """Whether everything that is sent gets lost."""
        self.sticky: Fault | None = None
        """What takes all further requests of this connection."""

    async def run(self) -> None:
        """Carry what both sides say until both have ended, or the connection is reset."""
        try:
            await self._carry()
        finally:
            for writer in filter(None, (self._client[1], self._server)):
                writer.close()

    async def _carry(self) -> None:
        sent: Arrivals = Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(self._client[0], sent))
            await self._proxy.passing()
            with suppress(OSError):
                reader, self._server = await self._connect()
                received: Arrivals = Queue()
                tasks.create_task(self._receive(reader, received))
                tasks.create_task(self._requests(sent))
                tasks.create_task(self._replies(received))
                return
            self.reset()

    async def _connect(self) -> tuple[StreamReader, StreamWriter]:
        return await asyncio.open_connection(self._proxy.host, self._proxy.port_of_server, ssl=self._proxy.trust)

    async def _receive(self, reader: StreamReader, arrivals: Arrivals) -> None:
        """Read on also while nothing is passed on, so that the end is noticed at once."""
        with suppress(*GONE):
            while chunk := await reader.read(SIZE):
                arrivals.put_nowait((monotonic(), chunk))
        arrivals.put_nowait((monotonic(), b""))

    async def _requests(self, arrivals: Arrivals) -> None:
        while True:
            at, chunk = await arrivals.get()
            if not chunk:
                break
            self._proxy.requests += 1
            self._proxy.bytes_sent += len(chunk)
            await self._proxy.pass_on(at, self._proxy.request_delay)
            if self.forgotten:
                continue
            fault = self.sticky or self._proxy.take(chunk)
            await (fault.strike(self, chunk) if fault else self.send(chunk))
        await self._proxy.passing()
        with suppress(*GONE):
            assert self._server is not None
            # With TLS there is no end in one direction alone.
            (self._server.write_eof if self._server.can_write_eof() else self._server.close)()

    async def _replies(self, arrivals: Arrivals) -> None:
        while True:
            at, chunk = await arrivals.get()
            if not chunk:
                break
            self._proxy.replies += 1
            self._proxy.bytes_received += len(chunk)
            await self._proxy.pass_on(at, self._proxy.reply_delay)
            self._deliver(self._proxy.filtered(chunk))
            self._tell()
        await self._proxy.passing()
        if not self._muted:
            self._client[1].close()

    def _deliver(self, chunk: bytes) -> None:
        """Give the client what the server said."""
        if self.forgotten:
            return
        if not self._muted:
            if chunk:
                self._client[1].write(chunk)
        elif self._reset_by_reply:
            self.reset()

    def _tell(self) -> None:
        """Tell the faults that wait for it that the server has spoken."""
        for fault in self._expecting:
            fault.answer()
        self._expecting.clear()

    # What faults use

    async def send(self, request: bytes) -> None:
        """Let bytes reach the server."""
        assert self._server is not None
        with suppress(*GONE):
            self._server.write(request)
            await self._server.drain()

    def expect(self, fault: Fault) -> None:
        """Tell `fault` when the server speaks next."""
        self._expecting.append(fault)

    def mute(self, fault: Fault, *, reset: bool) -> None:
        """From now on the client hears nothing; `reset` ends the connection when the server speaks next."""
        self.expect(fault)
        self._muted = True
        self._reset_by_reply = reset

    async def cut(self) -> None:
        """End the connection; what was sent before reaches the server."""
        self._muted = True
        if self._server is not None:
            self._server.close()
        abort(self._client[1])

    def reset(self) -> None:
        """End the connection at once on both sides."""
        abort(self._client[1])
        if self._server is not None:
            abort(self._server)


def abort(writer: StreamWriter) -> None:
    """Close with a reset, which is what a peer sees when a machine forgot the connection."""
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        if connection is not None:  # with TLS there is none any more once it was closed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
