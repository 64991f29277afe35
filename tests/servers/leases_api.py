"""An imitation of an API server's Leases, as strict as the original, for what the original cannot be made to answer.

`test_leases_api.py` holds it against the original.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from time import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote
from uuid import uuid4

from aiohttp import web

from tests.servers.lease_rules import Object, decoded, faults

LEASES = "/apis/coordination.k8s.io/v1/namespaces/"


class Refused(Exception):
    """The server answers with a Status."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    def body(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.status,
        }


REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass
class Trouble:
    """What happens to some requests."""

    status: int
    methods: tuple[str, ...]
    left: int
    headers: dict[str, str]
    done: bool
    """Whether the request is carried out before."""

    def fits(self, method: str) -> bool:
        return self.left > 0 and (not self.methods or method in self.methods)


@dataclass
class Leases:
    """The objects of all namespaces, and what happened to them."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    history: list[tuple[int, Object | None, Object | None]] = field(default_factory=list)
    """Versions, with what was there before and after."""
    version: int = 1000
    oldest: int = 1000
    """The version from which on the history is kept."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, key: tuple[str, str], lease: Object) -> Object:
        """Store an object; one that changes nothing does not get a new version."""
        before = self.objects.get(key)
        if before == lease:
            return before
        self.version += 1
        kept = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}
        self.objects[key] = kept
        self._tell(before, kept)
        return kept

    def remove(self, key: tuple[str, str]) -> None:
        """Delete an object."""
        self.version += 1
        self._tell(self.objects.pop(key), None)

    def _tell(self, before: Object | None, after: Object | None) -> None:
        self.history.append((self.version, before, after))
        self.moved.set()
        self.moved = asyncio.Event()

    def forget(self) -> None:
        """Drop the history, as an API server does after some minutes."""
        self.history.clear()
        self.oldest = self.version


