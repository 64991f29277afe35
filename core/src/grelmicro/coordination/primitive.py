"""What locks and task locks share: a name, settings, a backend found when it is needed, and a handle for each owner."""

import logging
import weakref
from asyncio import Task
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from grelmicro.clock import DRIFT, sleep
from grelmicro.config import Reconfigurable, Seconds, WorkerConfig, check_name
from grelmicro.coordination.blocks import Blocks
from grelmicro.coordination.handle import Holdings, LockHandle, ThreadLockHandle
from grelmicro.coordination.identity import Owner, WorkerName, this_task, this_thread
from grelmicro.coordination.protocols import LockBackend, LockBackendSource
from grelmicro.coordination.resolve import BackendSource
from grelmicro.coordination.threads import EnteredByThreads, call
from grelmicro.errors import (
    BackendUnavailableError,
    CoordinationError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    WouldBlockError,
)
from grelmicro.events import emit, listeners
from grelmicro.leases import InstantLeases, Lease
from grelmicro.leases.identity import mint
from grelmicro.lifecycle import BoundToProcess

logger = logging.getLogger("grelmicro.coordination")

SHORTEST_CYCLE = 0.1
"""Seconds between two grants that come too late, at least: a lease that is shorter than the way to the store."""

RENEWED_LEASE_SECONDS = 30.0
"""The lease of a lock that is renewed while a request is served: a worker that was killed blocks it for no longer."""

SWEEP_FROM = 64
"""Owners in one primitive from which on those that ended without a release are looked for."""


class LeaseConfig(WorkerConfig):
    """Settings of something that holds a lease while work runs."""

    lease_duration: Seconds = 60.0
    """Seconds after which it frees itself if its holder is gone."""
    auto_renew: bool = False
    """Whether it is renewed while it is held; then a lost lease cancels the guarded `async with` body."""
    max_hold: Seconds | None = None
    """Seconds after which it is not renewed any more; None: no limit."""

    def renewing(self) -> Self:
        """The same with the defaults of handlers: renewed, and then under a shorter lease.

        A handler does not see to a lease that runs out, and one that is renewed need not be long.
        """
        if "auto_renew" in self.model_fields_set and not self.auto_renew:
            return self
        changed: dict[str, object] = {"auto_renew": True}
        if "lease_duration" not in self.model_fields_set:
            changed["lease_duration"] = max(RENEWED_LEASE_SECONDS, self._shortest_lease())
        return self.model_copy(update=changed)

    def _shortest_lease(self) -> float:
        """Seconds that a lease has to have at least."""
        return 0.0


C = TypeVar("C", bound=LeaseConfig)


