"""Leases in the memory of one process: for tests, and for applications of one process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from grelmicro.clock import Clock, Signal
from grelmicro.config import check_seconds
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter, Provider, ScheduleAdapter
from grelmicro.errors import SettingsValidationError
from grelmicro.leases.lease import Lease, LeaseStore, SignalWaiter, Waiter
from grelmicro.leases.retention import RETENTION, droppable
from grelmicro.leases.rules import owns, renewed, seen, taken, vacated

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
        self._free: dict[str, None] = {}  # names of free locks, the longest free first
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
        now = self.clock.now()
        record = self._records.get(name)
        lease = taken(record, name, holder, ttl, data, now, self.clock.wall(), self._first_fence)
        if lease is None:
            assert record is not None
            return seen(record, now)
        self._records[name] = lease
        if record is not None:
            self._free.pop(name, None)
        return lease

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        record = self._records.get(lease.name)
        renewal = renewed(record, lease, ttl, data, self.clock.now(), self.clock.wall())
        if record is None or renewal is None:
            return None
        self._records[lease.name] = renewal
        if renewal.expires_at < record.expires_at:
            self._hint(lease.name)
        return renewal

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        return self.release_now(lease, data)

    def release_now(self, lease: Lease, data: Mapping[str, str] | None = None) -> bool:
        """`release` as a plain call: nothing here waits."""
        now = self.clock.now()
        record = self._records.get(lease.name)
        if record is None or not owns(record, lease, now):
            return False
        self._vacate(record, data, now)
        self._hint(lease.name)
        return True

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        record = self._records.get(name)
        return None if record is None else seen(record, self.clock.now())

    async def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        for name in sorted(name for name in self._records if name.startswith(prefix)):
            if (record := self._records.get(name)) is not None:
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
        for record in list(self._records.values()):
            if record.holder and record.expires_at < now:
                self._vacate(record, None, now)

    def abandon(self) -> None:
        """Forget the waiters of a loop that is gone."""
        self._watched.clear()

    def _vacate(self, record: Lease, data: Mapping[str, str] | None, now: float) -> None:
        self._records[record.name] = free = vacated(record, data, now)
        if droppable(free):
            self._free[record.name] = None
            if len(self._free) > self._capacity or now >= self._look_at:
                self._drop(now)

    def _drop(self, now: float) -> None:
        """Drop the longest free records, and never give their fences again."""
        self._look_at = now + LOOK_INTERVAL
        while self._free:
            name = next(iter(self._free))
            record = self._records[name]
            if len(self._free) <= self._capacity and record.now >= now - self._retention:
                return
            self._first_fence = max(self._first_fence, record.fence + 1)
            del self._free[name], self._records[name]

    def _hint(self, name: str) -> None:
        if (signal := self._watched.get(name)) is not None:
            signal.send()


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


class MemoryLockAdapter(LockAdapter):
    """Locks in a memory store of their own."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(MemoryStore(clock=clock))


class MemoryLeaderElectionAdapter(LeaderElectionAdapter):
    """Elections in a memory store of their own."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(MemoryStore(clock=clock))


class MemoryScheduleAdapter(ScheduleAdapter):
    """Schedules in a memory store of their own."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        super().__init__(MemoryStore(clock=clock))
