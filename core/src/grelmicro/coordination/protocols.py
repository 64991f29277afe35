"""What the primitives need of a backend. Each is implemented once over any `LeaseStore`, in `adapters`."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from grelmicro.clock import Clock
from grelmicro.coordination.renewal import Renewer
from grelmicro.coordination.wait import Waitable
from grelmicro.leases import InstantLeases, Lease, Scope, Waiter


class Backend(Protocol):
    """What every backend is: something that is opened on an event loop."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it serves; raises `OutOfContextError` when it is not open."""

    @property
    def scope(self) -> Scope:
        """Who can share it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class LeaseBackend(Backend, Protocol):
    """Leases by name, with an undo for what ended unknown.

    `acquire` raises `BackendUnavailableError` when nothing was taken. After any other failure, and after a
    cancellation, it owns the undo: it releases what may have been taken under that holder, which is never used again.
    `release` repeats itself in the background when it ended unknown.
    """

    @property
    def clock(self) -> Clock:
        """The time of deadlines in this process."""

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""

    def settle(self, lease: Lease, seconds: float = 0.0, *, data: Mapping[str, str] | None = None) -> None:
        """In the background, and repeated until it is answered, let it end `seconds` from now; 0.0: release it."""

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """See `LeaseStore.watch`."""


@runtime_checkable
class LockBackend(LeaseBackend, Waitable, Protocol):
    """What `Lock` and `TaskLock` need."""

    def instant(self, running: asyncio.AbstractEventLoop, name: str) -> InstantLeases | None:
        """Its operations as plain calls, if its store never waits; None otherwise. Nothing has to be undone there.

        Args:
            running: the running event loop; it raises `OutOfContextError` when that is not the one it serves.
            name: the lease that is asked for, for the error's text.
        """

    @property
    def renewer(self) -> Renewer:
        """What keeps leases alive."""

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """See `LeaseStore.renew_many`, also for what it raises."""


class HasLockBackend(Protocol):
    """What has a backend for locks, such as a `Coordination`."""

    @property
    def lock_backend(self) -> LockBackend:
        """The backend."""


@runtime_checkable
class LeaderElectionBackend(LeaseBackend, Protocol):
    """What `LeaderElection` needs."""


class HasElectionBackend(Protocol):
    """What has a backend for elections, such as a `Coordination`."""

    @property
    def election_backend(self) -> LeaderElectionBackend:
        """The backend."""


@runtime_checkable
class ScheduleBackend(Backend, Protocol):
    """When a named schedule fired last, shared by every worker."""

    async def claim(self, name: str, due: float) -> bool:
        """Take the fire that is due at `due` (seconds since 1970): True for one caller only, and only once."""

    async def last_fired(self, name: str) -> float | None:
        """The `due` of the last fire taken; None when there was none."""


LockBackendSource = LockBackend | HasLockBackend | str
"""What `backend=` of a lock takes: a backend, a `Coordination`, or the name of one."""

ElectionBackendSource = LeaderElectionBackend | HasElectionBackend | str
"""What `backend=` of an election takes: a backend, a `Coordination`, or the name of one."""
