"""`MultiLock`: several locks as one, all or none."""

from asyncio import Task
from types import TracebackType
from typing import Any

from grelmicro.config import Duration, check_seconds
from grelmicro.coordination.acquisition import Acquisition
from grelmicro.coordination.blocks import Blocks
from grelmicro.coordination.identity import Owner, calling_task, this_task, this_thread
from grelmicro.coordination.lock import Lock
from grelmicro.coordination.multihandle import MultiLockHandle, ThreadMultiLockHandle
from grelmicro.coordination.protocols import LockBackend
from grelmicro.coordination.taking import Taking
from grelmicro.coordination.threads import EnteredByThreads, call
from grelmicro.errors import LockNotOwnedError, SettingsValidationError
from grelmicro.lifecycle import BoundToProcess


class MultiLock(BoundToProcess, EnteredByThreads[ThreadMultiLockHandle]):
    """Several locks that are taken and given back together, all or none.

    They are taken in the order of their names, however they were given, so that no two that take several locks this way
    wait for each other. Locks of one name count as one, with the settings of the first.

    Args:
        locks: what is locked, each with its own settings. Those that it has are kept alive while it waits for the
            others, whatever their `auto_renew` says, but no longer than their `max_hold`.

    Raises:
        SettingsValidationError: none was given, or something that is no `Lock`.
    """

    def __init__(self, *locks: Lock) -> None:
        if not locks:
            raise SettingsValidationError("MultiLock needs a lock: MultiLock(Lock('a'), Lock('b'))")
        for lock in locks:
            if not isinstance(lock, Lock):
                raise SettingsValidationError(
                    f"MultiLock takes each lock as an argument, a Lock, not {type(lock).__name__}: "
                    "MultiLock(Lock('a'), Lock('b')), or MultiLock(*locks)"
                )
        self._locks = locks
        by_key = {lock._key: lock for lock in reversed(locks)}  # of one name, the first
        self._order = [by_key[key] for key in sorted(by_key)]
        self._blocks: Blocks[MultiLockHandle] = Blocks()

    @property
    def name(self) -> str:
        """The locks' names, in the order in which they are taken."""
        return ", ".join(lock.name for lock in self._order)

    def acquire(self, *, timeout: Duration | None = None) -> Acquisition[MultiLockHandle]:
        """Take all of them; when one cannot be had, those taken before are given back.

        Await it for a handle, or enter it, as `Lock.acquire`. The calling task is the holder, also where another one
        awaits this for it.

        Args:
            timeout: seconds to wait for all of them together; None waits as long as it takes, 0 tries each once.

        Raises:
            LockTimeoutError: another holder kept the one that is named for what was left of `timeout` seconds.
            LockReentrantError: this task holds one of them.
            LockLostError: one was lost while the others were waited for.
            BackendUnavailableError: the store failed.
            OutcomeUnknownError: the store did not answer; what it may have granted is undone in the background.
            OutOfContextError: no backend serves this code.
            SettingsValidationError: two locks have one name and different backends.
        """
        return Acquisition(self._take(calling_task(), timeout))

    @property
    def from_thread(self) -> "ThreadMultiLock":
        """The same locks for threads other than the event loop's: the same names, as plain calls."""
        return ThreadMultiLock(self)

    async def __aenter__(self) -> MultiLockHandle:
        held = await self._take(None, None)
        self._blocks.append(held)
        held.guard_block()
        held.interrupt_current_task()
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        held = self._blocks.leave(this_task())
        if held is not None:
            await held.leave(error)
        elif error is None:
            raise self._not_held()

    async def _take(self, caller: "Task[Any] | None", timeout: Duration | None) -> MultiLockHandle:
        held = await self._acquire(self._served(), this_task(), "task", timeout)
        if caller is not None:
            held.move_to(caller)
        return held

    _take.__qualname__ = "MultiLock.acquire"

    async def _acquire(
        self, served: list[tuple[Lock, LockBackend]], owner: Owner, context: str, timeout: Duration | None
    ) -> MultiLockHandle:
        """`acquire` for any owner; `context` says in the tokens whether that is a task or a thread."""
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, zero=True)
        for lock in self._locks:
            lock._refuse_reentry(owner)
        taken = await Taking(owner, context, served[0][1].clock, timeout).run(served)
        by_name = {handle.name: handle for handle in taken}
        return MultiLockHandle([by_name[lock.name] for lock in self._locks])

    def _served(self, *, any_loop: bool = False) -> list[tuple[Lock, LockBackend]]:
        """The locks in the order in which they are taken, with the backends to use now; `any_loop` for threads."""
        found: dict[str, LockBackend] = {}
        for lock in self._locks:
            backend = lock._source.find(any_loop=any_loop)
            if found.setdefault(lock.name, backend) is not backend:
                raise SettingsValidationError(
                    f"MultiLock has two locks named '{lock.name}' with different backends, of which it would take one: "
                    "give the other one another name, or use it by itself"
                )
        return [(lock, found[lock.name]) for lock in self._order]

    def _not_held(self) -> LockNotOwnedError:
        return LockNotOwnedError(
            f"MultiLock '{self.name}' cannot be released at the end of its block: this task or thread does not hold "
            "it; use the handle that acquire() returned to act from elsewhere"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class ThreadMultiLock:
    """A `MultiLock` for threads: the event loop that serves its backend carries out each call."""

    def __init__(self, multi: MultiLock) -> None:
        self._multi = multi
        self._blocks: Blocks[MultiLockHandle] = Blocks()

    def acquire(self, *, timeout: Duration | None = None) -> ThreadMultiLockHandle:
        """See `MultiLock.acquire`."""
        served = self._multi._served(any_loop=True)
        loop = served[0][1].get_loop()  # before there is a coroutine, which would never be awaited if this refuses
        work = self._multi._acquire(served, this_thread(), "thread", timeout)
        return call(loop, work, undo=MultiLockHandle.give_back).from_thread

    def __enter__(self) -> ThreadMultiLockHandle:
        held = self.acquire()
        self._blocks.append(held._held)
        held._held.guard_block()
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        held = self._blocks.leave(this_thread())
        if held is not None:
            held.from_thread.__exit__(kind, error, traceback)
        elif error is None:
            raise self._multi._not_held()
