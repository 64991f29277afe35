"""`Lock`: one holder at a time over all workers."""

import logging
from asyncio import Task, current_task, get_running_loop
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Never, Self
from uuid import UUID

from grelmicro.config import Duration, Interval, Ratio, build, check_config, check_name, check_seconds
from grelmicro.coordination.acquisition import Acquisition
from grelmicro.coordination.blocks import Blocks
from grelmicro.coordination.handle import LockHandle, ThreadLockHandle, held_around
from grelmicro.coordination.identity import NOBODY, Owner, calling_task, this_task, this_thread
from grelmicro.coordination.loophandle import LoopLockHandle
from grelmicro.coordination.loops import call_across
from grelmicro.coordination.passing import Offer
from grelmicro.coordination.primitive import LeaseConfig, LeasePrimitive, ThreadPrimitive
from grelmicro.coordination.protocols import LockBackend, LockBackendSource
from grelmicro.coordination.threads import call
from grelmicro.coordination.wait import Wait
from grelmicro.errors import CoordinationError, LockReentrantError, LockTimeoutError
from grelmicro.events import emit, listeners
from grelmicro.keywords import refuse_keywords
from grelmicro.leases import Lease, Waiter
from grelmicro.leases.identity import mint
from grelmicro.lifecycle import running_loop

logger = logging.getLogger("grelmicro.coordination")


class LockConfig(LeaseConfig):
    """Settings of a `Lock`; each can be set by `GREL_LOCK_{NAME}_{FIELD}` or, for all locks, `GREL_LOCK_{FIELD}`."""

    kind = "LOCK"

    retry_interval: Interval = 0.1
    """Seconds between two tries of a waiter where the store cannot wake it."""
    retry_jitter: Ratio = 0.1
    """The share by which `retry_interval` varies."""


