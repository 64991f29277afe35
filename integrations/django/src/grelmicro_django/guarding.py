"""Stop the work of a thread whose lease is lost: its database calls, then its code, then its process."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import sleep
from types import FrameType, TracebackType
from typing import Any, Self

from grelmicro.coordination import ThreadLockHandle
from grelmicro.errors import LockLostError
from grelmicro_django.calls import Calls
from grelmicro_django.exits import LOST
from grelmicro_django.policies import Policy

WAKING = getattr(signal, "SIGURG", signal.SIGINT)
"""The signal that interrupts the main thread: a program that handles it not is not ended by it."""

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))

CANCEL_SECONDS = 1.0
"""Seconds that cancelling the calls of drivers may take before the main thread is interrupted all the same."""

SHELL_SIGNALLED = 128
"""What shells add to the number of the signal by which a process died."""

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Interrupted(BaseException):
    """Raised in the work whose lease is lost. It is no `Exception`: code that catches those ends too."""

    def __init__(self, guard: "Guard") -> None:
        super().__init__("the lease of this work is lost")
        self.guard = guard


class Terminated(BaseException):
    """Raised where a signal that ends the process came before the work began."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Handlers of the main thread for a block; what was there before is put back unless it was replaced meanwhile."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Handler, Handler]] = {}

    def handle(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> Handler:
        """Handle a signal; what handled it before."""
        before = signal.getsignal(number)
        self._before[number] = (before, handler)
        signal.signal(number, handler)
        return before

    def __bool__(self) -> bool:
        return bool(self._before)

    def put_back(self) -> None:
        """Put back what was there."""
        for number, (before, handler) in self._before.items():
            if before is not None and signal.getsignal(number) is handler:
                signal.signal(number, before)
        self._before.clear()


class Endings:
    """Let SIGTERM and SIGHUP release the lease before they end the process; handlers of the program stay."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._signals = Signals()
        self._held: ThreadLockHandle | None = None
        self._calls: Calls | None = None
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None

    def release_at_end(self, held: ThreadLockHandle) -> None:
        """The work under this lease begins."""
        self._held = held
        if self._signals and signal.set_wakeup_fd(-1) == -1:
            # A handler runs between two steps of Python. This tells a thread of a signal that comes amid a long call.
            self._calls = Calls()
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            threading.Thread(
                target=self._watch, args=[self._receiver, self._calls], name="grelmicro-ending", daemon=True
            ).start()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._signals.handle(number, self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._calls is not None:
            self._calls.forget()
        if self._sender is not None:
            if (present := signal.set_wakeup_fd(-1)) != self._sender.fileno():
                signal.set_wakeup_fd(present)
            self._sender.close()
        self._signals.put_back()

    def _end(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        if self._held is None:
            raise Terminated(number)
        # The work goes no further: this runs on top of it, in its thread.
        with suppress(Exception):
            self._held.release()
        signal.raise_signal(number)

    def _watch(self, receiver: socket.socket, calls: Calls) -> None:
        """At a signal, end the calls of drivers, after which the handler runs, or the process after the grace."""
        with receiver:
            while numbers := receiver.recv(64):
                for number in numbers:
                    if number in ENDING and getattr(signal.getsignal(number), "__self__", None) is self:
                        calls.cancel(min(CANCEL_SECONDS, self._grace))
                        sleep(self._grace)
                        if self._held is not None:
                            with suppress(Exception):
                                self._held.release()
                        os._exit(SHELL_SIGNALLED + number)


def _forget_wakeups() -> None:
    """In a child that was forked: what it is sent is not for its parent."""
    signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_wakeups)


class Guard:
    """Watches over the lease of the work in this thread, until `end`."""

    def __init__(self, policy: Policy, held: ThreadLockHandle) -> None:
        self._policy = policy
        self._held = held
        self._main = threading.current_thread() is threading.main_thread()
        self._thread = threading.get_ident()
        self._signals = Signals()
        self._before: Handler = None
        self._news: SimpleQueue[str] = SimpleQueue()
        self._over = threading.Event()
        self._calls: Calls | None = None
        self.stopping = False
        """Whether the work was interrupted."""
        self.reason = ""
        """Why the work may not go on; empty while it may."""

    def begin(self) -> None:
        """Begin to watch."""
        if self._main:
            self._calls = Calls()
            self._before = self._signals.handle(WAKING, self._wake)
        threading.Thread(target=self._wait_lost, name="grelmicro-lease", daemon=True).start()
        threading.Thread(target=self._watch, name="grelmicro-guard", daemon=True).start()

    def end(self) -> None:
        """The work has ended: nothing is interrupted any more."""
        self._over.set()
        self._news.put("")
        if self._calls is not None:
            self._calls.forget()
        self._signals.put_back()

    def loss(self) -> LockLostError | None:
        """The error that the work is to end with; None where its lease lasted."""
        if not self.reason and self._held.lost:
            self.reason = "its lease was lost before it ended"
        if not self.reason:
            return None
        name = self._policy.name
        return LockLostError(f"singleton '{name}': {self.reason}; see the log for the cause", name=name)

    def _wait_lost(self) -> None:
        with suppress(Exception):
            self._held.wait_lost()
        if self._held.lost:
            self._news.put("its lease was lost before it ended")

    def _watch(self) -> None:
        limit = self._policy.max_hold
        try:
            reason = self._news.get(timeout=limit)
        except Empty:
            reason = f"it reached its max_hold of {limit:g} s"
            self._stop(reason)
            return
        if reason and self._policy.on_lost == "stop":
            self._stop(reason)
        elif reason:
            self.reason = reason
            if limit is not None and not self._over.wait(limit):
                self._stop(f"it reached its max_hold of {limit:g} s")

    def _stop(self, reason: str) -> None:
        if self._over.is_set():
            return
        self.reason = reason
        if self._calls is None:  # outside the main thread, where nothing is interrupted
            return
        self.stopping = True
        self._calls.cancel(min(CANCEL_SECONDS, self._policy.grace))
        if not self._over.is_set():
            interrupt(self._thread)
        if not self._over.wait(self._policy.grace):
            text = f"singleton '{self._policy.name}': {reason}, and the command did not stop: the process is ended\n"
            with suppress(OSError):
                os.write(2, text.encode())
            os._exit(LOST)

    def _wake(self, number: int, frame: FrameType | None) -> None:
        if self.stopping and not self._over.is_set():
            raise Interrupted(self)
        if callable(self._before):
            self._before(number, frame)


def interrupt(thread: int) -> None:
    """Have the main thread run its handler of the waking signal, also amid a sleep."""
    if sys.platform == "win32":
        signal.raise_signal(WAKING)
    else:
        signal.pthread_kill(thread, WAKING)
