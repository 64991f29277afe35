"""An elector that does with a Lease what those of Kubernetes itself do, as far as another program can tell."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Self

from grelmicro.testing import MovableClock
from tests.helpers.timeline import pause
from tests.servers.kubernetes import Namespace, Object

LEASES = "/apis/coordination.k8s.io/v1/namespaces"


class Refused(Exception):
    """The API server did not do it, or cannot be reached."""


@dataclass(frozen=True)
class Election:
    """What such an elector reads from a Lease; times are compared in whole seconds."""

    holder: str = ""
    seconds: int = 0
    acquired: int | None = None
    renewed: int | None = None
    transitions: int = 0

    @classmethod
    def of(cls, lease: Object) -> Self:
        """What a Lease says."""
        spec = lease.get("spec") or {}
        return cls(
            spec.get("holderIdentity") or "",
            spec.get("leaseDurationSeconds") or 0,
            whole(spec.get("acquireTime")),
            whole(spec.get("renewTime")),
            spec.get("leaseTransitions") or 0,
        )


class Elector:
    """One candidate, on a machine of its own.

    Args:
        namespace: where the Lease is.
        name: of the Lease object.
        identity: its own.
        clock: the time of all machines.
        lease: seconds; what it gives up after without a renewal is two thirds of it.
        retry: seconds between two requests.
        ahead: seconds by which its machine's time of day is ahead.
        old: it trusts its own settings instead of what the Lease says, reads before each write, and gives a lease back
            without a time, as versions of some years ago.
    """

    def __init__(
        self,
        namespace: Namespace,
        name: str,
        clock: MovableClock,
        identity: str = "go",
        *,
        lease: int = 15,
        retry: float = 2.0,
        ahead: float = 0.0,
        old: bool = False,
    ) -> None:
        self.leads = False
        self.cut_off = False
        """Whether nothing of what it sends arrives."""
        self._api = namespace.api
        self._path = f"{LEASES}/{namespace.name}/leases"
        self._name = name
        self._identity = identity
        self._clock = clock
        self._lease_seconds = lease
        self._retry = retry
        self._ahead = ahead
        self._old = old
        self._object: Object | None = None
        self._observed = Election()
        self._observed_at = 0.0
        self._read: Election | None = None

    async def run(self) -> None:
        """Stand until it leads, and lead until it cannot renew in time."""
        while not self.attempt():
            await pause(self._clock, self._retry)
        self.leads = True
        renewed_at = self._clock.now()
        while self._clock.now() - renewed_at < self._lease_seconds * 2 / 3:
            await pause(self._clock, self._retry)
            if self.attempt():
                renewed_at = self._clock.now()
        self.leads = False

    def attempt(self) -> bool:
        """Acquire or renew, once."""
        try:
            return self._renew_unread() or self._acquire_or_renew()
        except Refused:
            return False

    def release(self) -> bool:
        """Give the lease back, after the work has ended."""
        self.leads = False
        if not self._is_holder():
            return True
        given = Election("", 1, None, None, self._observed.transitions)
        if self._old:
            given = replace(given, seconds=self._lease_seconds)
        try:
            self._update(given, None if self._old else self._wall())
        except Refused:
            return False
        self._observe(given)
        return True

    def _renew_unread(self) -> bool:
        """A leader writes first, on what it wrote last."""
        if self._old or not self._is_holder() or not self._is_valid():
            return False
        try:
            self._update(self._own(self._observed.transitions), self._wall(), acquired=self._acquired())
        except Refused:
            return False
        self._observe(self._own(self._observed.transitions))
        return True

    def _acquire_or_renew(self) -> bool:
        found = self._get()
        if found is None:
            self._create()
            self._observe(self._own(0))
            return True
        if found != self._read:
            self._observe(found)
            self._read = found
        if found.holder and self._is_valid() and not self._is_holder():
            return False
        transitions = found.transitions if self._is_holder() else found.transitions + 1
        self._update(self._own(transitions), self._wall(), acquired=self._acquired() if self._is_holder() else None)
        self._observe(self._own(transitions))
        return True

    def _own(self, transitions: int) -> Election:
        now = int(self._wall())
        return Election(self._identity, self._lease_seconds, now, now, transitions)

    def _is_holder(self) -> bool:
        return self._observed.holder == self._identity

    def _is_valid(self) -> bool:
        seconds = self._lease_seconds if self._old else self._observed.seconds
        return self._observed_at + seconds > self._clock.now()

    def _observe(self, election: Election) -> None:
        self._observed = election
        self._observed_at = self._clock.now()

    def _wall(self) -> float:
        return self._clock.wall() + self._ahead

    # Requests

    def _acquired(self) -> str | None:
        return None if self._object is None else self._object["spec"].get("acquireTime")

    def _get(self) -> Election | None:
        status, body = self._ask("GET", f"{self._path}/{self._name}")
        if status == 404:
            return None
        self._object = body
        return Election.of(body)

    def _create(self) -> None:
        now = time_of(self._wall())
        body = {"metadata": {"name": self._name}, "spec": self._spec(self._own(0), now, now)}
        status, self._object = self._ask("POST", self._path, body)
        if status != 201:
            self._object = None
            raise Refused

    def _update(self, election: Election, wall: float | None, *, acquired: str | None = None) -> None:
        """Write it into the object as it was read or written last; the rest of the object is sent back."""
        if self._object is None:
            raise Refused
        now = None if wall is None else time_of(wall)
        body = {**self._object, "spec": self._spec(election, acquired or now, now)}
        status, answer = self._ask("PUT", f"{self._path}/{self._name}", body)
        if status != 200:
            raise Refused
        self._object = answer

    def _spec(self, election: Election, acquired: str | None, renewed: str | None) -> Object:
        return {
            "holderIdentity": election.holder,
            "leaseDurationSeconds": election.seconds,
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": election.transitions,
        }

    def _ask(self, method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        if self.cut_off:
            raise Refused
        return self._api.ask(method, path, body)


def time_of(seconds: float) -> str:
    """A time as Lease objects have it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def whole(text: str | None) -> int | None:
    """A time of a Lease object in whole seconds since 1970."""
    return None if text is None else int(datetime.fromisoformat(text).timestamp())
