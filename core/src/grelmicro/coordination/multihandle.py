"""What acquiring several locks returns: their leases, which are given back together."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from grelmicro.coordination.handle import LockHandle, ThreadLockHandle
from grelmicro.coordination.identity import Owner
from grelmicro.coordination.interruption import Interruption
from grelmicro.coordination.threads import call
from grelmicro.errors import (
    CoordinationBackendError,
    GrelmicroError,
    LockNotOwnedError,
    OutOfContextError,
)


class MultiLockHandle:
    """Several held leases, each with a handle and a fencing token of its own. Losing one of them is losing all."""

    def __init__(self, handles: Sequence[LockHandle]) -> None:
        self._handles = tuple(handles)
        # Given back in the opposite order: whoever is woken by the first one taken finds the others free.
        self._leases = sorted(set(handles), key=lambda handle: handle.name, reverse=True)
        self._interruption: Interruption | None = None

    @property
    def handles(self) -> tuple[LockHandle, ...]:
        """The handle of each lock, in the order in which the locks were given; of equal names, the same one."""
        return self._handles

    @property
    def name(self) -> str:
        """The locks' names, in the order in which they were taken."""
        return ", ".join(handle.name for handle in reversed(self._leases))

    @property
    def owner(self) -> Owner:
        """The task or thread that holds them."""
        return self._handles[0].owner

    @property
    def expires_in(self) -> float:
        """Seconds for which all of them are surely held; 0.0 when one is lost or released."""
        return min(handle.expires_in for handle in self._leases)

    @property
    def valid(self) -> bool:
        """Whether all of them are surely still held."""
        return self.expires_in > 0

    @property
    def lost(self) -> bool:
        """Whether one of them ended without a release."""
        return any(handle.lost for handle in self._leases)

    @property
    def released(self) -> bool:
        """Whether all of them were given back."""
        return all(handle.released for handle in self._leases)

    def raise_if_lost(self) -> None:
        """Raise `LockLostError` if one of them is no longer held."""
        for handle in self._leases:
            handle.raise_if_lost()

    async def release(self) -> None:
        """Give all of them back, also where one of them cannot be: then its error is raised when that is done.

        Raises:
            LockNotOwnedError: one was no longer held, or all are released already.
            CoordinationBackendError: the store failed. The release is repeated in the background until the lease ends,
                and the rest is released there too.
        """
        if self.released:
            raise LockNotOwnedError(f"locks '{self.name}' are released already: acquire them again")
        _raise_first(await self._each(LockHandle.release))

    @property
    def from_thread(self) -> "ThreadMultiLockHandle":
        """The same handle for a thread other than the event loop's."""
        return ThreadMultiLockHandle(self)

    def move_to(self, owner: Owner) -> None:
        """Let `owner` be who holds them, as far as the locks know."""
        for handle in self._leases:
            handle.move_to(owner)

    def leave_owner(self) -> None:
        """Let their owner be free to acquire again."""
        for handle in self._leases:
            handle.leave_owner()

    def guard_block(self) -> None:
        """A block began whose end gives them back."""
        for handle in self._leases:
            handle.guard_block()

    def keep_around_threads(self) -> None:
        """See `LockHandle.keep_around_threads`."""
        for handle in self._leases:
            handle.keep_around_threads()

    def check_for_block(self) -> None:
        """See `LockHandle.check_for_block`."""
        for handle in self._leases:
            handle.check_for_block()

    def interrupt_current_task(self) -> None:
        """Cancel the running task when one that is renewed is lost, until `stop_interrupting`."""
        task = asyncio.current_task()
        if task is not None and any(handle.renewed_automatically for handle in self._leases):
            # One for all: a second loss must not cancel what the task does about the first.
            self._interruption = Interruption(task)
            self._interrupt_by(self._interruption)

    def stop_interrupting(self, error: BaseException | None) -> bool:
        """End what `interrupt_current_task` began; whether `error` is that interruption and nothing else."""
        interruption, self._interruption = self._interruption, None
        self._interrupt_by(None)
        return interruption is not None and interruption.absorb(error)

    def _interrupt_by(self, interruption: Interruption | None) -> None:
        for handle in self._leases:
            if handle.renewed_automatically:
                handle.interruption = interruption

    async def leave(self, error: BaseException | None) -> None:
        """End a block under these leases. What its body raised, `error`, stays the one that is raised."""
        interrupted = self.stop_interrupting(error)
        self.leave_owner()
        failures = await self._each(LockHandle.end)
        if error is None or interrupted:
            _raise_first(failures, error)
        else:
            for failure in failures:
                error.add_note(str(failure))

    async def _each(self, end: Callable[[LockHandle], Awaitable[None]]) -> list[GrelmicroError]:
        """End with `end` what is not released yet; what that raised.

        A store that fails, and a cancellation, leave the rest to the background.
        """
        failures: list[GrelmicroError] = []
        left = deque(handle for handle in self._leases if not handle.released)
        try:
            while left:
                try:
                    await end(left.popleft())
                except CoordinationBackendError as failure:  # the others would be as slow
                    failures.append(failure)
                    break
                except GrelmicroError as failure:
                    failures.append(failure)
        finally:
            for handle in left:
                if not handle.lost:
                    handle.give_back()
        return failures

    def give_back(self, seconds: float = 0.0) -> None:
        """Release in the background, or let end in `seconds`, those that are still held."""
        for handle in self._leases:
            if not handle.released and not handle.lost:
                handle.give_back(seconds)

    async def shorten(self, seconds: float) -> bool:
        """Leave them held for `seconds` more and give them up; whether all were still held."""
        held = self.valid
        self.give_back(seconds)
        return held

    async def __aenter__(self) -> "MultiLockHandle":
        """Hold them for a block: `async with multi.acquire(timeout=2) as held`.

        Raises:
            LockNotOwnedError: one is lost or released.
            LockReentrantError: one guards a block already.
        """
        self.check_for_block()
        self.guard_block()
        self.interrupt_current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.leave(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} expires_in={self.expires_in:.3f}>"


