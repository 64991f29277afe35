"""An HTTP server in the test's own process that answers for an API server as a test says, where a real one cannot."""

import asyncio
import json
import ssl
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Object = dict[str, Any]
Answer = Callable[["Seen"], Awaitable[web.StreamResponse]]

PATH = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
LEASE: Object = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "a"}, "spec": {}}


@dataclass
class Seen:
    """A request as it arrived."""

    request: web.BaseRequest
    content: bytes
    peer: Any
    """The certificate of who asks."""

    @property
    def token(self) -> str:
        """By which it says who asks."""
        return self.request.headers.get("Authorization", "")

    @property
    def body(self) -> Any:
        """What it carries."""
        return json.loads(self.content) if self.content else None

    @property
    def call(self) -> tuple[str, str]:
        """Method and path."""
        return self.request.method, self.request.path


@dataclass
class ApiServer:
    """Answers each request with the next of `answers`, or else with the object that it carries."""

    certificate: Path | None = None
    """A folder with `cert.pem` and `key.pem`; None: no TLS."""
    clients: Path | None = None
    """Whose certificates it asks its clients for."""
    answers: deque[Answer] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    """Those on which requests arrived, ever."""

    async def __aenter__(self) -> Self:
        context = None
        if self.certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.clients)
            context.load_cert_chain(self.certificate / "cert.pem", self.certificate / "key.pem")
            context.verify_mode = ssl.CERT_NONE if self.clients is None else ssl.CERT_REQUIRED
        self._server = web.Server(self._answer, handler_cancellation=True)
        runner = self._runner = web.ServerRunner(self._server, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port: int = runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"

    @property
    def tokens(self) -> list[str]:
        """Who asked, in order."""
        return [each.token for each in self.seen]

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        seen = Seen(request, await request.read(), request.transport.get_extra_info("peercert"))
        self.seen.append(seen)
        self.connections.add(request.transport)
        return await (self.answers.popleft() if self.answers else echo)(seen)


async def echo(seen: Seen) -> web.StreamResponse:
    """What came in; a Lease where nothing did."""
    return web.json_response(seen.body or LEASE)


def status(code: int, headers: Mapping[str, str] | None = None, **more: object) -> Answer:
    """An answer with a `Status`."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return web.json_response({"kind": "Status", "code": code, **more}, status=code, headers=headers)

    return answer


def text(words: str, code: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer of something before the API server."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return web.Response(text=words, status=code, headers=headers)

    return answer


async def cut(seen: Seen) -> web.StreamResponse:
    """The connection ends without an answer."""
    assert seen.request.transport is not None
    seen.request.transport.abort()
    return web.Response()


async def silence(seen: Seen) -> web.StreamResponse:
    """No answer comes."""
    await asyncio.sleep(3600.0)
    return web.Response()


def certificate(folder: Path, *, ca: Path | None = None, name: str = "127.0.0.1") -> Path:
    """A folder with a certificate that has signed itself, or that `ca` has signed."""
    folder.mkdir(parents=True, exist_ok=True)
    signed = ("-CA", ca / "cert.pem", "-CAkey", ca / "key.pem") if ca else ()
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"),
        *("-addext", "keyUsage=keyCertSign,digitalSignature"),
        *("-keyout", "key.pem", "-out", "cert.pem", *signed),
    ]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def kubeconfig(
    path: Path,
    url: str,
    user: Mapping[str, object] | None = None,
    *,
    namespace: str = "",
    cluster: Mapping[str, object] | None = None,
) -> Path:
    """A kubeconfig of one context; YAML contains JSON."""
    context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
    config = {
        "current-context": "main",
        "contexts": [{"name": "main", "context": context}],
        "clusters": [{"name": "c", "cluster": {"server": url, **(cluster or {})}}],
        "users": [{"name": "u", "user": {"token": "secret-1"} if user is None else user}],
    }
    path.write_text(json.dumps(config))
    return path
