"""The Lease objects of one namespace, in memory or on an API server, and processes that use them in trouble."""

import asyncio
import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.requests import Answer, Requests
from grelmicro.backends.kubernetes.table import Table
from grelmicro.errors import OutcomeUnknownError
from grelmicro.testing import MovableClock
from tests.servers.kubernetes import Namespace

Body = dict[str, Any]

REFUSED: Body = {"kind": "Status", "status": "Failure"}


class Place(ABC):
    """The Lease objects of one namespace, as an administrator sees and edits them."""

    @abstractmethod
    def requests(self) -> AbstractAsyncContextManager[Requests]:
        """A way to them."""

    @abstractmethod
    def get(self, name: str) -> Body | None:
        """An object as it is now."""

    @abstractmethod
    def put(self, name: str, body: Body) -> Body:
        """Create an object, or replace the one that is there; the object as it was stored."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object."""

    def found(self, name: str) -> Body:
        """An object that exists."""
        body = self.get(name)
        assert body is not None
        return body

    def edit(self, name: str, **spec: object) -> Body:
        """Change fields of the `spec`; an object that does not exist is created."""
        body = self.get(name) or {}
        return self.put(name, {**body, "spec": {**body.get("spec", {}), **spec}})

    def annotate(self, name: str, /, **annotations: str) -> Body:
        """Change annotations `grelmicro.io/...`."""
        body = self.found(name)
        known = body["metadata"].get("annotations") or {}
        body["metadata"]["annotations"] = known | {f"grelmicro.io/{key}": text for key, text in annotations.items()}
        return self.put(name, body)


