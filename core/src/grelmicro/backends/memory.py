"""Leases in the memory of one process: for tests, and for applications of one process."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

from grelmicro.clock import Clock, Signal
from grelmicro.config import Duration, check_seconds
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider, shared_store
from grelmicro.errors import SettingsValidationError
from grelmicro.leases.lease import Lease, LeaseStore, SignalWaiter, Waiter
from grelmicro.leases.retention import RETENTION, droppable
from grelmicro.leases.rules import granted, owns, renewed, seen, taken, vacated

LOOK_INTERVAL = 60.0
"""Seconds between two looks for records that are past their retention, while leases are taken."""

LOOKS, MORE_LOOKS = 2, 500
"""Leases that are looked at for whether they ended by themselves: at each new name, and once in `LOOK_INTERVAL`.

Since two are looked at when one is added, those that have ended and were not seen are hardly more than those that live.
"""


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
        retention: Duration = RETENTION,
        capacity: int = 10_000,
    ) -> None:
        super().__init__(namespace=namespace, clock=clock)
        self._retention = check_seconds("retention", retention)
        self._capacity = capacity
        self._records: dict[str, Lease] = {}
        # The first name of these two is found at once, however many were removed before, unlike that of a dict.
        # Granted, and not yet seen to be free: looks go round them, since a lease may end by itself.
        self._granted: OrderedDict[str, None] = OrderedDict()
        # Free, and since when, the longest free first. Released records are vacated when they are read, not before.
        self._free: OrderedDict[str, float] = OrderedDict()
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
        freed_at = self._free.pop(name, None)
        if record is not None and freed_at is not None and _was_released(record, freed_at):
            lease: Lease | None = granted(record, name, holder, ttl, data, now, wall, self._first_fence)
        else:
            lease = taken(record, name, holder, ttl, data, now, wall, self._first_fence)
        if lease is None:
            assert record is not None
            return seen(record, now)
        self._records[name] = lease
        self._granted[name] = None
        if record is None or now >= self._look_at:
            self._tidy(now)
        return lease

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
        if len(self._free) > self._capacity:
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
                self._records[name] = vacated(record, None, now)
                self._free.setdefault(name, now)

    def abandon(self) -> None:
        """Forget the waiters of a loop that is gone."""
        self._watched.clear()

    def _record(self, name: str) -> Lease | None:
        """The record as it stands."""
        record, freed_at = self._records.get(name), self._free.get(name)
        if record is None or freed_at is None or not _was_released(record, freed_at):
            return record
        return vacated(record, None, freed_at)

    def _tidy(self, now: float) -> None:
        """Look at some of the leases, and drop what is free for too long or too much."""
        looks = LOOKS
        if now >= self._look_at:
            looks, self._look_at = MORE_LOOKS, now + LOOK_INTERVAL
        for _ in range(min(looks, len(self._granted))):
            name = next(iter(self._granted))
            if self._records[name].expires_at < now:
                self._free.setdefault(name, now)
            if name in self._free:
                del self._granted[name]
            else:
                self._granted.move_to_end(name)
        self._drop(now)

    def _drop(self, now: float) -> None:
        """Drop the longest free records of locks, and never give their fences again."""
        while self._free:
            name, freed_at = next(iter(self._free.items()))
            if len(self._free) <= self._capacity and freed_at >= now - self._retention:
                return
            record = self._records[name]
            if droppable(vacated(record, None, now)):
                self._first_fence = max(self._first_fence, record.fence + 1)
                self._granted.pop(name, None)
                del self._free[name], self._records[name]
            else:  # it stays for good, and need not be looked at again
                if _was_released(record, freed_at):
                    self._records[name] = vacated(record, None, freed_at)
                del self._free[name]


def _was_released(record: Lease, freed_at: float) -> bool:
    """Whether a free name was released while it lived, and its record does not say so yet; else it ended by itself."""
    return freed_at <= record.expires_at


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
    """An adapter on a memory store of its own, or on that of a provider.

    Args:
        provider: whose store it shares.
        clock: the time of leases; tests give one that they move.
    """

    def __init__(self, *, provider: MemoryProvider | None = None, clock: Clock | None = None) -> None:
        if provider is None:
            store: LeaseStore = MemoryStore(clock=clock)
        else:
            store = shared_store(provider, MemoryProvider, type(self).__name__, alone=clock is None)
        super().__init__(store)
        self.provider = provider


class MemoryLockAdapter(MemoryAdapter, LockAdapter):
    """Locks in a memory store of their own."""


class MemoryLeaderElectionAdapter(MemoryAdapter, LeaderElectionAdapter):
    """Elections in a memory store of their own."""


class MemoryScheduleAdapter(MemoryAdapter, ScheduleAdapter):
    """Schedules in a memory store of their own."""
