"""Run a function under a lease: on its loss a coroutine is cancelled, and a thread, which cannot be, is waited for."""

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress

from grelmicro.coordination import LockHandle
from grelmicro.coordination.standing import end
from grelmicro.lifecycle import shielded

logger = logging.getLogger("grelmicro.task")

Function = Callable[[], object]


class LeaseLostError(Exception):
    """The lease ran out under the function."""


async def run(name: str, function: Function, handle: LockHandle | None, *, in_term: bool) -> None:
    """Run `function` of the task `name`; a plain function runs in a thread.

    Args:
        name: the task, for the log.
        function: what to run.
        handle: the lease under which it runs, if any.
        in_term: whether it runs for a term of leadership, which must not end before it.

    Raises:
        LeaseLostError: the lease ended before the function; its own error is the cause.
    """
    if inspect.iscoroutinefunction(function):
        await _run_awaitable(name, function(), handle)
    else:
        result = await _run_in_thread(function, handle, in_term=in_term)
        if inspect.isawaitable(result):  # of a plain function around a coroutine function
            await _run_awaitable(name, result, handle)
    if handle is not None and handle.lost:
        raise LeaseLostError


async def _run_awaitable(name: str, work: object, handle: LockHandle | None) -> None:
    assert inspect.isawaitable(work)
    if handle is None:
        await work
        return
    body = asyncio.ensure_future(work)
    try:
        await first([_ended(body), handle.wait_lost()])
        if not body.done():
            body.cancel("the lease was lost")
            await asyncio.wait({body})
            raise LeaseLostError from None if body.cancelled() else body.exception()
        await body
    finally:
        if not body.done():
            await end(body)
            if not body.cancelled() and (error := body.exception()) is not None:
                logger.error("task %s failed when it was cancelled", name, exc_info=error)


async def _run_in_thread(function: Function, handle: LockHandle | None, *, in_term: bool) -> object:
    context = contextvars.copy_context()
    thread = asyncio.get_running_loop().run_in_executor(None, context.run, function)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        # As long as it runs the term is kept, or the lease unless it runs out; however often this task is cancelled.
        with shielded():
            while not thread.done() and (in_term or (handle is not None and not handle.lost)):
                with suppress(asyncio.CancelledError):
                    await (_ended(thread) if in_term or handle is None else first([_ended(thread), handle.wait_lost()]))
        raise


async def first(waiting: list[Coroutine[object, object, object]]) -> None:
    """Wait for the first of several things and drop the others; one that cannot be waited for raises its error."""
    tasks = {asyncio.ensure_future(each) for each in waiting}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _ended(work: asyncio.Future[object]) -> None:
    await asyncio.wait({work})
