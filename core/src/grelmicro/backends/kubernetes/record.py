"""What a Lease object says, and how a lease is written into one."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from grelmicro.backends.kubernetes.names import prefix_label
from grelmicro.config import check_seconds
from grelmicro.leases.lease import NO_DATA, Lease

Body = dict[str, Any]
"""A Lease object as JSON."""

NAME = "grelmicro.io/name"
"""The annotation with the name that is stored, since the object's own may be changed and shortened."""
DATA = "grelmicro.io/data"
TRANSITIONS = "grelmicro.io/transitions"
FENCE = "grelmicro.io/fence"
"""The annotation with the fence under which `DATA` and `TRANSITIONS` were written."""
OBSERVED = "grelmicro.io/observed"
"""The annotation that tells since when a process has seen the record as it is."""
TOUCHED = "grelmicro.io/touched"
"""The annotation by whose change an object gets a new version."""
WAITING = "grelmicro.io/waiting"
"""The annotation by which a process tells that others go before it again and again: its mark, and the fence then."""
PREFIX = "grelmicro.io/prefix"
MANAGED_BY = "app.kubernetes.io/managed-by"

MOST = 2**31 - 1
"""What `leaseTransitions` and `leaseDurationSeconds` can hold."""

UNTOLD = 60
"""Seconds for which a lease is taken to last whose holder did not say."""

REMEMBERED = 16
"""Fences after which a process that told that it waits is taken to wait no more."""

NONSENSE = 10 * 365 * 86400.0
"""Seconds by which a `renewTime` is ahead of the clock that no renewal wrote."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True, eq=False)
class Record:
    """What a Lease object says."""

    body: Body
    version: str
    """The resourceVersion."""
    name: str | None
    """The name that is stored; None in an object that another program made."""
    holder: str
    duration: int
    """Seconds; 0 where the object does not say it."""
    fence: int
    identity: tuple[object, ...]
    """What a renewal, and each change of holder, changes; the rest of the object may change at any time."""

    @property
    def annotations(self) -> Mapping[str, str]:
        """The object's annotations."""
        return self.body["metadata"].get("annotations") or {}

    @property
    def labels(self) -> Mapping[str, str]:
        """The object's labels."""
        return self.body["metadata"].get("labels") or {}

    @property
    def last_fence(self) -> int | None:
        """The fence under which this package wrote last; None if it never did."""
        fence = _number(self.annotations.get(FENCE))
        return None if fence is None or fence > MOST else fence

    @property
    def waiter(self) -> str:
        """The mark of a process before which others went again and again; empty if none told."""
        mark, _, fence = self.annotations.get(WAITING, "").partition(" ")
        told_at = _number(fence)
        return mark if told_at is not None and 0 <= self.fence - told_at <= REMEMBERED else ""

    @property
    def renewed_at(self) -> float:
        """Its `renewTime` in seconds since 1970; 0.0 where there is none."""
        return _seconds((self.body.get("spec") or {}).get("renewTime"))

    @property
    def digest(self) -> str:
        """A short text for `identity`."""
        return sha256(json.dumps(self.identity).encode()).hexdigest()[:32]

    def as_lease(self, name: str, seen_at: float, now: float) -> Lease:
        """The record at `now` as `name`, if it has been as it is since `seen_at`."""
        spec = self.body.get("spec") or {}
        return Lease(
            name,
            self.holder,
            self.fence,
            self._transitions(),
            _seconds(spec.get("acquireTime")),
            self.renewed_at,
            seen_at + self.duration if self.holder else 0.0,
            now,
            self._data(),
        )

    def _transitions(self) -> int:
        """How often the holder changed: another program counts in `leaseTransitions` only."""
        counted, last = _number(self.annotations.get(TRANSITIONS)), self.last_fence
        if counted is None or last is None or last > self.fence:
            return self.fence
        return counted + self.fence - last

    def _data(self) -> Mapping[str, str]:
        """The data, unless another program has had the lease since it was written."""
        text = self.annotations.get(DATA)
        if text is None or self.last_fence != self.fence:
            return NO_DATA
        try:
            data = json.loads(text)
        except ValueError:
            return NO_DATA
        if isinstance(data, dict) and all(isinstance(value, str) for value in data.values()):
            return data
        return NO_DATA