class Lock(LeasePrimitive[LockConfig]):
    """A lock over all workers, not reentrant, that frees itself when its holder is gone.

    Settings left None come from the environment, then from the defaults of `LockConfig`.

    Args:
        name: what is locked: any text of 1 to 255 characters without control characters.
        backend: where: a backend, a `Coordination` or the name of one; None: that of the app which serves the code that
            uses the lock, found at each use.
        worker: readable prefix of the holder; a random one by default.
        lease_duration: seconds after which it frees itself.
        retry_interval: seconds between two tries where the store cannot wake a waiter.
        retry_jitter: the share by which `retry_interval` varies.
        auto_renew: renew it while it is held, and cancel the `async with` body when it is lost.
        max_hold: seconds after which it is not renewed any more.
        env_prefix: prefix of its environment variables, in place of `GREL_LOCK_{NAME}_`.
        env_load: whether the environment is read; None: it is.

    Raises:
        SettingsValidationError: a setting or the name breaks a rule.
    """

    kind = "lock"

    def __init__(
        self,
        name: str,
        *,
        backend: LockBackendSource | None = None,
        worker: str | UUID | None = None,
        lease_duration: Duration | None = None,
        retry_interval: Duration | None = None,
        retry_jitter: float | None = None,
        auto_renew: bool | None = None,
        max_hold: Duration | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
        **unknown: Never,
    ) -> None:
        given = {
            "worker": worker,
            "lease_duration": lease_duration,
            "retry_interval": retry_interval,
            "retry_jitter": retry_jitter,
            "auto_renew": auto_renew,
            "max_hold": max_hold,
        }
        if unknown:
            refuse_keywords("Lock", unknown, ["backend", *given, "env_prefix", "env_load"])
        check_name("Lock", name)
        named = None if env_load is False else name
        config = build(LockConfig, f"Lock {name!r}", given, name=named, prefix=env_prefix)
        super().__init__(name, config, backend)

    @classmethod
    def from_config(cls, name: str, config: LockConfig, *, backend: LockBackendSource | None = None) -> Self:
        """A lock with ready settings: no environment is read, and nothing is checked again.

        Raises:
            SettingsValidationError: `config` is of another class, or the name breaks a rule.
        """
        lock = cls.__new__(cls)
        LeasePrimitive.__init__(lock, name, check_config(config, LockConfig), backend)
        return lock

    # The holder is the task that calls a method, also where another one then awaits what the call returned: as
    # `asyncio.create_task`, `asyncio.shield` and, before Python 3.12, `asyncio.wait_for` have it. The names of the
    # coroutines are those of the methods: a warning about one that was never awaited shows it.

    def acquire(self, *, timeout: Duration | None = None) -> Acquisition[LockHandle]:
        """Take the lock; waits in order with others of this process, and is woken by the release.

        Await it for a handle, or enter it: `async with lock.acquire(timeout=2) as handle`. The calling task is the
        holder, also where another one awaits this for it.

        Args:
            timeout: seconds to wait; None waits as long as it takes, 0 asks once, and the answer comes within the time
                that the store gives itself.

        Raises:
            LockTimeoutError: another holder kept it for `timeout` seconds. It is a `TimeoutError` too.
            LockReentrantError: this task holds this very lock.
            BackendUnavailableError: the store failed.
            OutcomeUnknownError: the store did not answer; what it may have granted is undone in the background.
            OutOfContextError: no backend serves this code.
        """
        return Acquisition(self._take(calling_task(), timeout))

    def acquire_nowait(self) -> Acquisition[LockHandle]:
        """Take the lock if it is free; to be awaited or entered, as `acquire`.

        Raises:
            WouldBlockError: another holder has it.
        """
        return Acquisition(self._take_once(calling_task()))

    def extend(self) -> Coroutine[Any, Any, LockHandle]:
        """Let this task's lease last its whole duration from now; see `LockHandle.extend`."""
        return self._extend(calling_task())

    def release(self) -> Coroutine[Any, Any, None]:
        """Give this task's lease back; see `LockHandle.release`."""
        caller = calling_task()
        held = None if caller is None else self._held.get(caller)
        return self._release(caller) if held is None else held.release()

    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether this task holds it, as the store says.

        Raises:
            CoordinationBackendError: the store failed.
        """
        return self._owned(calling_task())

    @property
    def from_thread(self) -> "ThreadLock":
        """The same lock for threads other than the event loop's: the same names, as plain calls."""
        return ThreadLock(self)

    @property
    def from_loop(self) -> "LoopLock":
        """The same lock for coroutines on another event loop than the one that serves its backend."""
        return LoopLock(self)

    async def __aenter__(self) -> LockHandle:
        return self._enter(await self._take(None, None))

    async def _take(self, caller: "Task[Any] | None", timeout: Duration | None) -> LockHandle:
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, zero=True)
        # Asking a task for its event loop is cheaper than asking which one runs.
        loop = running_loop() if caller is None else caller.get_loop()
        backend = self._source.find()
        owner: Owner | None = current_task(loop)
        if owner is None or (caller is not None and owner is not caller):
            loop = get_running_loop()
            owner = this_task(loop)
        instant = backend.instant(loop, self._key)
        if instant is not None and self._key not in backend.queues.lines:
            # Such a store answers at once, so nobody can come in between: a line would be for nothing.
            if self._held:
                self._refuse_reentry(owner)
            if getattr(backend, "worker", "") is not self._worker.named_by:
                self._name_worker(backend)
            handle = self._ask_now(backend, instant, owner, self._task_stem + mint())
            if handle is not None:
                return handle if caller is owner else self._hand_over(handle, caller)
        return self._hand_over(await self._acquire(backend, owner, "task", timeout), caller)

    _take.__qualname__ = "Lock.acquire"

    async def _take_once(self, caller: "Task[Any] | None") -> LockHandle:
        owner = this_task()
        self._refuse_reentry(owner)
        backend = self._source.find()
        handle = await self._ask_once(backend, owner, self._token(backend, "task"))
        return self._hand_over(handle, caller)

    _take_once.__qualname__ = "Lock.acquire_nowait"

    async def _extend(self, caller: "Task[Any] | None") -> LockHandle:
        return await self._holding(caller, "extended").extend()

    _extend.__qualname__ = "Lock.extend"

    async def _release(self, caller: "Task[Any] | None") -> None:
        await self._holding(caller, "released").release()

    _release.__qualname__ = "Lock.release"

    async def _owned(self, caller: "Task[Any] | None") -> bool:
        return await self._is_held_by(caller or this_task(), self._source.find())

    _owned.__qualname__ = "Lock.owned"

    async def _acquire(self, backend: LockBackend, owner: Owner, context: str, timeout: float | None) -> LockHandle:
        """`acquire` for any owner; `context` says in the token whether that is a task or a thread."""
        self._refuse_reentry(owner)
        if timeout == 0:
            return await self._ask_once(backend, owner, self._token(backend, context), LockTimeoutError)
        started_at = backend.clock.now()
        wait = _LockWait(self, backend, owner, context, forever=timeout is None)
        try:
            handle = await wait.run(timeout)
        except CoordinationError as error:
            self._tell_refusal(error, backend.clock.now() - started_at)
            raise
        if listeners and wait.waited:
            emit("waited", self._key, backend.clock.now() - started_at)
        return handle

    async def _is_held_by(self, owner: Owner, backend: LockBackend) -> bool:
        handle = self._held.get(owner)
        if handle is None or not handle.valid:
            return False
        record = await backend.read(self._key)
        return record is not None and record.granted_to(handle.token)


