"""`Coordination`: which backend serves which primitive of an app."""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from inspect import isclass
from pkgutil import resolve_name
from typing import Any, Literal, Self, TypeVar, cast, get_args

from grelmicro.config import Duration, check_name, check_namespace, worker_of_environment
from grelmicro.context import bound
from grelmicro.coordination.adapters import LeaseAdapter
from grelmicro.coordination.breaking import break_lease
from grelmicro.coordination.holders import LeaseHolder, holder_of
from grelmicro.coordination.leaderelection import LeaderElection
from grelmicro.coordination.lock import Lock
from grelmicro.coordination.opening import Opening, store_wait
from grelmicro.coordination.process import ProcessRecord
from grelmicro.coordination.protocols import (
    Backend,
    LeaderElectionBackend,
    LeaseBackend,
    LockBackend,
    ScheduleBackend,
)
from grelmicro.coordination.provider import Provider, check
from grelmicro.coordination.tasklock import TaskLock
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.leases import LeaseStore, Scope
from grelmicro.lifecycle import Resource
from grelmicro.urls import known_scheme

logger = logging.getLogger("grelmicro.coordination")

PROVIDERS: Mapping[str, str] = {
    "memory": "grelmicro.providers.memory:MemoryProvider",
    "sqlite": "grelmicro.providers.sqlite:SQLiteProvider",
    "postgresql": "grelmicro.providers.postgres:PostgresProvider",
    "postgres": "grelmicro.providers.postgres:PostgresProvider",
    "redis": "grelmicro.providers.redis:RedisProvider",
    "rediss": "grelmicro.providers.redis:RedisProvider",
    "valkey": "grelmicro.providers.redis:RedisProvider",
    "valkeys": "grelmicro.providers.redis:RedisProvider",
    "unix": "grelmicro.providers.redis:RedisProvider",
    "kubernetes": "grelmicro.providers.kubernetes:KubernetesProvider",
}
"""The provider of each URL scheme, imported only when it is asked for: client libraries are optional."""

SEPARATED_BY: Mapping[str, str] = {"kubernetes": "prefix"}
"""What separates applications in a scheme where `namespace` is something else."""

DEPLOYED = ("staging", "production")
"""Environments in which a store of one process is a likely mistake."""

SLOTS = ("lock", "election", "schedule")

SCOPES: tuple[Scope, ...] = ("process", "host", "cluster")

LeaseKind = Literal["lock", "tasklock", "leader"]
"""What a name is that of: a `Lock`, a `TaskLock` or a `LeaderElection`."""

B = TypeVar("B", bound=Backend)


