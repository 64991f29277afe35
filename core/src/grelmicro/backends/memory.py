"""Leases in the memory of one process: for tests, and for applications of one process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from grelmicro.clock import Clock, Signal
from grelmicro.config import check_seconds
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider
from grelmicro.errors import SettingsValidationError
from grelmicro.leases.lease import Lease, LeaseStore, SignalWaiter, Waiter
from grelmicro.leases.retention import RETENTION, droppable
from grelmicro.leases.rules import granted, owns, renewed, seen, taken, vacated

LOOK_INTERVAL = 60.0
"""Seconds between two looks for records that are past their retention."""


class MemoryStore(LeaseStore):
    """A dict of records. Its operations never wait, so nothing can come between their parts.

    Args:
        namespace: accepted as everywhere; two memory stores share nothing anyway.
        clock: the time of leases; tests give one that they move.
        retention: seconds for which a free lock's record is kept.
        capacity: how many free locks' records are kept at most; the longest free go first.
    """

    scope = "process"
    resolution = 0.0
    ordered = True

    def __init__(
        self,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: float = RETENTION,
        capacity: int = 10_000,
    ) -> None:
        super().__init__(namespace=namespace, clock=clock)
        self._retention = check_seconds("retention", retention)
        self._capacity = capacity
        self._records: dict[str, Lease] = {}
        # Free names and since when, the longest free first. Their record is vacated when it is read, not before.
        self._free: dict[str, float] = {}
        self._first_fence = 1
        self._look_at = 0.0  # when to look for records that are past their retention
        self._watched: dict[str, Signal] = {}

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        return self.acquire_now(name, holder, ttl, data)

    def acquire_now(self, name: str, holder: str, ttl: float, data: Mapping[str, str] | None = None) -> Lease:
        """`acquire` as a plain call: nothing here waits."""
        now, wall = self.clock.now(), self.clock.wall()
        record = self._records.get(name)
        if self._free.pop(name, None) is not None:
            lease: Lease | None = granted(record, name, holder, ttl, data, now, wall, self._first_fence)
        else:
            lease = taken(record, name, holder, ttl, data, now, wall, self._first_fence)
        if lease is not None:
            self._records[name] = lease
            return lease
        assert record is not None
        return seen(record, now)

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        record = self._record(lease.name)
        renewal = renewed(record, lease, ttl, data, self.clock.now(), self.clock.wall())
        if record is None or renewal is None:
            return None
        self._records[lease.name] = renewal
        if renewal.expires_at < record.expires_at and lease.name in self._watched:
            self._watched[lease.name].send()
        return renewal

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        return self.release_now(lease, data)

    def release_now(self, lease: Lease, data: Mapping[str, str] | None = None) -> bool:
        """`release` as a plain call: nothing here waits."""
        name, now = lease.name, self.clock.now()
        record = self._records.get(name)
        if record is None or name in self._free or not owns(record, lease, now):
            return False
        self._free[name] = now
        if data is not None:
            self._records[name] = vacated(record, data, now)
        if len(self._free) > self._capacity or now >= self._look_at:
            self._drop(now)
        if name in self._watched:
            self._watched[name].send()
        return True

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        record = self._record(name)
        return None if record is None else seen(record, self.clock.now())

    async def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        for name in sorted(name for name in self._records if name.startswith(prefix)):
            if (record := self._record(name)) is not None:
                yield seen(record, self.clock.now())

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Waiter]:
        """See `LeaseStore.watch`; a release in this process is a hint at once."""
        signal = self._watched.setdefault(name, Signal())
        waiter = SignalWaiter(signal, self.clock)
        try:
            yield waiter
        finally:
            waiter.close()
            if signal.idle and self._watched.get(name) is signal:
                del self._watched[name]

    async def close(self) -> None:
        """Vacate what expired; the records, and with them the fences, stay."""
        now = self.clock.now()
        for name, record in self._records.items():
            if record.expires_at < now:
                self._free.setdefault(name, now)

    def abandon(self) -> None:
        """Forget the waiters of a loop that is gone."""
        self._watched.clear()

    def _record(self, name: str) -> Lease | None:
        """The record as it stands."""
        record = self._records.get(name)
        if record is None or name not in self._free:
            return record
        return vacated(record, None, self._free[name])

    def _drop(self, now: float) -> None:
        """Drop the longest free records of locks, and never give their fences again."""
        self._look_at = now + LOOK_INTERVAL
        excess = len(self._free) - self._capacity
        for name, freed_at in list(self._free.items()):
            if excess <= 0 and freed_at >= now - self._retention:
                return
            excess -= 1
            record = self._records[name]
            if droppable(vacated(record, None, now)):
                self._first_fence = max(self._first_fence, record.fence + 1)
                del self._free[name], self._records[name]


class MemoryProvider(Provider):
    """One memory store for locks, elections and schedules.

    Args:
        namespace: accepted as everywhere; two providers share nothing anyway.
        clock: the time of leases; tests give one that they move.
    """

    def __init__(self, *, namespace: str = "grelmicro", clock: Clock | None = None) -> None:
        super().__init__(MemoryStore(namespace=namespace, clock=clock), url="memory://")

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "grelmicro") -> Self:
        """The provider that `memory://` names.

        Raises:
            SettingsValidationError: the URL says more than that.
        """
        if url.lower().rstrip("/") != "memory:":
            raise SettingsValidationError("the URL of the memory store is memory:// and has no path or options")
        return cls(namespace=namespace)


class MemoryAdapter(LeaseAdapter):
    """An adapter on a memory store of its own.

    Args:
        clock: the time of leases; tests give one that they move.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(MemoryStore(clock=clock))


class MemoryLockAdapter(MemoryAdapter, LockAdapter):
    """Locks in a memory store of their own."""


class MemoryLeaderElectionAdapter(MemoryAdapter, LeaderElectionAdapter):
    """Elections in a memory store of their own."""


class MemoryScheduleAdapter(MemoryAdapter, ScheduleAdapter):
    """Schedules in a memory store of their own."""
