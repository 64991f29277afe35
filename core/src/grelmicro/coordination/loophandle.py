"""A `LockHandle` for coroutines on another event loop than the one that serves its backend."""

from asyncio import current_task
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

from grelmicro.coordination.handle import HandleElsewhere, LockHandle
from grelmicro.coordination.interruption import InterruptionElsewhere
from grelmicro.coordination.loops import call_across
from grelmicro.errors import LockLostError, OutOfContextError


class LoopLockHandle(HandleElsewhere):
    """A `LockHandle` for coroutines on another event loop: the same names, awaited there."""

    __slots__ = ()

    async def extend(self) -> "LoopLockHandle":
        """See `LockHandle.extend`."""
        await self._call(self._handle.extend())
        return self

    def release(self) -> Coroutine[Any, Any, None]:
        """See `LockHandle.release`. One that is cancelled is finished before the cancellation is raised."""
        return self._release()

    async def _release(self) -> None:
        await self._call(self._handle.release(), finish=True)

    async def wait_lost(self) -> None:
        """See `LockHandle.wait_lost`."""
        await self._call(self._handle.wait_lost())

    def keep_around_threads(self) -> None:
        """See `LockHandle.keep_around_threads`."""
        self._handle.keep_around_threads()

    async def _call(self, work: Coroutine[Any, Any, Any], *, finish: bool = False) -> None:
        try:
            loop = self._handle._backend.get_loop()
        except OutOfContextError:
            work.close()
            raise
        await call_across(loop, work, finish=finish)

    def begin_block(self) -> None:
        """Begin a block of the running task, which is cancelled on its own event loop when the lease is lost."""
        self._handle.guard_block()
        if self._handle.renewed_automatically and (task := current_task()) is not None:
            self._handle.interruption = InterruptionElsewhere(task)
            if self._handle.lost:  # maybe just before there was something to interrupt
                self._handle.interruption.fire()

    async def leave(self, error: BaseException | None, end: Callable[[LockHandle], Awaitable[None]]) -> None:
        """See `LockHandle.leave`."""
        handle = self._handle
        if isinstance(error, GeneratorExit):  # the coroutine ends without its event loop, and may not await
            handle.leave_owner()
            with suppress(OutOfContextError, RuntimeError):  # the other loop is closed too
                handle._backend.get_loop().call_soon_threadsafe(handle.give_back)
            return
        if handle.stop_interrupting(error):
            handle.leave_owner()
            raise handle.lost_error("kept until its block ended", LockLostError) from error
        try:
            loop = handle._backend.get_loop()
        except OutOfContextError as failure:
            handle.leave_owner()
            if error is None:
                raise
            error.add_note(str(failure))
        else:
            await call_across(loop, handle.leave(error, end), finish=True)

    async def __aenter__(self) -> "LoopLockHandle":
        """Hold it for a block: `async with lock.from_loop.acquire() as held`; raises what `LockHandle`'s does."""
        self._handle.check_for_block()
        self.begin_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.leave(error, LockHandle.end)
