"""The bridge from threads to the event loop that serves a backend."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from grelmicro.errors import OutOfContextError

T = TypeVar("T")

_LOOK = 1.0
"""Seconds between two looks at whether the event loop still runs."""


def call(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[object, object, T]) -> T:
    """Run `coroutine` on `loop` and wait for it in this thread.

    An interruption of this thread cancels the coroutine, and its undo is awaited.

    Raises:
        OutOfContextError: this is the loop's own thread, or the loop does not run.
    """
    refusal = _refusal(loop)
    if refusal:
        coroutine.close()
        raise OutOfContextError(refusal)
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while True:
            try:
                return future.result(_LOOK)
            except TimeoutError:
                if future.done():  # the coroutine's own
                    raise
                if not loop.is_running():
                    raise OutOfContextError(
                        "the event loop that serves this backend stopped during the call: keep the app open until "
                        "its threads have ended"
                    ) from None
    except BaseException:
        future.cancel()
        raise


def _refusal(loop: asyncio.AbstractEventLoop) -> str:
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        return (
            "from_thread was used on the event loop that has to serve it, which would wait for itself: "
            "await the async form here, or call this in a thread (asyncio.to_thread)"
        )
    if not loop.is_running():
        return "the event loop that serves this backend does not run: keep the app open while threads use it"
    return ""