class ServerPlace(Place):
    """Lease objects on an API server."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[Requests]:
        requests = Requests(Cluster.at(self._namespace.name, self._namespace.kubeconfig()))
        await requests.open()
        try:
            yield requests
        finally:
            await requests.close()

    def get(self, name: str) -> Body | None:
        return self._namespace.lease(name)

    def put(self, name: str, body: Body) -> Body:
        metadata = {**body.get("metadata", {}), "name": name}
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", **body, "metadata": metadata}
        if "resourceVersion" in metadata:
            return self._namespace.replace(body)
        return self._namespace.create(body)

    def delete(self, name: str) -> None:
        self._namespace.delete(name)


class Shelf(Place):
    """Lease objects in memory, kept by the rules of the API server."""

    def __init__(self, now: float = 1_795_000_000.0) -> None:
        self.now = now
        """The server's time."""
        self.objects: dict[str, Body] = {}
        self._version = 0
        self._uid = 0

    @asynccontextmanager
    async def requests(self) -> AsyncIterator[Requests]:
        yield ShelfRequests(self)

    def get(self, name: str) -> Body | None:
        return copy.deepcopy(self.objects.get(name))

    def put(self, name: str, body: Body) -> Body:
        old = self.objects.get(name)
        new = copy.deepcopy(body)
        metadata = new.setdefault("metadata", {})
        metadata.pop("resourceVersion", None)
        metadata |= {"name": name, "uid": old["metadata"]["uid"] if old else self._next_uid()}
        new = {"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "spec": {}} | new
        if old is not None and _without_version(old) == new:
            return copy.deepcopy(old)  # a write that changes nothing does not make a new version
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[name] = new
        return copy.deepcopy(new)

    def delete(self, name: str) -> None:
        del self.objects[name]
        self._version += 1

    def _next_uid(self) -> str:
        self._uid += 1
        return f"uid-{self._uid}"


class ShelfRequests(Requests):
    """Requests on a shelf; each takes a turn of the event loop before it arrives, and one after."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(Cluster.at("default"))
        self._shelf = shelf

    async def open(self, what: str = "") -> None:
        pass

    async def close(self) -> None:
        pass

    async def read(self, name: str, what: str, *, urgent: bool = False) -> Answer:
        await asyncio.sleep(0)
        found = self._shelf.get(name)
        return await self._answer(404 if found is None else 200, found)

    async def create(self, body: Body, what: str, *, urgent: bool = False) -> Answer:
        await asyncio.sleep(0)
        assert not body["metadata"].keys() & {"resourceVersion", "uid"}
        name = body["metadata"]["name"]
        if name in self._shelf.objects:
            return await self._answer(409)
        return await self._answer(201, self._shelf.put(name, _checked(body)))

    async def replace(self, name: str, body: Body, what: str, *, urgent: bool = False) -> Answer:
        await asyncio.sleep(0)
        assert body["metadata"]["name"] == name
        found = self._shelf.get(name)
        if found is None and "uid" not in body["metadata"]:  # as the server does it
            return await self._answer(201, self._shelf.put(name, _checked(body)))
        if found is None or any(found["metadata"][key] != body["metadata"][key] for key in ("uid", "resourceVersion")):
            return await self._answer(409)
        return await self._answer(200, self._shelf.put(name, _checked(body)))

    async def list(self, selector: str, what: str, *, limit: int, token: str = "") -> Answer:
        await asyncio.sleep(0)
        key, _, value = selector.partition("=")
        names = [name for name in sorted(self._shelf.objects) if name > token]
        found = [body for name in names if (body := self._shelf.get(name)) and _labels(body).get(key) == value]
        page = found[:limit]
        for body in page:
            del body["kind"], body["apiVersion"]
        more = page[-1]["metadata"]["name"] if len(found) > limit else ""
        return await self._answer(200, {"kind": "LeaseList", "metadata": {"continue": more}, "items": page})

    async def _answer(self, status: int, body: Body | None = None) -> Answer:
        answer = Answer(status, body or {**REFUSED, "code": status}, float(int(self._shelf.now)))
        await asyncio.sleep(0)
        return answer


class Trouble(Requests):
    """Requests that are counted, and some of which get into trouble on their way to or from an API server.

    Args:
        inner: the way to the API server.
    """

    def __init__(self, inner: Requests) -> None:
        super().__init__(inner.cluster)
        self.inner = inner
        self.calls: Counter[str] = Counter()
        """How many requests there were, by verb; urgent ones by `urgent VERB` besides."""
        self.before: Callable[[str, str], Awaitable[None]] | None = None
        """Awaited before each request is sent, with its verb and the object's name."""
        self.lose: set[str] = set()
        """Verbs of which the next request is carried out, and its answer lost."""
        self.keep: set[str] = set()
        """Verbs of which the next request is kept on its way, and fails unanswered."""
        self.kept: list[Callable[[], Awaitable[Answer]]] = []
        """The requests on their way."""

    async def open(self, what: str = "") -> None:
        await self.inner.open(what)

    async def close(self) -> None:
        await self.inner.close()

    async def deliver(self) -> list[int]:
        """Let the requests that were kept arrive; what they are answered."""
        kept, self.kept = self.kept, []
        return [(await request()).status for request in kept]

    async def read(self, name: str, what: str, *, urgent: bool = False) -> Answer:
        return await self._send("GET", name, lambda: self.inner.read(name, what, urgent=urgent), urgent)

    async def create(self, body: Body, what: str, *, urgent: bool = False) -> Answer:
        body = copy.deepcopy(body)
        name = body["metadata"]["name"]
        return await self._send("POST", name, lambda: self.inner.create(body, what, urgent=urgent), urgent)

    async def replace(self, name: str, body: Body, what: str, *, urgent: bool = False) -> Answer:
        body = copy.deepcopy(body)
        return await self._send("PUT", name, lambda: self.inner.replace(name, body, what, urgent=urgent), urgent)

    async def list(self, selector: str, what: str, *, limit: int, token: str = "") -> Answer:
        return await self._send("LIST", "", lambda: self.inner.list(selector, what, limit=limit, token=token), False)

    def watch(
        self, selector: str, resource_version: str, started: Callable[[], None] | None = None
    ) -> AsyncGenerator[Body, None]:
        return self.inner.watch(selector, resource_version, started)

    async def _send(self, verb: str, name: str, request: Callable[[], Awaitable[Answer]], urgent: bool) -> Answer:
        self.calls[verb] += 1
        if urgent:
            self.calls[f"urgent {verb}"] += 1
        if self.before is not None:
            await self.before(verb, name)
        if verb in self.keep:
            self.keep.discard(verb)
            self.kept.append(request)
            raise OutcomeUnknownError(f"{verb}: no answer")
        answer = await request()
        if verb in self.lose:
            self.lose.discard(verb)
            raise OutcomeUnknownError(f"{verb}: no answer")
        return answer


class Process:
    """A process that uses Lease objects, with a clock of its own."""

    def __init__(self, inner: Requests, prefix: str = "grelmicro") -> None:
        self.clock = MovableClock()
        self.trouble = Trouble(inner)
        self.table = Table(self.trouble, prefix, self.clock)

    @property
    def calls(self) -> Counter[str]:
        """How many requests there were since this was asked last, without the urgent ones' count."""
        calls, self.trouble.calls = self.trouble.calls, Counter()
        return Counter({verb: count for verb, count in calls.items() if not verb.startswith("urgent")})


@asynccontextmanager
async def process(place: Place) -> AsyncIterator[Process]:
    """A new process."""
    async with place.requests() as requests:
        yield Process(requests)


@pytest.fixture(params=["memory", "server"])
def place(request: pytest.FixtureRequest) -> Place:
    """Lease objects in memory and on an API server."""
    if request.param == "memory":
        return Shelf()
    return ServerPlace(request.getfixturevalue("kubernetes_namespace"))


@pytest.fixture
async def mine(place: Place) -> AsyncIterator[Process]:
    """A process on `place`."""
    async with process(place) as one:
        yield one


@pytest.fixture
async def other(place: Place) -> AsyncIterator[Process]:
    """Another one."""
    async with process(place) as one:
        yield one


CART = "lock:cart"
CART_LEASE = lease_name("grelmicro", CART)


def _checked(body: Body) -> Body:
    """A body that the server accepts: it checks these."""
    spec = body["spec"]
    assert spec.get("leaseDurationSeconds") is None or 0 < spec["leaseDurationSeconds"] < 2**31
    assert spec.get("leaseTransitions") is None or 0 <= spec["leaseTransitions"] < 2**31
    return body


def _labels(body: Body) -> dict[str, str]:
    return body["metadata"].get("labels") or {}


def _without_version(body: Body) -> Body:
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}}
