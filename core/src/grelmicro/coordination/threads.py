"""The bridge from threads to the event loop that serves a backend."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from grelmicro.errors import OutOfContextError
from grelmicro.lifecycle import AwaitedCancelledError

T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)

LOOK = 1.0
"""Seconds between two looks at whether the event loop still runs."""

STOPPED = (
    "the event loop that serves this backend stopped during the call: keep the app open until all that uses it from "
    "other threads and event loops has ended"
)
"""Why a call did not end, for the error's text."""


class EnteredByThreads(ABC, Generic[H_co]):
    """Something that a thread enters with `with`, which is short for `with ....from_thread`."""

    @property
    @abstractmethod
    def from_thread(self) -> AbstractContextManager[H_co]:
        """The same for threads other than the event loop's."""

    def __enter__(self) -> H_co:
        """In a thread, enter `from_thread`.

        Raises:
            OutOfContextError: this is the event loop, where `async with` is needed.
        """
        return self._in_threads().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._in_threads().__exit__(kind, error, traceback)

    def _in_threads(self) -> AbstractContextManager[H_co]:
        """What `with` enters and leaves: one object, which knows the blocks that are open."""
        return cast(AbstractContextManager[H_co], self.__dict__.setdefault("_entered", self.from_thread))


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
    refusal = _refusal(loop)
    if refusal:
        coroutine.close()
        raise OutOfContextError(refusal)
    work = _Work(loop, coroutine, undo)
    try:
        work.begin()
        return work.wait()
    except BaseException:
        if not work.ended or work.results:
            # An interruption. It may have come before or after the loop was told to start.
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(work.start if finish else work.abandon)
            work.wait_for_its_end()
        raise
    finally:
        del work  # it refers to its error, whose traceback refers to this frame


class Work(ABC, Generic[T]):
    """A coroutine on an event loop for what waits for it elsewhere, and may be interrupted meanwhile.

    All that must not be left half done happens on the loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None
    ) -> None:
        self.ended = False
        self.results: list[T] = []
        self._error: BaseException | None = None
        self._loop = loop
        self._coroutine = coroutine
        self._undo = undo
        self._task: asyncio.Task[T] | None = None
        self._started = False
        self._abandoned = False

    @abstractmethod
    def _wake(self) -> None:
        """Let what waits for it go on: it has ended. Called once, on the loop."""

    # On the loop.

    def start(self) -> None:
        """Start it, unless that was done."""
        if not self._started and not self.ended:
            self._started = True
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(self._finish)

    def abandon(self) -> None:
        """Cancel it, or take back what it came to in the meantime: nobody waits for it any more."""
        self._abandoned = True
        if not self._started:
            self._coroutine.close()
            self._tell_end()
        elif self._task is not None:
            self._task.cancel()
        else:
            self._take_back()

    def _finish(self, task: asyncio.Task[T]) -> None:
        # The last reference to a task must not be the thread's: what runs at its end would swallow an interruption.
        self._task = None
        if task.cancelled():
            self._error = OutOfContextError(STOPPED) if task.cancelling() else AwaitedCancelledError()
        elif (error := task.exception()) is not None:
            self._error = error
        else:
            self.results.append(task.result())
        if self._abandoned:
            self._take_back()
        self._tell_end()

    def _take_back(self) -> None:
        if self._undo is not None and self.results:
            self._undo(self.results.pop())

    def _tell_end(self) -> None:
        if not self.ended:
            self.ended = True
            self._wake()

    # Elsewhere.

    def begin(self) -> None:
        """Tell the loop to start it."""
        try:
            self._loop.call_soon_threadsafe(self.start)
        except RuntimeError:  # the loop was closed in this very moment
            self._coroutine.close()
            self._error = OutOfContextError(STOPPED)
            self.ended = True

    def result(self) -> T:
        """What it came to, or the error that it raised, once it or the loop has ended."""
        if not self.ended:
            raise OutOfContextError(STOPPED)
        if self._error is not None:
            raise self._error
        return self.results[0]


class _Work(Work[T]):
    """A coroutine that a thread waits for, until the thread is interrupted.

    The thread may be interrupted between any two of its steps, so what it shares with the loop is a lock of which each
    step is one call.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None
    ) -> None:
        super().__init__(loop, coroutine, undo)
        self._end = threading.Lock()
        self._end.acquire()

    def _wake(self) -> None:
        self._end.release()

    def wait(self) -> T:
        """Its result, or the error that it raised."""
        self.wait_for_its_end()
        return self.result()

    def wait_for_its_end(self) -> None:
        """Wait until it has ended, or the loop has."""
        while not self.ended and self._loop.is_running():
            self._end.acquire(timeout=LOOK)


def _refusal(loop: asyncio.AbstractEventLoop) -> str:
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        return (
            "`with` and from_thread were used on the event loop that has to serve them, which would wait for itself: "
            "use `async with` or `await` here, or call this in a thread (asyncio.to_thread)"
        )
    if not loop.is_running():
        return "the event loop that serves this backend does not run: keep the app open while threads use it"
    return ""
