"""A gateway before a Kubernetes API server that counts requests, and does to watches what networks do."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import ClientError, ClientResponse, ClientTimeout, web
from kubernetes_asyncio.client import Configuration
from multidict import CIMultiDictProxy

from grelmicro.backends.kubernetes.channel import Channel, drop
from tests.servers.home import free_port

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

PASSED_ON = ("Authorization", "Content-Type", "Accept", "User-Agent")
PASSED_BACK = ("Content-Type", "Date")


class Gateway:
    """Passes requests on to an API server, over HTTP without TLS.

    Args:
        target: the address of the API server.
        certificate: what it is known by.
    """

    def __init__(self, target: str, certificate: Path) -> None:
        self._port = free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        """Where it stands."""
        self.calls: Counter[str] = Counter()
        """The requests so far, by verb."""
        self.watches = 0
        """How many go on now."""
        self.busy = 0
        """The other requests that go on now."""
        self.bytes = 0
        """What the server sent so far."""
        self._target = target
        self._certificate = certificate
        self._swallowing = False
        self._broken = False
        self._end = asyncio.Event()  # of the watches that go on now
        self._beginning = asyncio.Event()  # of watches is let through
        self._beginning.set()

    async def __aenter__(self) -> Self:
        configuration = Configuration(host=self._target, ssl_ca_cert=str(self._certificate))
        self._channel = Channel(configuration)  # which leaves no connection behind, however a request ends
        server = web.Server(self._handle, handler_cancellation=True)
        self._runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.end_watches()
        self.heal()
        await self._runner.cleanup()
        await self._channel.close()

    # What watches suffer

    def swallow(self) -> None:
        """Let no event through from now on, as where a connection is dead and nobody has told."""
        self._swallowing = True

    def end_watches(self, *, hold: bool = False) -> None:
        """End each watch in order, as an API server does; with `hold` the next ones wait until `heal`."""
        if hold:
            self._beginning.clear()
        self._finish(broken=False)

    def break_watches(self) -> None:
        """Break the connection of each watch."""
        self._finish(broken=True)

    def heal(self) -> None:
        """End all trouble."""
        self._swallowing = False
        self._beginning.set()

    def _finish(self, *, broken: bool) -> None:
        self._broken = broken
        self._end.set()
        self._end = asyncio.Event()

    # What passes

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        watching = request.query.get("watch") == "1"
        self.calls["watch" if watching else _verb(request)] += 1
        try:
            return await (self._watch(request) if watching else self._answer(request))
        except ClientError:
            return _reset(request)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.busy += 1
        try:
            async with self._passed_on(request) as answer:
                body = await answer.read()
        finally:
            self.busy -= 1
        self.bytes += len(body)
        return web.Response(status=answer.status, body=body, headers=_of_answer(answer.headers))

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        await self._beginning.wait()
        end = asyncio.ensure_future(self._end.wait())
        self.watches += 1
        try:
            async with self._passed_on(request) as answer:
                response = web.StreamResponse(status=answer.status, headers=_of_answer(answer.headers))
                await response.prepare(request)
                await self._stream(answer, response, end)
                if end.done() and self._broken:
                    return _reset(request)
                await response.write_eof()
                return response
        finally:
            self.watches -= 1
            end.cancel()

    async def _stream(self, answer: ClientResponse, response: web.StreamResponse, end: "asyncio.Task[bool]") -> None:
        """Pass events on until one side ends."""
        while True:
            line = asyncio.ensure_future(answer.content.readline())
            try:
                await asyncio.wait({line, end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                line.cancel()
            if not line.done() or not line.result():
                return
            self.bytes += len(line.result())
            if not self._swallowing:
                await response.write(line.result())

    @asynccontextmanager
    async def _passed_on(self, request: web.BaseRequest) -> AsyncIterator[ClientResponse]:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url, body = self._target + request.raw_path, await request.read()
        answer = await self._channel.request(
            request.method, url, data=body, headers=headers, timeout=ClientTimeout(total=None)
        )
        try:
            yield answer
        finally:
            drop(answer)


def _verb(request: web.BaseRequest) -> str:
    return VERBS.get(request.method) or ("list" if request.path.endswith("/leases") else "get")


def _of_answer(headers: "CIMultiDictProxy[str]") -> dict[str, str]:
    return {name: headers[name] for name in PASSED_BACK if name in headers}


def _reset(request: web.BaseRequest) -> web.Response:
    """Break the connection; what is returned is for nobody."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
