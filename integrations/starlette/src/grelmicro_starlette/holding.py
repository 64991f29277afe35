"""Hold a lock while a handler runs."""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from starlette.requests import HTTPConnection

from grelmicro.coordination import CoordinationBackendError, LockHandle, MultiLockHandle
from grelmicro.errors import GrelmicroError
from grelmicro.straying import InThread
from grelmicro_starlette.presence import WhilePresent, presence

logger = logging.getLogger("grelmicro.starlette")

Function = Callable[..., object]
Handle = LockHandle | MultiLockHandle
H = TypeVar("H", bound=Handle)
H_co = TypeVar("H_co", bound=Handle, covariant=True)


class Waited(Protocol[H_co]):
    """A lock, or several as one."""

    @property
    def name(self) -> str:
        """For texts."""

    def acquire(self, *, timeout: float | None = None) -> Awaitable[H_co]:
        """Take it, or all of them."""


class Hold(Generic[H]):
    """Holds `lock` during its block. When it is lost meanwhile, a renewed one cancels the block.

    A store that does not answer the release changes nothing for the block: it had the lock to its end, the release is
    repeated in the background, and a warning is logged.

    Args:
        lock: what to hold.
        timeout: seconds to wait for it; None waits as long as it takes, 0 tries once.
        in_thread: the function that does the work, if it runs in a thread, which cannot be cancelled. A loss then
            shows at the end, and if the block is cancelled the lock is held on until the thread has ended.
        connection: whose client may leave: then it is waited for no more.

    Raises:
        ClientLeftError: the client left before the lock was taken.
        LockTimeoutError: another holder kept it for `timeout` seconds.
        LockLostError: it was lost before the block ended.
        CoordinationBackendError: the store failed before the lock was taken.
    """

    __slots__ = ("_connection", "_handle", "_in_thread", "_lock", "_thread", "_timeout")

    def __init__(
        self, lock: Waited[H], timeout: float | None, *, in_thread: Function | None = None, connection: HTTPConnection
    ) -> None:
        self._lock = lock
        self._timeout = timeout
        self._in_thread = in_thread
        self._connection = connection

    async def __aenter__(self) -> H:
        client = None if self._timeout == 0 else presence(self._connection)
        if client is None:
            handle = await self._lock.acquire(timeout=self._timeout)
        else:
            with WhilePresent(client, self._lock.name):
                handle = await self._lock.acquire(timeout=self._timeout)
        handle.guard_block()
        self._thread = self._in_thread and InThread(self._in_thread)
        if self._thread is None:
            handle.interrupt_current_task()
        self._handle = handle
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle = self._handle
        if self._thread is not None:
            self._thread.leave()
            if isinstance(error, asyncio.CancelledError):
                handle.leave_owner()
                self._thread.then(functools.partial(_end, handle))
                return
        interrupted = handle.stop_interrupting(error)
        try:
            await _end(handle)
        except GrelmicroError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        if error is None or interrupted:
            handle.raise_if_lost()


async def _end(handle: Handle) -> None:
    if handle.released:
        return
    if handle.lost:
        if isinstance(handle, MultiLockHandle):
            handle.give_back()  # but the one that was lost
        return
    try:
        await handle.release()
    except CoordinationBackendError as failure:
        logger.warning(
            "lock '%s' was not released in time, and is released in the background: %s", handle.name, failure
        )
