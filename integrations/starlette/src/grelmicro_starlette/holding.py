"""Hold a lock while a handler runs."""

import asyncio
import logging
from collections.abc import Awaitable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from starlette.requests import HTTPConnection

from grelmicro.coordination import CoordinationBackendError, LockHandle, MultiLockHandle
from grelmicro.errors import GrelmicroError
from grelmicro_starlette.presence import WhilePresent, presence

logger = logging.getLogger("grelmicro.starlette")

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
        in_thread: the work runs in a thread, which cannot be cancelled. A loss then shows at the end, and a block
            that is cancelled while its thread may run on leaves the lease to run out.
        connection: whose client may leave: then it is waited for no more.

    Raises:
        ClientLeftError: the client left before the lock was taken.
        LockTimeoutError: another holder kept it for `timeout` seconds.
        LockLostError: it was lost before the block ended.
        CoordinationBackendError: the store failed before the lock was taken.
    """

    __slots__ = ("_connection", "_handle", "_in_thread", "_lock", "_timeout")

    def __init__(
        self, lock: Waited[H], timeout: float | None, *, in_thread: bool = False, connection: HTTPConnection
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
        if not self._in_thread:
            handle.interrupt_current_task()
        self._handle = handle
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handle = self._handle
        interrupted = handle.stop_interrupting(error)
        try:
            await _end(handle, thread_runs_on=self._in_thread and isinstance(error, asyncio.CancelledError))
        except GrelmicroError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        if error is None or interrupted:
            handle.raise_if_lost()


async def _end(handle: Handle, *, thread_runs_on: bool = False) -> None:
    if handle.released:
        return
    if handle.lost:
        if isinstance(handle, MultiLockHandle):
            handle.give_back()  # but the one that was lost
        return
    try:
        if thread_runs_on:
            await handle.shorten(handle.expires_in)
        else:
            await handle.release()
    except CoordinationBackendError as failure:
        logger.warning(
            "lock '%s' was not released in time, and is released in the background: %s", handle.name, failure
        )
