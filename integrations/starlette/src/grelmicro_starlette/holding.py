"""Hold a lock while a handler runs."""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from grelmicro.coordination import CoordinationBackendError, Lock, LockHandle
from grelmicro.errors import GrelmicroError

logger = logging.getLogger("grelmicro.starlette")


@asynccontextmanager
async def hold(lock: Lock, timeout: float | None, *, in_thread: bool = False) -> AsyncIterator[LockHandle]:
    """Hold `lock` during the block. When it is lost meanwhile, a renewed one cancels the block.

    A store that does not answer the release changes nothing for the block: it had the lock to its end, the release is
    repeated in the background, and a warning is logged.

    Args:
        lock: what to hold.
        timeout: seconds to wait for it; None waits as long as it takes, 0 tries once.
        in_thread: the work runs in a thread, which cannot be cancelled. A loss then shows at the end, and a block
            that is cancelled while its thread may run on leaves the lease to run out.

    Raises:
        LockTimeoutError: another holder kept it for `timeout` seconds.
        LockLostError: it was lost before the block ended.
        CoordinationBackendError: the store failed before the lock was taken.
    """
    handle = await lock.acquire(timeout=timeout)
    if not in_thread:
        handle.interrupt_current_task()
    try:
        yield handle
    except BaseException as error:
        if handle.stop_interrupting(error):
            handle.raise_if_lost()
        try:
            await _end(handle, thread_runs_on=in_thread and isinstance(error, asyncio.CancelledError))
        except GrelmicroError as failure:
            error.add_note(str(failure))
        raise
    handle.stop_interrupting(None)
    handle.raise_if_lost()
    await _end(handle)


async def _end(handle: LockHandle, *, thread_runs_on: bool = False) -> None:
    if handle.released or handle.lost:
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


def runs_in_thread(handler: Callable[..., object]) -> bool:
    """Whether a framework runs `handler` in a thread, since it is a plain function."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    called = handler if inspect.isroutine(handler) or inspect.isclass(handler) else type(handler).__call__
    return not (inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called))
