"""Functions that run on in a thread when whoever awaited them was cancelled, and what is done once they have ended."""

import asyncio
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

from grelmicro.callables import codes
from grelmicro.errors import GrelmicroError

logger = logging.getLogger("grelmicro.coordination")

LOOK = 0.1
"""Seconds between two looks at threads that nobody awaits any more."""

LOOKS = 3
"""How many looks a thread is given to begin. What a block left behind may look like one for much longer."""

Function = Callable[..., object]


class _Mark:
    """Lives as long as any copy of the context in which it was set; that of a thread is one."""

    __slots__ = ("__weakref__", "before")

    def __init__(self, before: "_Mark | None") -> None:
        self.before = before  # it lives as long


_mark: ContextVar[_Mark | None] = ContextVar("grelmicro_threads", default=None)
_waiting: set["asyncio.Task[None]"] = set()


class Threads:
    """Those that a block begins from now on, each in a copy of the context, as `asyncio.to_thread` makes it."""

    __slots__ = ("_mark", "_token")

    def __init__(self) -> None:
        mark = _Mark(_mark.get())
        self._mark = weakref.ref(mark)
        self._token = _mark.set(mark)

    def leave(self) -> None:
        """The block has ended."""
        with suppress(ValueError):  # in another context than it was begun in
            _mark.reset(self._token)

    def then(self, functions: Collection[Function], end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call `end` in the background when no thread runs one of `functions` any more for this block.

        It is not called any more when the event loop ends before. What is not written in Python is seen in no thread:
        if one of them is that, `end` is called when nothing has a copy of the block's context any more.
        """
        each = [codes(function) for function in functions]
        known: set[CodeType] = set().union(*each) if all(each) else set()
        work = asyncio.get_running_loop().create_task(self._end(known, end), name="grelmicro-thread", context=Context())
        _waiting.add(work)
        work.add_done_callback(_waiting.discard)

    async def _end(self, known: set[CodeType], end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._ended(known)
        try:
            await end()
        except GrelmicroError as failure:  # nobody is there to be told
            logger.debug("what a thread was to hold to its end had ended before: %s", failure)

    async def _ended(self, known: set[CodeType]) -> None:
        looks = 0
        running: set[FrameType] = set()
        while self._mark() is not None and (looks < LOOKS or running or not known):
            await asyncio.sleep(LOOK)
            now = _calls(known)
            running = now if looks < LOOKS else running & now  # what begins later is no part of the block
            looks += 1


def _calls(known: set[CodeType]) -> set[FrameType]:
    """What runs now in any thread, of these functions."""
    stacks = sys._current_frames().values()
    return {frame for top in stacks for frame, _ in walk_stack(top) if frame.f_code in known}
