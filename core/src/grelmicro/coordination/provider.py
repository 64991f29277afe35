"""What gives all backends of one store."""

from contextlib import AsyncExitStack

from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.opening import PROBE, Opening, store_wait
from grelmicro.coordination.protocols import LeaseBackend
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.leases import LeaseStore
from grelmicro.leases.identity import mint
from grelmicro.lifecycle import Resource

CHECK_LEASE = 5.0
"""Seconds for which a health probe takes its lease, which it gives back at once."""


class Provider(Resource):
    """One store, and the backends that use it. Open it, or let an app or a `Coordination` open it.

    While it is open, its backends are open too. `Coordination` takes what `lock()`, `leaderelection()` and `schedule()`
    return, which a subclass may override.

    Args:
        store: where the leases are.
        url: the store's address without secrets.
    """

    def __init__(self, store: LeaseStore, *, url: str = "") -> None:
        self.store = store
        self.safe_url = url or f"{type(store).__name__}://"
        self._lock = LockAdapter(store)
        self._election = LeaderElectionAdapter(store)
        self._schedule = ScheduleAdapter(store)
        self._opened = AsyncExitStack()

    def lock(self) -> LockAdapter:
        """The backend of locks."""
        return self._lock

    def leaderelection(self) -> LeaderElectionAdapter:
        """The backend of elections."""
        return self._election

    def schedule(self) -> ScheduleAdapter:
        """The backend of schedules."""
        return self._schedule

    def move_to(self, store: LeaseStore) -> None:
        """Have the leases in `store` from now on, with the backends that were given. None of them may be open."""
        self.store = store
        for backend in (self._lock, self._election, self._schedule):
            backend.move_to(store)

    @property
    def client(self) -> object:
        """The client library's own object for whatever else the application does with the server.

        Raises:
            OutOfContextError: there is none.
        """
        raise OutOfContextError(
            f"{type(self).__name__} has no client: its connections are for leases alone; build a client of your own"
        )

    async def check(self) -> None:
        """Take a lease and give it back; for health probes. That another probe has it at that moment is well, too.

        Raises:
            CoordinationBackendError: the store does not answer, or takes no writes.
        """
        async with self.lock() as backend:
            await check(backend)

    async def open(self) -> None:
        """Open the store and its backends; a store that is not there yet is waited for as GREL_STORE_WAIT says."""
        async with AsyncExitStack() as stack:
            await Opening(stack, store_wait(None)).open(self._lock, self.safe_url)
            for opened in (self._election, self._schedule):
                await stack.enter_async_context(opened)
            self._opened = stack.pop_all()

    async def close(self) -> None:
        """Close the backends, then the store."""
        await self._opened.aclose()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.safe_url!r})"


def shared_store(provider: Provider, kind: type[Provider], adapter: str, *, alone: bool) -> LeaseStore:
    """The store of a provider for an adapter of another name.

    Args:
        provider: the argument `provider=` of the adapter.
        kind: what it has to be.
        adapter: the class of the adapter, for the error.
        alone: whether the adapter was given nothing else.

    Raises:
        SettingsValidationError: it is something else, or not the only argument.
    """
    if not isinstance(provider, kind):
        raise SettingsValidationError(
            f"{adapter}: provider should be a {kind.__name__}, not {type(provider).__name__}: give one of them"
        )
    if not alone:
        raise SettingsValidationError(
            f"{adapter}: the provider says where the leases are and how they are kept: leave the other arguments out"
        )
    return provider.store


async def check(backend: LeaseBackend) -> None:
    """`Provider.check` of an open backend."""
    holder = f"check:{mint()}"
    lease = await backend.acquire(PROBE, holder, CHECK_LEASE)
    if lease.granted_to(holder):
        await backend.release(lease)