class Coordination(Resource):
    """The backends of an app's locks, elections and schedules.

    Every argument takes a provider, a store, a backend, or a class of one that needs no argument.

    Args:
        source: serves everything that is not given on its own.
        lock: serves `Lock` and `TaskLock`.
        election: serves `LeaderElection`.
        schedule: serves schedules.
        name: distinguishes several of one app: `Lock("cart", backend="analytics")` uses the one of that name, and what
            names none uses `default`.
        requires: the least scope that every backend must have: `process`, `host` or `cluster`.
        wait: seconds for which opening tries again while a store is not there yet; by default what the variable
            GREL_STORE_WAIT says, or 0. What trying again does not mend, such as a password that is not accepted, is
            raised at once.

    Raises:
        SettingsValidationError: an argument cannot serve what it is given for, or its scope is too small.
    """

    kind = "coordination"

    def __init__(
        self,
        source: object = None,
        *,
        lock: object = None,
        election: object = None,
        schedule: object = None,
        name: str = "default",
        requires: Scope | None = None,
        wait: Duration | None = None,
    ) -> None:
        self.name = check_name("Coordination", name)
        source = _instance(source)
        if isinstance(source, LeaseStore):
            source = Provider(source)
        if source is not None and not isinstance(source, Provider):
            raise SettingsValidationError(
                f"Coordination takes a provider or a store first, not {type(source).__name__}: "
                "give a single backend as lock=, election= or schedule="
            )
        self._lock = _slot("lock", lock, source, LockBackend, lambda provider: provider.lock())
        self._election = _slot(
            "election", election, source, LeaderElectionBackend, lambda provider: provider.leaderelection()
        )
        self._schedule = _slot("schedule", schedule, source, ScheduleBackend, lambda provider: provider.schedule())
        self._opened = AsyncExitStack()
        self._wait = store_wait(wait)
        self._check_scope(requires)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        namespace: str | None = None,
        name: str = "default",
        requires: Scope | None = None,
        wait: Duration | None = None,
    ) -> Self:
        """Everything on one store.

        Args:
            url: the store's address: `memory://`, `sqlite:///locks.db` (relative), `sqlite:////var/lib/locks.db`,
                `redis://cache:6379/0`, `rediss://...`, `unix:///run/redis.sock`, `valkey://cache:6379/0`,
                `postgresql://db/shop` or `kubernetes://namespace`. A driver that SQLAlchemy needs, such as in
                `postgresql+psycopg://` or `sqlite+aiosqlite://`, may stay in it.
            namespace: separates applications that share a store; `grelmicro` by default. In a Kubernetes namespace,
                which the URL names, it is the prefix of their Leases.
            name: distinguishes several of one app; see `Coordination`.
            requires: the least scope that the store must have.
            wait: seconds for which opening tries again while the store is not there yet; see `Coordination`.

        Raises:
            SettingsValidationError: the URL or one of its options is not known.
            DependencyNotFoundError: the store's client library is not installed.
        """
        scheme = known_scheme("Coordination.from_url", url, PROVIDERS)
        option = SEPARATED_BY.get(scheme, "namespace")
        options = {} if namespace is None else {option: check_namespace(namespace)}
        provider: Provider = resolve_name(PROVIDERS[scheme]).from_url(url, **options)
        return cls(provider, name=name, requires=requires, wait=wait)

    @classmethod
    def serving(cls, uses: Iterable[object]) -> Self | None:
        """The one that bare providers and backends among `uses` make together; None when there are none.

        A provider serves every slot that no backend among them is for.

        Raises:
            SettingsValidationError: two of them would serve one slot.
        """
        slots: dict[str, object] = {}
        providers = [item for item in uses if isinstance(item, Provider)]
        for item in uses:
            if (slot := None if isinstance(item, Provider) else _slot_of(item)) is not None:
                if slot in slots:
                    raise _both_serve(slot, slots[slot], item)
                slots[slot] = item
        if len(providers) > 1 and len(slots) < len(SLOTS):
            raise _both_serve(next(slot for slot in SLOTS if slot not in slots), *providers[:2])
        if not providers and not slots:
            return None
        source = providers[0] if providers else None
        return cls(source, lock=slots.get("lock"), election=slots.get("election"), schedule=slots.get("schedule"))

    @staticmethod
    def is_source(item: object) -> bool:
        """Whether `item` is a provider or a backend, which serves without being given to a `Coordination`."""
        return isinstance(item, Provider) or _slot_of(item) is not None

    @property
    def lock_backend(self) -> LockBackend:
        """What serves `Lock` and `TaskLock`; raises `OutOfContextError` when nothing does."""
        return _filled(self._lock, "lock")

    @property
    def election_backend(self) -> LeaderElectionBackend:
        """What serves `LeaderElection`; raises `OutOfContextError` when nothing does."""
        return _filled(self._election, "election")

    @property
    def schedule_backend(self) -> ScheduleBackend:
        """What serves schedules; raises `OutOfContextError` when nothing does."""
        return _filled(self._schedule, "schedule")

    def lock(self, name: str, **settings: Any) -> Lock:
        """A `Lock` on this backend; `settings` are those of `Lock`."""
        return Lock(name, backend=self.lock_backend, **settings)

    def tasklock(self, name: str = "default", **settings: Any) -> TaskLock:
        """A `TaskLock` on this backend; `settings` are those of `TaskLock`."""
        return TaskLock(name, backend=self.lock_backend, **settings)

    def leaderelection(self, name: str, **settings: Any) -> LeaderElection:
        """A `LeaderElection` on this backend; `settings` are those of `LeaderElection`."""
        return LeaderElection(name, backend=self.election_backend, **settings)

    async def holder_of(self, name: str, *, kind: LeaseKind = "lock") -> LeaseHolder | None:
        """The holder of a lock, a task lock or a role, with its process; None if it is free.

        Args:
            name: that of the `Lock`, the `TaskLock` or the `LeaderElection`.
            kind: which of them: `lock`, `tasklock` or `leader`.

        Raises:
            CoordinationBackendError: the store failed.
            OutOfContextError: it is not open.
            SettingsValidationError: the name or the kind is none.
        """
        backend = self._backend_of(kind)
        return await holder_of(backend, f"{kind}:{check_name('holder_of()', name)}")

    async def break_lock(
        self, name: str, if_fence: int | None = None, *, kind: LeaseKind = "lock"
    ) -> LeaseHolder | None:
        """Take a lock, a task lock or a role away from its holder, and wake the waiters.

        For operators, where a holder hangs and goes on to renew. The holder learns of it by its next renewal, at once
        if it is in this process and renewed: its block ends in `LockLostError`, or its term. Until then it works on,
        under a fence that every later holder's is above.

        Args:
            name: that of the `Lock`, the `TaskLock` or the `LeaderElection`.
            if_fence: break it only under this fencing token, as `holder_of` returned it; None: under any.
            kind: which of them: `lock`, `tasklock` or `leader`.

        Returns:
            The holder from which it was taken; None if it was free, was given back meanwhile, or has another fence.

        Raises:
            BackendUnavailableError: the store failed.
            OutcomeUnknownError: the store did not answer; it is repeated in the background until the lease ends.
            OutOfContextError: it is not open.
            SettingsValidationError: the name, the fence or the kind is none.
        """
        backend = self._backend_of(kind)
        stored = f"{kind}:{check_name('break_lock()', name)}"
        if if_fence is not None and (not isinstance(if_fence, int) or isinstance(if_fence, bool)):
            raise SettingsValidationError(
                f"break_lock(): if_fence should be a fencing token, not {type(if_fence).__name__}: "
                "give the fence that holder_of() returned, or leave it out"
            )
        broken = await break_lease(backend, stored, if_fence, getattr(backend, "worker", "") or "an operator")
        if broken is not None and isinstance(backend, LockBackend):
            backend.renewer.renew_now(stored)
        return broken

    def _backend_of(self, kind: LeaseKind) -> LeaseBackend:
        """What keeps the leases of a kind."""
        if kind not in get_args(LeaseKind):
            raise SettingsValidationError(f"kind should be one of {', '.join(get_args(LeaseKind))}")
        return self.election_backend if kind == "leader" else self.lock_backend

    async def check(self) -> None:
        """Take a lease at each store and give it back, while it is open; for health probes.

        A schedule backend of your own, which has no leases, is not asked.

        Raises:
            CoordinationBackendError: a store does not answer, or takes no writes.
        """
        for backend in self.checked():
            await check(backend)

    def checked(self) -> list[LeaseBackend]:
        """The backends that `check` asks: one for each store."""
        stores = {id(getattr(backend, "store", backend)): backend for backend in self.backends}
        return [backend for backend in stores.values() if isinstance(backend, (LockBackend, LeaderElectionBackend))]

    async def open(self) -> None:
        """Open every backend; when one fails, those opened before are closed again.

        While a store is not there, it is tried again for as long as `wait` says, and two lines in the log tell of it.

        Raises:
            SettingsValidationError: a setting of a store breaks a rule.
            CoordinationBackendError: a store is not there, or refuses.
        """
        self._warn_if_alone()
        worker = self._worker()
        async with AsyncExitStack() as stack:
            opening = Opening(stack, self._wait)
            for backend in self.backends:
                if isinstance(backend, LeaseAdapter):
                    backend.worker = worker
                await opening.open(backend, _title(backend))
            for store in self._stores():
                stack.push_async_callback(ProcessRecord(store, worker).close)
            self._opened = stack.pop_all()

    def _stores(self) -> list[LeaseStore]:
        """Its stores in which other processes may look for this one."""
        stores = {id(backend.store): backend.store for backend in self.backends if isinstance(backend, LeaseAdapter)}
        return [store for store in stores.values() if store.scope != "process"]

    def _worker(self) -> str:
        """The readable name of this process: that of the app, if one opens this."""
        app = bound.get()
        return worker_of_environment() if app is None else app.worker

    async def close(self) -> None:
        """Close them in reverse order."""
        await self._opened.aclose()

    @property
    def backends(self) -> list[Backend]:
        """What serves its slots; one may serve several."""
        slots: list[Backend | None] = [self._lock, self._election, self._schedule]
        return [backend for backend in slots if backend is not None]

    def _check_scope(self, requires: Scope | None) -> None:
        if requires is None:
            return
        if requires not in SCOPES:
            raise SettingsValidationError(f"Coordination requires should be one of {', '.join(SCOPES)}")
        for backend in self.backends:
            if SCOPES.index(backend.scope) < SCOPES.index(requires):
                raise SettingsValidationError(
                    f"Coordination requires={requires!r}, but {_title(backend)} coordinates within one "
                    f"{backend.scope} only: use a store that every worker can reach"
                )

    def _warn_if_alone(self) -> None:
        """A store of one process coordinates nobody where several processes run."""
        app = bound.get()
        several = _several_workers()
        environment = "" if app is None else app.environment
        if environment in DEPLOYED or several:
            alone = {_title(backend) for backend in self.backends if backend.scope == "process"}
            for title in sorted(alone):
                logger.warning(
                    "%s coordinates within this process only, but %s: workers will not exclude each other; "
                    "use Coordination.from_url('sqlite:///locks.db') on one host",
                    title,
                    "several worker processes run" if several else f"this is {environment}",
                )


