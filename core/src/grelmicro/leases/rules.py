"""What an operation does to a record, as pure functions: for stores that read, decide here and write in one step."""

from collections.abc import Mapping
from dataclasses import replace

from grelmicro.leases.lease import NO_DATA, Lease


def taken(
    record: Lease | None,
    name: str,
    holder: str,
    ttl: float,
    data: Mapping[str, str] | None,
    now: float,
    wall: float,
    first_fence: int,
) -> Lease | None:
    """The record after `holder` took or extended it; None when another holds it.

    `now` is the store's clock, `wall` its time since 1970. `first_fence` is the lowest fence that may be given: the
    start for a new name.
    """
    if record is None or not record.holder:
        return granted(record, name, holder, ttl, data, now, wall, first_fence)
    if record.expires_at < now:
        lease = granted(record, name, holder, ttl, data, now, wall, first_fence)
        lease.transitions -= record.holder == holder
        return lease
    if record.holder != holder:
        return None
    kept = record.data if data is None else dict(data)
    return Lease(name, holder, record.fence, record.transitions, record.acquired_at, wall, now + ttl, now, kept)


def granted(
    record: Lease | None,
    name: str,
    holder: str,
    ttl: float,
    data: Mapping[str, str] | None,
    now: float,
    wall: float,
    first_fence: int,
) -> Lease:
    """The record after `holder` took it while it was free or did not exist; see `taken`."""
    if record is None:
        return Lease(name, holder, first_fence, 0, wall, wall, now + ttl, now, dict(data) if data else NO_DATA)
    fence = record.fence + 1
    if fence < first_fence:
        fence = first_fence
    kept = record.data if data is None else dict(data)
    return Lease(name, holder, fence, record.transitions + 1, wall, wall, now + ttl, now, kept)


def renewed(
    record: Lease | None, lease: Lease, ttl: float, data: Mapping[str, str] | None, now: float, wall: float
) -> Lease | None:
    """The record after its holder renewed it; None when it is no longer the holder's."""
    if record is None or not owns(record, lease, now):
        return None
    kept = record.data if data is None else dict(data)
    return Lease(
        record.name, record.holder, record.fence, record.transitions, record.acquired_at, wall, now + ttl, now, kept
    )


def vacated(record: Lease, data: Mapping[str, str] | None, now: float) -> Lease:
    """The record set free in place: fence, transitions and data stay."""
    kept = record.data if data is None else dict(data)
    return Lease(
        record.name, "", record.fence, record.transitions, record.acquired_at, record.renewed_at, 0.0, now, kept
    )


def seen(record: Lease, now: float) -> Lease:
    """The record as an answer given at `now`."""
    return replace(record, now=now)


def owns(record: Lease, lease: Lease, now: float) -> bool:
    """Whether `lease` is this live record: same holder, and the same fence unless it is unknown (0)."""
    return (
        record.holder == lease.holder != ""
        and (lease.fence == record.fence or lease.fence == 0)
        and record.expires_at >= now
    )