class _LockWait(Wait[LockHandle]):
    """A task's or thread's wait for a lock."""

    def __init__(self, lock: Lock, backend: LockBackend, owner: Owner, context: str, *, forever: bool) -> None:
        super().__init__(backend, lock._key, lock._config)
        self._forever = forever
        self._lock = lock
        self._locks = backend
        self._owner = owner
        self._context = context
        self._token = lock._token(backend, context)

    @property
    def name(self) -> str:
        """See `Wait.name`."""
        return self._lock.name

    def ask(self, waiting: bool) -> Coroutine[Any, Any, tuple[Lease, LockHandle | None]]:
        """See `Wait.ask`."""
        return self._lock._ask(self._locks, self._owner, self._token, waiting)

    def offer(self, waiter: Waiter) -> Offer:
        """See `Wait.offer`; under a token of its own, since an attempt that fails makes that void."""
        return Offer(self._lock._token(self._locks, self._context), self._lock._duration(), waiter)

    def accept(self, offer: Offer, lease: Lease) -> LockHandle | None:
        """See `Wait.accept`."""
        if self._lock._is_stale(self._locks, offer.sent_at, offer.ttl):
            self._locks.settle(lease)
            return None
        return self._lock._granted(self._locks, self._owner, lease, offer.sent_at, offer.ttl)

    def undo(self, grant: LockHandle) -> None:
        """See `Wait.undo`."""
        grant.give_back()

    def check(self) -> None:
        """See `Wait.check`. What waits may hold the lock itself, through another `Lock` object.

        Raises:
            LockReentrantError: it does, without a timeout, and keeps it for as long as it waits.
        """
        held = self._locks.renewer.find(self._key, self._owner) or held_around(self._locks, self._key)
        if held is None:
            return
        if self._forever and held.outlasts_its_owner:
            raise LockReentrantError(
                f"{self.title} is held by this task, thread or request already, through another Lock object, and "
                "waiting for it would never end: use the handle that it has, or release it first",
                name=self.name,
            )
        logger.warning(
            "%s is waited for by the task, thread or request that holds it, through another Lock object: it is not "
            "released meanwhile",
            self.title,
        )


