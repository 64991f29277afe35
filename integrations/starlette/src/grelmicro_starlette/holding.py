"""Hold a lock while a handler runs."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from traceback import walk_tb
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from anyio import to_thread
from starlette.requests import HTTPConnection

from grelmicro.coordination import CoordinationBackendError, LockHandle, MultiLockHandle
from grelmicro.errors import GrelmicroError
from grelmicro.straying import Function, Threads
from grelmicro_starlette.presence import WhilePresent, presence

logger = logging.getLogger("grelmicro.starlette")

Handle = LockHandle | MultiLockHandle
H = TypeVar("H", bound=Handle)
H_co = TypeVar("H_co", bound=Handle, covariant=True)
End = Callable[[], Coroutine[Any, Any, None]]

IN_THREAD = (asyncio.to_thread.__code__, to_thread.run_sync.__code__)
"""What calls `func` in a thread, in a copy of the context; frameworks use the second."""


class Waited(Protocol[H_co]):
    """A lock, or several as one."""

    @property
    def name(self) -> str:
        """For texts."""

    def acquire(self, *, timeout: float | None = None) -> Awaitable[H_co]:
        """Take it, or all of them."""


class Hold(Generic[H]):
    """Holds something during its block. When it is lost meanwhile, and renewed, the block is cancelled.

    A block that is cancelled while it awaits a function in a thread is over before that: then it is held on until the
    thread has ended.

    Args:
        take: takes it.
        ending: called when the block ends, with what was taken and the block's error; what it returns gives that back,
            and raises when it was lost.
        in_thread: whether the work is a plain handler, which cannot be cancelled: then a loss shows at the end.

    Raises:
        LockLostError: it was lost before the block ended.
        CoordinationError: it could not be taken.
    """

    __slots__ = ("_ending", "_handle", "_in_thread", "_take", "_threads")

    def __init__(
        self,
        take: Callable[[], Awaitable[H]],
        ending: Callable[[H, BaseException | None], End],
        *,
        in_thread: bool,
    ) -> None:
        self._take = take
        self._ending = ending
        self._in_thread = in_thread

    async def __aenter__(self) -> H:
        self._handle = handle = await self._take()
        self._threads = Threads()
        handle.guard_block()
        if self._in_thread:
            handle.stop_interrupting(None)
            handle.keep_around_threads()
        else:
            handle.interrupt_current_task()
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.leave()
        interrupted = self._handle.stop_interrupting(error)
        end = self._ending(self._handle, error)
        if straying := left_running(error):
            self._threads.then(straying, end)
        else:
            try:
                await end()
            except GrelmicroError as failure:
                if error is None:
                    raise
                error.add_note(str(failure))
        if interrupted:
            self._handle.raise_if_lost()


def hold(lock: Waited[H], timeout: float | None, connection: HTTPConnection, *, in_thread: bool) -> Hold[H]:
    """Holds `lock`; see `Hold`.

    A store that does not answer the release changes nothing for the block: it had the lock to its end, the release is
    repeated in the background, and a warning is logged.

    Args:
        lock: what to hold.
        timeout: seconds to wait for it; None waits as long as it takes, 0 tries once.
        connection: whose client may leave: then it is waited for no more.
        in_thread: see `Hold`.

    Raises:
        ClientLeftError: the client left before the lock was taken.
        LockTimeoutError: another holder kept it for `timeout` seconds.
        LockLostError: it was lost before the block ended.
        CoordinationBackendError: the store failed before the lock was taken.
    """
    return Hold(functools.partial(_take, lock, timeout, connection), _ending, in_thread=in_thread)


async def _take(lock: Waited[H], timeout: float | None, connection: HTTPConnection) -> H:
    client = None if timeout == 0 else presence(connection)
    with nullcontext() if client is None else WhilePresent(client, lock.name):
        return await lock.acquire(timeout=timeout)


def _ending(handle: Handle, error: BaseException | None) -> End:
    return functools.partial(_end, handle)


async def _end(handle: Handle) -> None:
    if handle.lost:
        if isinstance(handle, MultiLockHandle):
            handle.give_back()  # but the one that was lost
        handle.raise_if_lost()
    if handle.released:
        return
    try:
        await handle.release()
    except CoordinationBackendError as failure:
        logger.warning(
            "lock '%s' was not released in time, and is released in the background: %s", handle.name, failure
        )


def left_running(error: BaseException | None) -> list[Function]:
    """What was awaited in threads, and goes on there, when the cancellation came that `error` is or comes from."""
    found: list[Function] = []
    while error is not None:
        if isinstance(error, asyncio.CancelledError):
            frames = (frame for frame, _ in walk_tb(error.__traceback__))
            for frame in frames:
                if frame.f_code in IN_THREAD:
                    found.append(frame.f_locals["func"])
                    for inner in (frame, *frames):
                        with suppress(RuntimeError):  # it runs
                            inner.clear()  # else the thread's context lives as long as anybody keeps the error
        error = error.__context__
    return found