def record_of(body: Body) -> Record:
    """What an object says. Which fields were set by whom is left out of it: a write that leaves it out changes none."""
    body = {**body, "apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}  # an object of a list has neither
    metadata = body["metadata"]
    metadata.pop("managedFields", None)
    spec = body.get("spec") or {}
    holder, duration, fence = (
        spec.get("holderIdentity") or "",
        spec.get("leaseDurationSeconds") or UNTOLD,
        spec.get("leaseTransitions") or 0,
    )
    identity = (holder, spec.get("acquireTime"), spec.get("renewTime"), fence, duration)
    name = (metadata.get("annotations") or {}).get(NAME)
    return Record(body, metadata["resourceVersion"], name, holder, duration, fence, identity)


def labels(prefix: str) -> dict[str, str]:
    """The labels of the objects of a store."""
    return {MANAGED_BY: "grelmicro", PREFIX: prefix_label(prefix)}


def selector(prefix: str) -> str:
    """The label selector that finds the objects of a store; an object of another program has another manager."""
    return f"{PREFIX}={prefix_label(prefix)}"


def whole_seconds(ttl: float) -> int:
    """`ttl` rounded up to what a Lease object can hold.

    Raises:
        SettingsValidationError: it is no duration.
    """
    return math.ceil(round(check_seconds("ttl", ttl), 6)) or 1


def next_renewal(last: float, wall: float) -> float:
    """When a record that was renewed at `last` is renewed at `wall`, in seconds since 1970.

    It never comes back to a time that it had: a record that looks as it did is taken to have been so ever since. And it
    is another whole second each time, since electors of client-go compare those. So it runs ahead of the clock where
    somebody renews more than once a second, or where the clock was set back.
    """
    soonest = math.floor(last) + 1.0
    return soonest if wall < soonest < wall + NONSENSE else wall


def written(lease: Lease, object_name: str, prefix: str, seconds: int, base: Record | None, mark: str = "") -> Body:
    """The object with `lease` in it.

    Args:
        lease: what it shall say; a free one has no holder.
        object_name: the name of the object.
        prefix: of the store.
        seconds: the duration.
        base: the object as it is, of which all that is not ours stays; None: there is none.
        mark: of this process, which does not wait any more.
    """
    annotations = dict(base.annotations) if base else {}
    for gone in (OBSERVED, TOUCHED, DATA):
        annotations.pop(gone, None)
    if base is not None and base.waiter in ("", mark):
        annotations.pop(WAITING, None)
    annotations |= {NAME: lease.name, FENCE: str(lease.fence), TRANSITIONS: str(lease.transitions)}
    if lease.data:
        annotations[DATA] = json.dumps(dict(lease.data))
    renewed_at = lease.renewed_at
    if base is not None and lease.holder and base.fence == lease.fence:
        renewed_at = next_renewal(base.renewed_at, renewed_at)
    spec: Body = {
        "holderIdentity": lease.holder,
        # client-go gives a lease that it releases one second, for candidates that look at nothing else.
        "leaseDurationSeconds": seconds if lease.holder else 1,
        "leaseTransitions": lease.fence,
        "acquireTime": _time(lease.acquired_at) if lease.holder else None,
        "renewTime": _time(renewed_at) if lease.holder else None,
    }
    if base is None:
        metadata: Body = {"name": object_name, "labels": labels(prefix), "annotations": annotations}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
    metadata = {**base.body["metadata"], "annotations": annotations}
    metadata["labels"] = {**labels(prefix), **base.labels, PREFIX: prefix_label(prefix)}
    return {**base.body, "metadata": metadata, "spec": {**(base.body.get("spec") or {}), **spec}}


def annotated(base: Record, annotation: str, value: str) -> Body:
    """The object with one annotation changed, and nothing else."""
    metadata = {**base.body["metadata"], "annotations": {**base.annotations, annotation: value}}
    return {**base.body, "metadata": metadata}


def _time(seconds: float) -> str:
    """A time as Lease objects have it: with six digits after the point, and `Z`."""
    time = _EPOCH + timedelta(microseconds=round(seconds * 1e6))
    return f"{time:%Y-%m-%dT%H:%M:%S.%f}Z"


def _seconds(text: str | None) -> float:
    """Seconds since 1970; 0.0 where there is no time."""
    try:
        return (datetime.fromisoformat(text or "") - _EPOCH) / timedelta(seconds=1)
    except (ValueError, TypeError):
        return 0.0


def _number(text: str | None) -> int | None:
    """A number of an annotation; None where there is none."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    return int(text)