class ThreadMultiLockHandle:
    """A `MultiLockHandle` for a thread: the same names, as plain calls that the handle's event loop carries out."""

    __slots__ = ("_held",)

    def __init__(self, held: MultiLockHandle) -> None:
        self._held = held

    @property
    def handles(self) -> tuple[ThreadLockHandle, ...]:
        """The handle of each lock, in the order in which the locks were given; of equal names, the same lease."""
        return tuple(handle.from_thread for handle in self._held.handles)

    @property
    def name(self) -> str:
        """The locks' names, in the order in which they were taken."""
        return self._held.name

    @property
    def expires_in(self) -> float:
        """Seconds for which all of them are surely held; 0.0 when one is lost or released."""
        return self._held.expires_in

    @property
    def valid(self) -> bool:
        """Whether all of them are surely still held."""
        return self._held.valid

    @property
    def lost(self) -> bool:
        """Whether one of them ended without a release."""
        return self._held.lost

    def raise_if_lost(self) -> None:
        """See `MultiLockHandle.raise_if_lost`."""
        self._held.raise_if_lost()

    def release(self) -> None:
        """See `MultiLockHandle.release`."""
        call(self._loop(), self._held.release(), finish=True)

    def __enter__(self) -> "ThreadMultiLockHandle":
        """Hold them for a block: `with multi.from_thread.acquire(timeout=2) as held`; see `MultiLockHandle` for what
        it raises.
        """
        self._held.check_for_block()
        self._held.guard_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            loop = self._loop()
        except OutOfContextError as failure:
            self._held.leave_owner()
            if error is None:
                raise
            error.add_note(str(failure))
        else:
            call(loop, self._held.leave(error), finish=True)

    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._held.handles[0]._backend.get_loop()

    def __repr__(self) -> str:
        return repr(self._held)


def _raise_first(failures: Sequence[GrelmicroError], cause: BaseException | None = None) -> None:
    """Raise the first of `failures`, if there is one, with the others as its notes."""
    if failures:
        for other in failures[1:]:
            failures[0].add_note(str(other))
        raise failures[0] from cause
