"""Functions that run on in a thread when whoever awaited them was cancelled, and what is done once they have ended."""

import asyncio
import logging
import sys
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from traceback import walk_stack
from types import CodeType
from typing import Any

from grelmicro.callables import layers
from grelmicro.errors import GrelmicroError

logger = logging.getLogger("grelmicro.coordination")

LOOK = 0.1
"""Seconds between two looks at a thread that nobody awaits any more."""

LOOKS = 3
"""How often in a row it must not be seen: it may be about to begin. What it left behind may look like it for longer."""


class _Mark:
    """Lives as long as any copy of the context in which it was set; that of the thread is one."""

    __slots__ = ("__weakref__", "before")

    def __init__(self, before: "_Mark | None") -> None:
        self.before = before  # it lives as long


_mark: ContextVar[_Mark | None] = ContextVar("grelmicro_in_thread", default=None)
_waiting: set["asyncio.Task[None]"] = set()


class InThread:
    """A function that a framework calls in a thread, out of sight, in a copy of the context in which this is built.

    Args:
        function: what is called.
    """

    __slots__ = ("_codes", "_mark", "_token")

    def __init__(self, function: Callable[..., object]) -> None:
        codes = (getattr(layer, "__code__", None) for layer in layers(function))
        self._codes = frozenset(code for code in codes if isinstance(code, CodeType))
        mark = _Mark(_mark.get())
        self._mark = weakref.ref(mark)
        self._token = _mark.set(mark)

    def leave(self) -> None:
        """Whoever awaited it goes on."""
        with suppress(ValueError):  # in another context than it was built in
            _mark.reset(self._token)

    def then(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call `end` in the background when the thread has ended; not any more when the event loop ends before."""
        work = asyncio.get_running_loop().create_task(self._end(end), name="grelmicro-thread", context=Context())
        _waiting.add(work)
        work.add_done_callback(_waiting.discard)

    async def _end(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        unseen = 0
        while unseen < LOOKS and self._mark() is not None:
            await asyncio.sleep(LOOK)
            unseen = 0 if self._is_seen() else unseen + 1
        try:
            await end()
        except GrelmicroError as failure:  # nobody is there to be told
            logger.debug("what a thread was to hold to its end had ended before: %s", failure)

    def _is_seen(self) -> bool:
        """Whether any thread runs the function; in doubt one does."""
        stacks = sys._current_frames().values()
        return not self._codes or any(frame.f_code in self._codes for top in stacks for frame, _ in walk_stack(top))
