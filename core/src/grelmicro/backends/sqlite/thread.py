"""A thread that works for an event loop: in order, and with as few switches between the two as can be."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

MOST = 4
"""How many outcomes are held back at most while more work is waiting."""

T = TypeVar("T")


class WorkerThread:
    """Carries out functions one after the other; it starts with the first one.

    Waking the event loop costs as much as a small transaction, and the loop then competes with this thread for the
    interpreter. So outcomes are told together: when nothing is left to do, or `MOST` of them wait.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._outcomes: list[Callable[[], object]] = []  # of the loop below
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        """Whether it has started."""
        return self._thread is not None

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin to run `work`; it runs to its end once it has started, even if the future is cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._put(partial(self._carry_out, work, loop, future))
        return future

    def submit(self, work: Callable[[], object]) -> "Future[None]":
        """The same without an event loop; the future says when it has ended, however."""
        future: Future[None] = Future()
        self._put(partial(self._finish, work, future))
        return future

    def tell(self) -> None:
        """Tell the outcomes now; for work that is about to wait."""
        outcomes, self._outcomes = self._outcomes, []
        if outcomes and self._loop is not None:
            with suppress(RuntimeError):  # the loop is gone, and with it whoever asked
                self._loop.call_soon_threadsafe(_settle, outcomes)

    def end(self) -> None:
        """Let the thread end when it has done all that it was given."""
        self._work.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for that, for `timeout` seconds at most; whether it does nothing any more."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            # A daemon: a program that closes nothing must still be able to exit. Its owner ends it before that.
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work
            if self._work.empty() or len(self._outcomes) >= MOST:
                self.tell()
        self.tell()

    def _carry_out(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]") -> None:
        if future.cancelled():  # before it began
            return
        if self._loop is not loop:
            self.tell()
            self._loop = loop
        try:
            answer = work()
        except BaseException as error:
            self._outcomes.append(partial(_set, future, future.set_exception, error))
        else:
            self._outcomes.append(partial(_set, future, future.set_result, answer))

    def _finish(self, work: Callable[[], object], future: "Future[None]") -> None:
        with suppress(Exception):
            work()
        future.set_result(None)


def _settle(outcomes: list[Callable[[], object]]) -> None:
    for outcome in outcomes:
        outcome()


def _set(future: "asyncio.Future[Any]", setter: Callable[[Any], object], outcome: object) -> None:
    if not future.done():
        setter(outcome)
