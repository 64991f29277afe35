"""Run a function under a lease: on its loss a coroutine is cancelled, and a thread, which cannot be, is waited for."""

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from grelmicro.coordination import LockHandle
from grelmicro.coordination.standing import end
from grelmicro.lifecycle import distinguish_cancellation, shielded

logger = logging.getLogger("grelmicro.task")

Function = Callable[[], object]


class LeaseLostError(Exception):
    """The lease ran out under the function."""


async def run(name: str, function: Function, handle: LockHandle | None, *, in_term: bool) -> BaseException | None:
    """Run `function` of the task `name`; a plain function runs in a thread.

    Args:
        name: the task, for the log.
        function: what to run.
        handle: the lease under which it runs, if any.
        in_term: whether it runs for a term of leadership, which must not end before it.

    Returns:
        The error with which the function ended, of whatever class: raised, a `SystemExit` would end the process, and a
        `CancelledError` the task that awaits this.

    Raises:
        LeaseLostError: the lease ended before the function; its own error is the cause.
    """
    if inspect.iscoroutinefunction(function):
        failure = await _run_awaitable(name, function(), handle)
    else:
        result, failure = await _run_in_thread(function, handle, in_term=in_term)
        if failure is None and inspect.isawaitable(result):  # of a plain function around a coroutine function
            failure = await _run_awaitable(name, result, handle)
    if handle is not None and handle.lost:
        raise LeaseLostError from failure
    return failure


async def _run_awaitable(name: str, awaitable: Awaitable[object], handle: LockHandle | None) -> BaseException | None:
    # In a task of its own: what cancels that is not what cancels the caller.
    work = asyncio.create_task(_contained(awaitable))
    try:
        if handle is None:
            await _ended(work)
        else:
            await first([_ended(work), _lost(handle)])
        if work.done():
            return _failure(work)
        work.cancel("the lease was lost")
        await _ended(work)
        raise LeaseLostError from None if work.cancelled() else _failure(work)
    finally:
        if not work.done():
            await end(work)
            if not work.cancelled() and (error := _failure(work)) is not None:
                logger.error("task %s failed when it was cancelled", name, exc_info=error)


async def _contained(awaitable: Awaitable[object]) -> BaseException | None:
    """Await it; a `SystemExit` is returned, which asyncio would raise out of the event loop."""
    try:
        await awaitable
    except SystemExit as error:
        return error
    return None


def _failure(work: asyncio.Task[BaseException | None]) -> BaseException | None:
    """The error with which `work` ended."""
    try:
        with distinguish_cancellation():
            return work.result()
    except BaseException as error:
        return error


async def _run_in_thread(
    function: Function, handle: LockHandle | None, *, in_term: bool
) -> tuple[object, BaseException | None]:
    context = contextvars.copy_context()
    thread = asyncio.get_running_loop().run_in_executor(None, context.run, _called, function)
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        # As long as it runs the term is kept, or the lease unless it runs out; however often this task is cancelled.
        with shielded():
            while not thread.done() and (in_term or (handle is not None and not handle.lost)):
                with suppress(asyncio.CancelledError):
                    await (_ended(thread) if in_term or handle is None else first([_ended(thread), _lost(handle)]))
        raise


def _called(function: Function) -> tuple[object, BaseException | None]:
    """What `function` returned and raised: a future takes no `StopIteration`, and awaiting it raises a `SystemExit`."""
    try:
        return function(), None
    except BaseException as error:
        return None, error


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


async def _lost(handle: LockHandle) -> None:
    # In a context of its own: what watches work is no part of it.
    watch = asyncio.get_running_loop().create_task(handle.wait_lost(), context=contextvars.Context())
    try:
        await watch
    finally:
        watch.cancel()


async def _ended(work: asyncio.Future[Any]) -> None:
    await asyncio.wait({work})
