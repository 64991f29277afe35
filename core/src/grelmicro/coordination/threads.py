"""The bridge from threads to the event loop that serves a backend."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

from grelmicro.errors import OutOfContextError

T = TypeVar("T")

_LOOK = 1.0
"""Seconds between two looks at whether the event loop still runs."""

_STOPPED = (
    "the event loop that serves this backend stopped during the call: keep the app open until its threads have ended"
)


class _Work(Generic[T]):
    """A coroutine that a thread waits for, until the thread is interrupted."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None) -> None:
        self._coroutine = coroutine
        self._undo = undo
        self._task: asyncio.Task[Any] | None = None
        self._results: list[T] = []
        self._abandoned = False

    async def run(self) -> T:
        self._task = asyncio.current_task()
        result = await self._coroutine
        self._results.append(result)
        if self._abandoned:
            self._take_back()
        return result

    def abandon(self) -> None:
        """Cancel it, or take back what it came to in the meantime: nobody waits for it any more."""
        self._abandoned = True
        if self._task is None:
            self._coroutine.close()
        elif self._results:
            self._take_back()
        else:
            self._task.cancel()

    def _take_back(self) -> None:
        if self._undo is not None:
            self._undo(self._results.pop())


def call(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    *,
    undo: Callable[[T], object] | None = None,
    finish: bool = False,
) -> T:
    """Run `coroutine` on `loop` and wait for it in this thread.

    An interruption of this thread cancels the coroutine, unless `finish` is true, and is raised after its end. If that
    end is a result all the same, `undo` is called on `loop` with what the thread never sees.

    Raises:
        OutOfContextError: this is the loop's own thread, or the loop does not run.
    """
    work = _Work(coroutine, undo)
    try:
        _refuse(loop)
        future = asyncio.run_coroutine_threadsafe(work.run(), loop)
    except BaseException:
        coroutine.close()
        raise
    try:
        return _result(future, loop)
    except BaseException:
        if not future.done() or future.cancelled() or future.exception() is None:
            if not finish:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(work.abandon)
            while not future.done() and loop.is_running():
                wait([future], _LOOK)
        raise


def _result(future: "Future[T]", loop: asyncio.AbstractEventLoop) -> T:
    while True:
        wait([future], _LOOK)
        if future.done():
            try:
                return future.result()
            except CancelledError:
                raise OutOfContextError(_STOPPED) from None
        if not loop.is_running():
            raise OutOfContextError(_STOPPED)


def _refuse(loop: asyncio.AbstractEventLoop) -> None:
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        raise OutOfContextError(
            "from_thread was used on the event loop that has to serve it, which would wait for itself: "
            "await the async form here, or call this in a thread (asyncio.to_thread)"
        )
    if not loop.is_running():
        raise OutOfContextError(
            "the event loop that serves this backend does not run: keep the app open while threads use it"
        )