class ThreadLock(ThreadPrimitive[Lock]):
    """A `Lock` for threads: the event loop that serves its backend carries out each call.

    Each thread is a holder of its own; in a pool of threads, each call is. Every call raises `OutOfContextError` on
    that event loop itself.
    """

    def acquire(self, *, timeout: Duration | None = None) -> ThreadLockHandle:
        """See `Lock.acquire`."""
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, zero=True)
        backend = self._backend()
        loop = backend.get_loop()  # before there is a coroutine, which would never be awaited if this refuses
        work = self._lock._acquire(backend, this_thread(), "thread", timeout)
        return call(loop, work, undo=LockHandle.give_back).from_thread

    def acquire_nowait(self) -> ThreadLockHandle:
        """See `Lock.acquire_nowait`."""
        backend, owner = self._backend(), this_thread()
        self._lock._refuse_reentry(owner)
        loop = backend.get_loop()
        work = self._lock._ask_once(backend, owner, self._lock._token(backend, "thread"))
        return call(loop, work, undo=LockHandle.give_back).from_thread

    def extend(self) -> ThreadLockHandle:
        """See `Lock.extend`."""
        return self._lock._holding(this_thread(), "extended").from_thread.extend()

    def release(self) -> None:
        """See `Lock.release`."""
        self._lock._holding(this_thread(), "released").from_thread.release()

    def owned(self) -> bool:
        """See `Lock.owned`."""
        backend = self._backend()
        return call(backend.get_loop(), self._lock._is_held_by(this_thread(), backend))

    def __enter__(self) -> ThreadLockHandle:
        return self._enter(self.acquire())


class LoopLock:
    """A `Lock` for coroutines on other event loops: the one that serves its backend carries out each call.

    The task that calls is the holder. A loss cancels the body of its `async with` on its own loop. A cancellation is
    raised when what was under way has ended: an acquisition is undone, a release is finished.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._blocks: Blocks[LockHandle] = Blocks()

    def acquire(self, *, timeout: Duration | None = None) -> Acquisition[LoopLockHandle]:
        """See `Lock.acquire`.

        Raises:
            OutOfContextError: no app is open, or the event loop that serves it stopped meanwhile.
        """
        return Acquisition(self._take(calling_task(), timeout))

    def acquire_nowait(self) -> Acquisition[LoopLockHandle]:
        """See `Lock.acquire_nowait`."""
        return Acquisition(self._take_once(calling_task()))

    def extend(self) -> Coroutine[Any, Any, LoopLockHandle]:
        """See `Lock.extend`."""
        return self._extend(calling_task())

    def release(self) -> Coroutine[Any, Any, None]:
        """See `Lock.release`."""
        return self._release(calling_task())

    async def owned(self) -> bool:
        """See `Lock.owned`."""
        backend, owner = self._backend(), this_task()
        loop = backend.get_loop()
        return await call_across(loop, self._lock._is_held_by(owner, backend))

    async def locked(self) -> bool:
        """See `Lock.locked`."""
        backend = self._backend()
        loop = backend.get_loop()
        return await call_across(loop, self._lock._locked(backend))

    async def __aenter__(self) -> LoopLockHandle:
        held = await self._take(None, None)
        self._blocks.append(held._handle)
        held.begin_block()
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle = self._lock._left(self._blocks, calling_task() or NOBODY)
        if handle is not None:
            await LoopLockHandle(handle).leave(error, self._lock._end)
        elif error is None:
            raise self._lock._not_held("released at the end of its block")

    async def _take(self, caller: "Task[Any] | None", timeout: Duration | None) -> LoopLockHandle:
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, zero=True)
        backend, owner = self._backend(), caller or this_task()
        return await self._begin(backend, owner, lambda: self._lock._acquire(backend, owner, "task", timeout))

    async def _take_once(self, caller: "Task[Any] | None") -> LoopLockHandle:
        backend, owner = self._backend(), caller or this_task()
        self._lock._refuse_reentry(owner)
        token = self._lock._token(backend, "task")
        return await self._begin(backend, owner, lambda: self._lock._ask_once(backend, owner, token))

    async def _begin(
        self, backend: LockBackend, owner: Task[Any], ask: Callable[[], Coroutine[Any, Any, LockHandle]]
    ) -> LoopLockHandle:
        home = owner.get_loop()

        async def granted() -> LockHandle:
            handle = await ask()
            handle.home = home
            return handle

        return LoopLockHandle(await call_across(backend.get_loop(), granted(), undo=LockHandle.give_back))

    async def _extend(self, caller: "Task[Any] | None") -> LoopLockHandle:
        return await LoopLockHandle(self._lock._holding(caller, "extended")).extend()

    async def _release(self, caller: "Task[Any] | None") -> None:
        await LoopLockHandle(self._lock._holding(caller, "released")).release()

    def _backend(self) -> LockBackend:
        return self._lock._source.find(any_loop=True)
