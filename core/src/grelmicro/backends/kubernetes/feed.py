"""Hints by Kubernetes: one watch on the Leases of a prefix, for all names that somebody waits for."""

import math
from collections.abc import Callable
from contextlib import aclosing, suppress
from secrets import token_hex
from typing import Any, Protocol

from grelmicro.backends.hints import TEST_INTERVAL, Feed
from grelmicro.backends.kubernetes.names import hints_name
from grelmicro.backends.kubernetes.record import labels, selector
from grelmicro.backends.kubernetes.requests import ForbiddenError, Gone, Requests
from grelmicro.clock import Clock
from grelmicro.errors import BackendUnavailableError

Body = dict[str, Any]
"""A Lease object as JSON."""

SHORTEST_WATCH = 1.0
"""Seconds: a server that ends each watch sooner cannot be watched."""

RECENT = TEST_INTERVAL / 2
"""Seconds for which an event proves that events come: a test within them costs no request."""

ECHO = "grelmicro.io/hint"
"""The annotation that a test changes."""

DESCRIPTION = "Changed now and then by processes that wait, to see that their watch works. Nobody ever holds it."
"""Tells people what the Lease is for that is neither a lock nor a role."""


class Learn(Protocol):
    """What takes note of an object that was seen, and returns the one that it knew of that name before, if any."""

    def __call__(self, body: Body, /, *, deleted: bool = False) -> Body | None: ...


class KubernetesFeed(Feed):
    """A topic is the name of a Lease object, and the message is its change.

    A test writes to one Lease that all processes of a prefix share. They write it rarely, however many they are: the
    events of one are seen by all, and an event of whatever Lease proves as much.

    Args:
        requests: to the API server.
        learn: is told each record that was seen, before those who wait for it.
        prefix: of whose Leases.
        clock: the time of this process.
    """

    def __init__(self, requests: Requests, learn: Learn, prefix: str, clock: Clock) -> None:
        self._requests = requests
        self._learn = learn
        self._clock = clock
        self._selector = selector(prefix)
        self._labels = labels(prefix)
        self._echo_name = hints_name(prefix)
        self._heard: Callable[[str], None] = _ignore
        self._awaited = ""  # the topic of the test under way
        self._proven = False  # whether a test succeeded
        self._event_at = -math.inf
        self._echo: Body | None = None  # the Lease for tests, as it was seen last

    async def listen(self, heard: Callable[[str], None], connected: Callable[[], None]) -> None:
        """See `Feed.listen`; a watch that the server ends in order is continued where it ended."""
        version = ""
        self._heard = heard
        try:
            while True:
                version = await self._watch(version, connected)
        finally:
            self._forget()

    async def follow(self, topic: str) -> None:
        """All topics are in the watch."""

    async def unfollow(self, topic: str) -> None:
        """All topics are in the watch."""

    async def send(self, topic: str) -> None:
        """See `Feed.send`; on a watch that brought something a moment ago it costs no request."""
        if self._proven and self._clock.now() - self._event_at <= RECENT:
            self._heard(topic)
            return
        self._awaited = topic
        await self._touch("testing the watch")

    async def ping(self) -> None:
        """See `Feed.ping`; a server that refuses it is there."""
        with suppress(ForbiddenError):
            await self._requests.read(self._echo_name, "asking for a sign of life")

    def _forget(self) -> None:
        """There is no watch."""
        self._heard = _ignore
        self._proven = False
        self._echo = None

    async def _watch(self, version: str, connected: Callable[[], None]) -> str:
        """Watch until the server ends it; the version from which to go on, none if nothing is known any more."""
        began_at = self._clock.now()
        resumed = version != ""
        if not resumed:
            version = await self._newest()
        # What changes after `version` is told, however long it takes until the watch begins.
        events = self._requests.watch(self._selector, version, None if resumed else connected)
        try:
            async with aclosing(events):
                async for event in events:
                    version = self._take(event)
        except Gone:
            version = ""
            if resumed:
                return version
        if self._clock.now() - began_at < SHORTEST_WATCH:
            raise BackendUnavailableError("Kubernetes: the server ends each watch at once: look at its log")
        return version

    async def _newest(self) -> str:
        """The version of the newest change of any Lease; the selector would only make that dear."""
        answer = await self._requests.list("", "beginning a watch", limit=1)
        return str(answer.body["metadata"]["resourceVersion"])

    def _take(self, event: Body) -> str:
        """Take note of one event, and wake who waits for that; its version."""
        kind, body = event["type"], event["object"]
        name = body["metadata"].get("name")
        self._event_at = self._clock.now()
        if name == self._echo_name:
            self._echo = None if kind == "DELETED" else body
            self._proven = True
            self._heard(self._awaited)
        elif kind != "BOOKMARK":
            before = self._learn(body, deleted=kind == "DELETED")
            if kind == "DELETED" or _ends_sooner(body, before):
                self._heard(name)
        return str(body["metadata"]["resourceVersion"])

    async def _touch(self, what: str) -> None:
        """Change the Lease for tests, unless somebody else just did: that is told as well."""
        if self._echo is None:
            answer = await self._requests.read(self._echo_name, what)
            if answer.status == 404:
                await self._requests.create(self._touched({"metadata": {"name": self._echo_name}}), what)
                return
            self._echo = answer.body
        await self._requests.replace(self._echo_name, self._touched(self._echo), what)

    def _touched(self, body: Body) -> Body:
        """`body` with a change, and as it has to be."""
        metadata = body["metadata"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "spec": {},
            **body,
            "metadata": {
                **metadata,
                "labels": {**metadata.get("labels", {}), **self._labels},
                "annotations": {
                    **metadata.get("annotations", {}),
                    "kubernetes.io/description": DESCRIPTION,
                    ECHO: token_hex(8),
                },
            },
        }


def _ends_sooner(body: Body, before: Body | None) -> bool:
    """Whether a record may have become free, or end before the time that those who wait for it know of."""
    spec = body.get("spec", {})
    if not spec.get("holderIdentity") or before is None:
        return True
    known = before.get("spec", {}).get("leaseDurationSeconds", 0)
    return bool(spec.get("leaseDurationSeconds", 0) < known)


def _ignore(topic: str) -> None:
    """Who would be told is gone."""