def _slot_of(item: object) -> str | None:
    """The one slot that a backend is for; None where it is no backend."""
    if isinstance(item, LockBackend):
        return "lock"
    if isinstance(item, ScheduleBackend):
        return "schedule"
    return "election" if isinstance(item, LeaderElectionBackend) else None


def _both_serve(slot: str, one: object, other: object) -> SettingsValidationError:
    return SettingsValidationError(
        f"Grelmicro uses: {type(one).__name__} and {type(other).__name__} would both serve the slot {slot}: give the "
        f"app a Coordination({slot}=...) that says which, or several with name="
    )


def _instance(given: object) -> object:
    return given() if isclass(given) else given


def _slot(
    slot: str, given: object, source: Provider | None, protocol: type, of_provider: Callable[[Provider], B]
) -> B | None:
    """The backend of one slot."""
    given = _instance(given)
    if given is None:
        given = source
    if isinstance(given, LeaseStore):
        given = Provider(given)
    if isinstance(given, Provider):
        given = of_provider(given)
    if given is None:
        return None
    if not isinstance(given, protocol):
        raise SettingsValidationError(
            f"Coordination {slot}= takes a provider, a store or a {protocol.__name__}, not {type(given).__name__}"
        )
    return cast(B, given)


def _filled(backend: B | None, slot: str) -> B:
    if backend is None:
        raise OutOfContextError(
            f"this Coordination has no {slot} backend: give it one with Coordination({slot}=...), "
            "or a provider that serves everything with Coordination(provider)"
        )
    return backend


def _title(backend: Backend) -> str:
    """What a backend's user knows it by."""
    return type(getattr(backend, "store", backend)).__name__


def _several_workers() -> bool:
    """Whether this looks like one of several worker processes: a server's child, or the usual variable says so."""
    count = os.environ.get("WEB_CONCURRENCY", "")
    return multiprocessing.parent_process() is not None or (count.isdigit() and int(count) > 1)
