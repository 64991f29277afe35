"""Requests on Lease objects: each within its time, each sent once, and each failure told as what it means."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from grelmicro import lifecycle
from grelmicro.backends import inherited
from grelmicro.backends.kubernetes.access import Access, reason
from grelmicro.backends.kubernetes.cluster import DEFAULT_NAMESPACE, Cluster
from grelmicro.backends.kubernetes.errors import LASTING, ForbiddenError, Gone, meaning
from grelmicro.backends.kubernetes.exchange import FAILURES, Call, Exchange, Kind, Reply, Stream
from grelmicro.errors import (
    BackendUnavailableError,
    CoordinationBackendError,
    GrelmicroError,
    OutcomeUnknownError,
    OutOfContextError,
)

__all__ = ["Answer", "ForbiddenError", "Gone", "Requests"]

WATCHING = 300
"""Seconds after which the API server ends a watch, so that one whose connection died in silence is noticed."""


@dataclass(slots=True)
class Answer:
    """What the API server answered."""

    status: int
    """200, 201, 404 or 409: everything else is raised."""
    body: dict[str, Any]
    """The object, or the `Status` of a refusal."""
    date: float | None
    """When, by its own clock in whole seconds since 1970."""


class Requests:
    """Requests on the Lease objects of one namespace; opened and closed with the store.

    Args:
        cluster: which API server, and which namespace.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.limit = cluster.request_timeout
        self.namespace = cluster.namespace or DEFAULT_NAMESPACE
        self._generation = lifecycle.generation
        self._access: Access | None = None
        self._exchange: Exchange | None = None

    @property
    def safe_url(self) -> str:
        """The namespace as a URL: nothing of the server, and nothing secret."""
        return f"kubernetes://{self.namespace}"

    async def open(self, what: str = "opening KubernetesStore") -> None:
        """Find out where the API server is, and who asks; nothing is sent.

        Raises:
            SettingsValidationError: nothing tells where it is, or what does is wrong.
            BackendUnavailableError: what tells it cannot be read now.
        """
        source = self.cluster.source()
        access = self._access = Access(source, self.limit)
        inherited.opened(access)
        self._generation = lifecycle.generation
        try:
            await access.open()
            self.namespace = self.cluster.namespace_in(source)
        except BaseException as error:
            await self.close()
            if isinstance(error, GrelmicroError) or not isinstance(error, Exception):
                raise
            # Files that are being replaced, and programs that ask a server, may do better the next time.
            raise BackendUnavailableError(
                f"{what}: where the API server is, and who asks, cannot be read from {source.title} "
                f"({reason(error)}): check it with kubectl"
            ) from error
        self._exchange = Exchange(access, self.limit, self.safe_url)

    async def close(self) -> None:
        """Close the connections."""
        access, self._access, self._exchange = self._access, None, None
        if access is not None:
            try:
                await access.close()
            finally:
                inherited.closed(access)

    def abandon(self) -> None:
        """Forget the connections of an event loop that is gone; those of a parent process are not touched."""
        access, self._access, self._exchange = self._access, None, None
        if access is not None and self._generation is lifecycle.generation:
            inherited.closed(access)

    async def read(self, name: str, what: str, *, urgent: bool = False) -> Answer:
        """GET the object of a name: 200 or 404.

        Raises:
            BackendUnavailableError: the API server cannot be used, or refused it.
        """
        return await self._ask("get", Call("GET", self._path(name), what, _kind(urgent)))

    async def create(self, body: dict[str, Any], what: str, *, urgent: bool = False) -> Answer:
        """POST an object: 201, or 409 if there is one of its name.

        Raises:
            BackendUnavailableError: nothing was done; the namespace does not exist, for one.
            OutcomeUnknownError: it may have been done.
        """
        return await self._ask("create", Call("POST", self._path(), what, _kind(urgent), _content(body)))

    async def replace(self, name: str, body: dict[str, Any], what: str, *, urgent: bool = False) -> Answer:
        """PUT an object that has the resourceVersion on which it is based: 200, 404 or 409.

        Raises:
            BackendUnavailableError: nothing was done.
            OutcomeUnknownError: it may have been done.
        """
        return await self._ask("update", Call("PUT", self._path(name), what, _kind(urgent), _content(body)))

    async def delete(self, name: str, what: str) -> bool:
        """DELETE the object of a name, if there is one; False: the user may not.

        Raises:
            BackendUnavailableError: nothing was done.
            OutcomeUnknownError: it may have been done.
        """
        call = Call("DELETE", self._path(name), what, "ordinary")
        reply = await self._get_exchange().ask(call)
        if reply.status < 300 or reply.status == 404:
            return True
        if reply.status == 403:  # a right that few need, so that nothing is said of it
            return False
        raise self._failure("delete", reply.status, _object(reply.content), call)

    async def list(self, selector: str, what: str, *, limit: int, token: str = "") -> Answer:
        """LIST a page of objects.

        Args:
            selector: of labels; empty: all.
            what: for error texts.
            limit: the most that a page has.
            token: of the page before, for the next one.

        Raises:
            Gone: the token has expired.
            BackendUnavailableError: the API server cannot be used, or refused it.
        """
        query = {"labelSelector": selector, "limit": str(limit), "continue": token}
        return await self._ask("list", Call("GET", self._path(query=query), what, "ordinary"))

    async def watch(
        self, selector: str, resource_version: str, started: Callable[[], None] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """WATCH objects: the events as they come, bookmarks among them, until the API server ends it.

        Args:
            selector: of labels; empty: all.
            resource_version: of what is known already.
            started: called once the API server has agreed.

        Raises:
            Gone: the version is too old.
            BackendUnavailableError: the API server cannot be used, refused it, or the connection ended.
        """
        query = {
            "watch": "1",
            "allowWatchBookmarks": "1",
            "labelSelector": selector,
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCHING),
        }
        call = Call("GET", self._path(query=query), "watching", "watch")
        async with self._get_exchange().stream(call, WATCHING + self.limit) as stream:
            if isinstance(stream, Reply):
                raise self._failure("watch", stream.status, _object(stream.content), call)
            if started is not None:
                started()
            while line := await self._line(stream):
                yield self._event(line, call)

    async def _ask(self, verb: str, call: Call) -> Answer:
        """Send a request; an answer that is none to go on with is raised."""
        reply = await self._get_exchange().ask(call)
        body = _object(reply.content)
        goes_on = (
            reply.status < 300 or (reply.status == 404 and verb != "create") or (reply.status == 409 and call.changes)
        )
        if not goes_on or body is None:
            raise self._failure(verb, reply.status, body, call)
        return Answer(reply.status, body, reply.date)

    def _failure(self, verb: str, status: int, body: Mapping[str, Any] | None, call: Call) -> CoordinationBackendError:
        """What an answer means that is none to go on with."""
        # An API server that answers with an error may have done it all the same; one that refuses has not.
        unknown = call.changes and (status < 300 or status == 408 or status >= 500)
        if body is None and status < 500:
            why = f"answered {status} and nothing that Kubernetes writes: check the address, and any proxy before it"
        else:
            why = meaning(status, body or {}, verb, self.namespace, call.content)
        text = f"{call.what}: {self.safe_url} {why}"
        if unknown:
            return OutcomeUnknownError(f"{text}; whether it was done is not known")
        if status == 410:
            return Gone(text)
        kind = ForbiddenError if status == 403 else BackendUnavailableError
        return kind(text, lasting=status in LASTING)

    async def _line(self, stream: Stream) -> bytes:
        try:
            return await stream.line()
        except (*FAILURES, ValueError) as error:
            raise BackendUnavailableError(
                f"watching: {self.safe_url} ended the connection, or sent nothing for too long"
            ) from error

    def _event(self, line: bytes, call: Call) -> dict[str, Any]:
        event = _object(line)
        found = event.get("object") if event is not None else None
        if event is None or not isinstance(found, dict):
            raise BackendUnavailableError(f"watching: {self.safe_url} sent something that is no event")
        if event.get("type") == "ERROR":
            raise self._failure("watch", int(found.get("code") or 500), found, call)
        return event

    def _get_exchange(self) -> Exchange:
        if self._exchange is None:
            raise OutOfContextError("KubernetesStore is closing: keep it open until its users have ended")
        return self._exchange

    def _path(self, name: str = "", *, query: Mapping[str, str] | None = None) -> str:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        if name:
            path += f"/{name}"
        if query is not None:
            path += f"?{urlencode({key: value for key, value in query.items() if value})}"
        return path


def _kind(urgent: bool) -> Kind:
    return "urgent" if urgent else "ordinary"


def _content(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _object(content: bytes) -> dict[str, Any] | None:
    """The object that was sent; None if it is none."""
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) and ("kind" in found or "type" in found) else None