class LeasesApi:
    """Listens on 127.0.0.1 from entry on, in the test's own event loop, without TLS.

    Args:
        folder: where it writes the kubeconfig and the file with the token.
    """

    def __init__(self, folder: Path) -> None:
        self.leases = Leases()
        self.namespaces = {"default"}
        self.token = uuid4().hex
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request so far, also those that were refused."""
        self.watches = 0
        """How many are open."""
        self.ahead = 0.0
        """Seconds by which its clock, which it tells in `Date`, is ahead."""
        self.slow_every = 0
        self.slow_by = 0.0
        """Of so many requests each last one takes so many seconds longer (after it was carried out)."""
        self._troubles: list[Trouble] = []
        self._kubeconfig = folder / "kubeconfig"
        self.token_file = folder / "token"
        self._ending = asyncio.Event()
        self._runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
        self.address = ""

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        self.write_token()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.end_watches()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Where a store finds it."""
        return f"kubernetes://default?kubeconfig={quote(str(self._kubeconfig), safe='')}"

    @property
    def kubeconfig(self) -> Path:
        """It names the file with the token."""
        return self._kubeconfig

    def count(self) -> Counter[str]:
        """How many requests there were so far, by method."""
        return Counter(method for method, _ in self.requests)

    # What tests do to it

    def answer(
        self, status: int, *methods: str, times: int = 1, retry_after: int | None = None, done: bool = False
    ) -> None:
        """Answer the next requests (of these methods) with a failure; `done`: after carrying them out."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self._troubles.append(Trouble(status, methods, times, headers, done))

    def heal(self) -> None:
        """End what `answer` and `slow_every` began."""
        self._troubles.clear()
        self.slow_every = 0

    def rotate(self, *, write: bool = True) -> None:
        """Accept no token but a new one, which is written where users find it."""
        self.token = uuid4().hex
        if write:
            self.write_token()

    def write_token(self) -> None:
        """Write the kubeconfig, and the token to its file."""
        self.token_file.write_text(self.token)
        self._kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "tests",
                    "clusters": [{"name": "tests", "cluster": {"server": self.address}}],
                    "users": [{"name": "tests", "user": {"tokenFile": str(self.token_file)}}],
                    "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
                }
            )
        )

    def end_watches(self) -> None:
        """End the watches that are open, as a server does after some minutes."""
        self._ending.set()
        self._ending = asyncio.Event()

    # How it answers

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        number = len(self.requests)
        trouble = next((each for each in self._troubles if each.fits(request.method)), None)
        headers = {"Date": formatdate(time() + self.ahead, usegmt=True)}
        if trouble is not None:
            trouble.left -= 1
        try:
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            answer = None if trouble and not trouble.done else await self._carry_out(request, headers)
            if trouble is not None:
                headers.update(trouble.headers)
                raise Refused(trouble.status, REASONS[trouble.status], "this is what the test wants")
            assert answer is not None
        except Refused as refused:
            answer = web.json_response(refused.body(), status=refused.status, headers=headers)
        if self.slow_every and number % self.slow_every == 0:
            await asyncio.sleep(self.slow_by)
        return answer

    async def _carry_out(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        namespace, name = self._target(request.path)
        if request.method == "GET" and not name:
            if request.query.get("watch") in ("1", "true"):
                return await self._watch(request, namespace, headers)
            return web.json_response(self._list(request, namespace), headers=headers)
        key = (namespace, name)
        if request.method == "GET":
            return web.json_response(self._existing(key), headers=headers)
        if request.method == "DELETE":
            self._existing(key)
            self.leases.remove(key)
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"}, headers=headers)
        if (request.method, bool(name)) not in (("POST", False), ("PUT", True)):
            raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        lease = await self._lease(request, namespace)
        if request.method == "POST":
            return web.json_response(self._create(namespace, lease), status=201, headers=headers)
        created, kept = self._replace(key, lease)
        return web.json_response(kept, status=201 if created else 200, headers=headers)

    def _target(self, path: str) -> tuple[str, str]:
        namespace, _, rest = path.removeprefix(LEASES).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(LEASES) or kind != "leases" or "/" in name:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return namespace, name

    def _existing(self, key: tuple[str, str]) -> Object:
        if key not in self.leases.objects:
            raise Refused(404, "NotFound", f'leases.coordination.k8s.io "{key[1]}" not found')
        return self.leases.objects[key]

    async def _lease(self, request: web.BaseRequest, namespace: str) -> Object:
        """The Lease that a request carries, if it is in order."""
        if not request.content_type.endswith("json"):
            raise Refused(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        try:
            lease = decoded(json.loads(await request.read()))
        except ValueError as error:
            raise Refused(400, "BadRequest", str(error)) from error
        if lease["metadata"].setdefault("namespace", namespace) != namespace:
            raise Refused(400, "BadRequest", "the namespace of the provided object does not match the request")
        return lease

    def _create(self, namespace: str, lease: Object) -> Object:
        if lease["metadata"].pop("resourceVersion", ""):
            raise Refused(500, "InternalError", "resourceVersion should not be set on objects to be created")
        if namespace not in self.namespaces:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        self._check(lease)
        key = (namespace, lease["metadata"]["name"])
        if key in self.leases.objects:
            raise Refused(409, "AlreadyExists", f'leases.coordination.k8s.io "{key[1]}" already exists')
        lease["metadata"].update(uid=str(uuid4()), creationTimestamp="2026-01-01T00:00:00Z")
        return self.leases.put(key, lease)

    def _replace(self, key: tuple[str, str], lease: Object) -> tuple[bool, Object]:
        """Whether the object is new, and what was stored: a PUT without uid and version creates."""
        metadata = lease["metadata"]
        if metadata.get("name", "") != key[1]:
            raise Refused(400, "BadRequest", "the name of the object does not match the name on the URL")
        before = self.leases.objects.get(key)
        if before is None:
            if metadata.get("uid"):
                raise Refused(409, "Conflict", "Precondition failed: UID in precondition, no UID in object")
            metadata.pop("resourceVersion", None)
            return True, self._create(key[0], lease)
        if metadata.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            raise Refused(409, "Conflict", "Precondition failed: UID in precondition is not that of the object")
        if not metadata.get("resourceVersion"):
            raise Refused(422, "Invalid", "metadata.resourceVersion: must be specified for an update")
        if not metadata["resourceVersion"].isdigit():
            raise Refused(500, "InternalError", "the resourceVersion is no number")
        if metadata["resourceVersion"] != before["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified; please apply your changes to the latest")
        self._check(lease)
        metadata.update({field: before["metadata"][field] for field in ("uid", "creationTimestamp")})
        return False, self.leases.put(key, lease)

    def _check(self, lease: Object) -> None:
        if wrong := list(faults(lease)):
            raise Refused(422, "Invalid", "; ".join(wrong))

    def _list(self, request: web.BaseRequest, namespace: str) -> Object:
        matches = selector(request)
        after, _, version = request.query.get("continue", "").partition("@")
        if version and int(version) < self.leases.oldest:
            raise Refused(410, "Expired", "The provided continue parameter is too old")
        found = [
            lease
            for (where, name), lease in sorted(self.leases.objects.items())
            if where == namespace and name > after and matches(lease)
        ]
        limit = int(request.query.get("limit", "0")) or len(found)
        metadata = {"resourceVersion": version or str(self.leases.version)}
        if len(found) > limit:
            metadata["continue"] = f"{found[limit - 1]['metadata']['name']}@{metadata['resourceVersion']}"
        return {
            "kind": "LeaseList",
            "apiVersion": "coordination.k8s.io/v1",
            "metadata": metadata,
            "items": found[:limit],
        }

    async def _watch(self, request: web.BaseRequest, namespace: str, headers: dict[str, str]) -> web.StreamResponse:
        seen = int(request.query.get("resourceVersion", "0"))
        matches, ending = selector(request), self._ending
        response = web.StreamResponse(headers={**headers, "Content-Type": "application/json"})
        await response.prepare(request)
        self.watches += 1
        loop = asyncio.get_running_loop()
        until = loop.time() + float(request.query.get("timeoutSeconds", "1800"))
        try:
            with suppress(ConnectionError):
                while not ending.is_set() and loop.time() < until:
                    moved = self.leases.moved
                    if seen < self.leases.oldest:
                        expired = Refused(410, "Expired", f"too old resource version: {seen}")
                        await _send(response, "ERROR", expired.body())
                        break
                    for version, before, after in list(self.leases.history):
                        if version > seen:
                            seen = version
                            await _tell(response, namespace, matches, before, after, version)
                    await _first(until - loop.time(), moved, ending)
                await response.write_eof()
        finally:
            self.watches -= 1
        return response


def selector(request: web.BaseRequest) -> Callable[[Object | None], bool]:
    """Whether an object has the labels that a request asks for."""
    wanted = dict(part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part)

    def matches(lease: Object | None) -> bool:
        return lease is not None and wanted.items() <= lease["metadata"].get("labels", {}).items()

    return matches


async def _tell(
    response: web.StreamResponse,
    namespace: str,
    matches: Callable[[Object | None], bool],
    before: Object | None,
    after: Object | None,
    version: int,
) -> None:
    """Tell a watch of a change, if it concerns it."""
    subject: Any = after or before
    if subject["metadata"]["namespace"] != namespace:
        return
    if matches(after):
        await _send(response, "MODIFIED" if matches(before) else "ADDED", subject)
    elif matches(before):
        last = {**subject, "metadata": {**subject["metadata"], "resourceVersion": str(version)}}
        await _send(response, "DELETED", last)


async def _send(response: web.StreamResponse, kind: str, subject: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": subject}).encode() + b"\n")


async def _first(timeout: float, *events: asyncio.Event) -> None:
    """Wait for the first of some events."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=max(timeout, 0.0), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
