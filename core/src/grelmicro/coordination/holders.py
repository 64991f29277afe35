"""The holder of a lease, for operators: the worker, and its process."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from grelmicro.coordination.process import process_name
from grelmicro.coordination.protocols import LeaseBackend
from grelmicro.leases import Lease
from grelmicro.leases.identity import describe_process, process_id


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """The holder of a lock, a task lock or a role. It contains no secret, so it can be shown and logged."""

    worker: str
    """The readable name of the worker; `""` if it is unknown."""
    process: str
    """The id of the process: all leases that it holds have the same one. `""` if it is unknown."""
    fence: int
    """The fencing token of this holder."""
    since: datetime
    """When it was acquired, by the store's clock."""
    renewed_at: datetime
    """When it was last renewed, by the store's clock."""
    until: datetime
    """When it ends unless it is renewed, by this host's clock."""
    host: str | None = None
    """The name of the process's host, or of its pod; None if the process is not known to the store, as below."""
    pid: int | None = None
    """The process's number on its host."""
    application: str | None = None
    """The program that the process runs."""
    started_at: datetime | None = None
    """When the process began, by its host's clock."""
    seen_at: datetime | None = None
    """When the process was last heard of, by the store's clock; a process that runs is heard of every five minutes."""


async def holder_of(backend: LeaseBackend, name: str) -> LeaseHolder | None:
    """The holder of the lease of a stored name; None if it is free.

    Raises:
        CoordinationBackendError: the store failed.
    """
    lease = await backend.read(name)
    return await describe(backend, lease) if lease is not None and lease.live else None


async def describe(backend: LeaseBackend, lease: Lease) -> LeaseHolder:
    """The holder of `lease`, which was read from `backend`.

    Raises:
        CoordinationBackendError: the store failed.
    """
    facts: Mapping[str, str] = {}
    seen_at: float | None = None
    now = backend.clock.wall()
    if lease.process == process_id():
        facts, seen_at = describe_process(), now
    elif lease.process and (record := await backend.read(process_name(lease.process))) is not None:
        facts, seen_at = record.data, record.renewed_at
    pid, started = facts.get("pid"), facts.get("started")
    return LeaseHolder(
        worker=lease.worker,
        process=lease.process,
        fence=lease.fence,
        since=_time(lease.acquired_at),
        renewed_at=_time(lease.renewed_at),
        until=_time(now) + timedelta(seconds=lease.remaining),
        host=facts.get("host"),
        pid=None if pid is None else int(pid),
        application=facts.get("application"),
        started_at=None if started is None else _time(float(started)),
        seen_at=None if seen_at is None else _time(seen_at),
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
