"""An event loop in a thread, for programs that have none of their own."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress

from grelmicro.errors import OutOfContextError
from grelmicro.lifecycle import check_threads

LOOK = 1.0
"""Seconds between two looks at whether the thread still lives."""


class BackgroundLoop:
    """Keeps `opened` open in the main task of an event loop that runs in a daemon thread."""

    def __init__(self, opened: AbstractAsyncContextManager[object]) -> None:
        self._opened = opened
        self._ready: Future[None] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False
        self._failure: BaseException | None = None
        # A daemon: a program that forgets to close it must still be able to exit.
        self._thread = threading.Thread(target=self._run, name="grelmicro-loop", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread and wait until everything is open; raises what opening raised."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise OutOfContextError("`with` was used where an event loop runs: use `async with` here")
        check_threads()
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._interrupt()
            raise

    def stop(self) -> None:
        """Close everything and wait for the end of the thread; raises what closing raised."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop closed in this very moment
                self._loop.call_soon_threadsafe(self._stop.set)
        self._join()
        if self._failure is not None:
            raise self._failure

    def _interrupt(self) -> None:
        """End it, although it may still be opening."""
        self._interrupted = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._join()

    def _join(self) -> None:
        while self._thread.is_alive():
            self._thread.join(LOOK)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failure = error
            if not self._ready.done():
                self._failure = None
                self._ready.set_exception(error)

    async def _main(self) -> None:
        self._task, self._stop = asyncio.current_task(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._interrupted:
            return
        async with self._opened:
            self._ready.set_result(None)
            await self._stop.wait()