class LeasePrimitive(BoundToProcess, Reconfigurable[C], EnteredByThreads[ThreadLockHandle], Generic[C]):
    """A named thing that tasks and threads hold, one at a time over all workers."""

    kind: ClassVar[str]
    """The prefix of its stored names."""

    def __init__(self, name: str, config: C, backend: LockBackendSource | None) -> None:
        title = f"{type(self).__name__} {name!r}"
        self._name = check_name(type(self).__name__, name)
        self._key = f"{self.kind}:{name}"
        self._config = config
        self._worker = WorkerName(config.worker)
        self._task_stem = f"{self._worker.text}:task:"
        self._source: BackendSource[LockBackend] = BackendSource(title, "lock_backend", LockBackend, backend)
        self._held = Holdings()
        self._holdings = weakref.ref(self._held)
        # Those of tasks; those of threads are known to the object that they enter.
        self._blocks: Blocks[LockHandle] = Blocks()

    @property
    def name(self) -> str:
        """The name by which workers share it."""
        return self._name

    @property
    def worker(self) -> str:
        """The readable prefix of its holders."""
        return self._worker.text

    @property
    def backend(self) -> LockBackend:
        """The backend it would use now.

        Raises:
            OutOfContextError: it was given none and no app serves this code.
        """
        return self._source.find()

    @property
    def given_backend(self) -> LockBackend | None:
        """The backend that it was built with, if any."""
        return self._source.given

    def _name_worker(self, backend: LockBackend) -> None:
        """Let the holders of leases of `backend` have the name that its app gives."""
        self._worker.use(backend)
        self._task_stem = f"{self._worker.text}:task:"

    def _token(self, backend: LockBackend, context: str) -> str:
        """A new holder; `context` says whether that is a task or a thread.

        None is used twice, so none can be used to act for another.
        """
        self._name_worker(backend)
        return f"{self._worker.text}:{context}:{mint()}"

    async def locked(self) -> bool:
        """Whether anybody holds it.

        Raises:
            CoordinationBackendError: the store failed.
        """
        return await self._locked(self._source.find())

    async def _locked(self, backend: LockBackend) -> bool:
        record = await backend.read(self._key)
        return record is not None and record.live

    def _refuse_reentry(self, owner: Owner) -> None:
        if (held := self._held.get(owner)) is not None and held.valid:
            raise LockReentrantError(
                f"{type(self).__name__} '{self._name}' is held by this task or thread already: release it first, "
                "or use the handle that it has",
                name=self._name,
            )

    async def _ask(
        self, backend: LockBackend, owner: Owner, token: str, waiting: bool = False
    ) -> tuple[Lease, LockHandle | None]:
        """Ask the store once; its answer, and a handle if it was a grant that is still good."""
        duration = self._duration()
        sent_at = backend.clock.now()
        lease = await backend.acquire(self._key, token, duration, waiting=waiting)
        if not lease.granted_to(token):
            return lease, None
        if self._is_stale(backend, sent_at, duration):
            await backend.release(lease)
            if waiting and duration < SHORTEST_CYCLE:
                await sleep(backend.clock, SHORTEST_CYCLE - duration)
            return replace(lease, expires_at=lease.now), None
        return lease, self._granted(backend, owner, lease, sent_at, duration)

    def _is_stale(self, backend: LockBackend, sent_at: float, duration: float) -> bool:
        """Whether a grant came when its lease had run out, for instance since this process was paused."""
        if backend.clock.now() < sent_at + duration * (1 - DRIFT):
            return False
        logger.warning("%s was granted, but the answer came when the lease had run out", self._key)
        return True

    def _ask_now(self, backend: LockBackend, instant: InstantLeases, owner: Owner, token: str) -> LockHandle | None:
        """`_ask` without waiting, where the store allows that."""
        duration = self._duration()
        lease = instant.acquire_now(self._key, token, duration)
        if lease.holder != token:
            return None
        return self._granted(backend, owner, lease, lease.now, duration)

    def _duration(self) -> float:
        """Seconds to ask for."""
        config = self._config
        if config.max_hold is None:
            return config.lease_duration
        return min(config.lease_duration, config.max_hold)

    def _granted(self, backend: LockBackend, owner: Owner, lease: Lease, sent_at: float, duration: float) -> LockHandle:
        if len(self._held) >= SWEEP_FROM:
            self._sweep()
        handle = LockHandle(self._name, lease, backend, sent_at, duration, owner, self._holdings)
        self._held[owner] = handle
        if self._config.max_hold is not None:
            handle.max_hold = self._config.max_hold
        if self._config.auto_renew:
            handle.renew_automatically()
        else:
            backend.renewer.keep(handle)
        if listeners:
            emit("acquired", self._key)
        return handle

    async def _ask_once(
        self, backend: LockBackend, owner: Owner, token: str, refusal: type[WouldBlockError] = WouldBlockError
    ) -> LockHandle:
        try:
            lease, handle = await self._ask(backend, owner, token)
            if handle is not None:
                return handle
            raise self._refusal(lease, token, refusal)
        except CoordinationError as error:
            self._tell_refusal(error)
            raise

    def _refusal(self, lease: Lease, token: str, refusal: type[WouldBlockError]) -> CoordinationError:
        """Why the answer `lease` is no grant."""
        if lease.holder == token:
            return BackendUnavailableError(
                f"{type(self).__name__} '{self._name}': the store's answer came when the lease had run out: "
                "use a longer lease_duration, and check the store and this machine's load",
                name=self._name,
            )
        busy = refusal(
            f"{type(self).__name__} '{self._name}' is held by another holder, for up to {lease.remaining:.1f} s more: "
            "try again later",
            name=self._name,
        )
        if isinstance(busy, LockTimeoutError):
            busy.timeout = 0.0
        busy.retry_after = lease.remaining
        busy.busy_for = self._busy_for(lease)
        return busy

    def _busy_for(self, lease: Lease) -> float | None:
        """Seconds for which another's lease surely stays held; None where it may be given back at any moment."""
        return None

    def _tell_refusal(self, error: CoordinationError, waited: float | None = None) -> None:
        """Busy and failing are told apart: only a failing store has an error in the detail."""
        emit("refused", self._key, waited, "" if isinstance(error, WouldBlockError) else type(error).__name__)

    def _sweep(self) -> None:
        """Forget what was left held by tasks and threads that ended; their leases end by themselves."""
        for ended in [owner for owner in self._held if owner.done()]:
            del self._held[ended]

    def _hand_over(self, handle: LockHandle, caller: "Task[Any] | None") -> LockHandle:
        """Let the task that asked for it hold it, if another one, such as that of `asyncio.wait_for`, did the work."""
        if caller is not None and caller is not handle.owner:
            handle.move_to(caller)
        return handle

    def _holding(self, owner: Owner | None, action: str) -> LockHandle:
        """The handle of `owner`; None: of the running task."""
        handle = self._held.get(owner or this_task())
        if handle is None:
            raise self._not_held(action)
        return handle

    def _not_held(self, action: str) -> LockNotOwnedError:
        return LockNotOwnedError(
            f"{type(self).__name__} '{self._name}' cannot be {action}: this task or thread does not hold it; "
            "use the handle that acquire() returned to act from elsewhere",
            name=self._name,
        )

    def _enter(self, handle: LockHandle) -> LockHandle:
        """Begin a block of a task."""
        self._blocks.append(handle)
        handle.guard_block()
        handle.interrupt_current_task()
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle = self._left(self._blocks, this_task())
        if handle is not None:
            await handle.leave(error, self._end)
        elif error is None:
            raise self._not_held("released at the end of its block")

    def _left(self, blocks: Blocks[LockHandle], owner: Owner) -> LockHandle | None:
        """What ends with the block that `owner` leaves: its lease, or the one that was acquired inside after that."""
        handle = blocks.leave(owner)
        if handle is None:
            return self._held.get(owner)
        latest = self._held.get(handle.owner, handle)
        return handle if latest in blocks else latest

    async def _end(self, handle: LockHandle) -> None:
        """End the lease of a block."""
        await handle.end()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"


P = TypeVar("P", bound=LeasePrimitive[Any])


class ThreadPrimitive(Generic[P]):
    """A primitive for threads: the event loop that serves its backend carries out each call."""

    def __init__(self, primitive: P) -> None:
        self._lock = primitive
        self._blocks: Blocks[LockHandle] = Blocks()

    def locked(self) -> bool:
        """See `LeasePrimitive.locked`."""
        backend = self._backend()
        return call(backend.get_loop(), self._lock._locked(backend))

    def _enter(self, held: ThreadLockHandle) -> ThreadLockHandle:
        """Begin a block."""
        self._blocks.append(held._handle)
        held._handle.guard_block()
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle = self._lock._left(self._blocks, this_thread())
        if handle is not None:
            handle.from_thread.leave(error, self._lock._end)
        elif error is None:
            raise self._lock._not_held("released at the end of its block")

    def _backend(self) -> LockBackend:
        return self._lock._source.find(any_loop=True)
