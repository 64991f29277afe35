"""Hand leadership over at the signal that stops the process, not at the end of what the server still has to do."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SIGNALS = (signal.SIGTERM, signal.SIGINT)

QUIT = getattr(signal, "SIGQUIT", None)
"""What gunicorn sends its workers when it is interrupted. Where nobody handles it, it is there to make a core dump."""


class HandsOver(Protocol):
    """What can hand over, such as a `Grelmicro` app."""

    def hand_over(self) -> None:
        """Begin to end what other workers can take up; returns at once."""


@contextmanager
def handing_over(
    app: HandsOver,
    *,
    unhandled: Callable[[int], object] | None = None,
    second_ends: bool = True,
    hurry: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Call `app.hand_over()` at SIGTERM and SIGINT, then whatever handled the signal before; at SIGQUIT if one did.

    It does nothing outside of the main thread, where Python allows no handlers. What was there is put back at the end.

    Args:
        app: what hands over.
        unhandled: called in the event loop, with the signal's number, at the first signal that nothing handled before
            and that would have ended the process at once, so that it can end in order. The signal is raised again at
            the end of the block.
        second_ends: whether a second such signal ends the process at once. Otherwise `unhandled` has to end it in time:
            servers send their workers one after the other.
        hurry: called in the event loop at a second SIGINT, when somebody has pressed Ctrl+C again. No other second
            signal means that: servers send their workers one after the terminal did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if QUIT is not None and callable(handler := signal.getsignal(QUIT)):
        before[QUIT] = handler
    fatal: list[int] = []
    interrupted = False
    ended = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        previous = before[signal.Signals(number)]
        # Whoever set a handler of its own meanwhile may have kept this one, and call it for ever.
        if not ended:
            loop.call_soon_threadsafe(app.hand_over)
            if number == signal.SIGINT:
                if interrupted and hurry is not None:
                    loop.call_soon_threadsafe(hurry)
                interrupted = True
        if callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL:
            if unhandled is None or ended or (fatal and second_ends):
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            elif not fatal:
                fatal.append(number)
                loop.call_soon_threadsafe(unhandled, number)

    for number, previous in before.items():
        # None stands for a handler that was not set from Python: it could not be put back. What is ignored, as for a
        # program in a shell's background, stops nothing.
        if previous not in (None, signal.SIG_IGN):
            signal.signal(number, handle)
    try:
        yield
    finally:
        ended = True
        for number, previous in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, previous)
        if fatal:
            signal.raise_signal(fatal[0])
