"""An event loop in a thread, for programs that have none of their own."""

import asyncio
import atexit
import logging
import os
import threading
import weakref
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress

from grelmicro.errors import OutOfContextError

logger = logging.getLogger("grelmicro.app")

LOOK = 1.0
"""Seconds between two looks at whether the thread still lives."""


class Background:
    """Keeps something open on an event loop in a thread while it has users; the first opens it, the last closes it.

    What is open still when the interpreter exits is closed then. A forked child has none of its parent's users.
    """

    def __init__(self) -> None:
        self.start_anew()
        _all.add(self)

    def start_anew(self) -> None:
        """Have no user, as in a child that was forked."""
        self._loop: BackgroundLoop | None = None
        self._users = 0
        self._changing = threading.Lock()  # one that was held at a fork would never be free in the child

    def open(self, opened: AbstractAsyncContextManager[object]) -> None:
        """Add a user of `opened`, which is always the same.

        Raises:
            OutOfContextError: an event loop runs in this thread.
        """
        _refuse_event_loop()
        with self._changing:
            if self._loop is None or not self._loop.alive:
                loop = BackgroundLoop(opened)
                loop.start()
                self._loop, self._users = loop, 0
                # Before what was registered until now, such as what puts a store's connections away.
                atexit.unregister(_close_all)
                atexit.register(_close_all)
            self._users += 1

    def close(self, *, for_all: bool = False) -> None:
        """Remove a user, if there is one, or all of them.

        Raises:
            OutOfContextError: it was called in the thread of the event loop, which would wait for itself.
        """
        if self._loop is not None and self._loop.runs_here():
            raise OutOfContextError(
                "an app that runs in the background was to be closed by what runs on its own event loop, which would "
                "wait for itself: close it where it was opened"
            )
        with self._changing:
            self._users = 0 if for_all else max(self._users - 1, 0)
            if not self._users and self._loop is not None:
                loop, self._loop = self._loop, None
                loop.stop()


_all: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _close_all() -> None:
    """Close what a program left open: its leases are given back, so that no other process waits for their end."""
    for background in list(_all):
        try:
            background.close(for_all=True)
        except Exception:
            logger.exception("an app that was open at the end of the program could not be closed")


def _start_all_anew() -> None:
    for background in list(_all):
        background.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_all_anew)


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

    def runs_here(self) -> bool:
        """Whether this is its thread."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread and wait until everything is open; raises what opening raised."""
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


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise OutOfContextError("`with` or open() was used where an event loop runs: use `async with` here")
