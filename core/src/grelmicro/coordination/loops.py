"""The bridge from coroutines on any event loop to the event loop that serves a backend."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from grelmicro.coordination.threads import LOOK, Work
from grelmicro.errors import OutOfContextError
from grelmicro.lifecycle import running_loop, shielded

T = TypeVar("T")


async def call_across(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    *,
    undo: Callable[[T], object] | None = None,
    finish: bool = False,
) -> T:
    """Run `coroutine` on `loop` and await it on the running event loop.

    A cancellation of the caller cancels the coroutine, unless `finish` is true, and is raised after its end. If that
    end is a result all the same, `undo` is called on `loop` with what the caller never sees.

    Raises:
        OutOfContextError: `loop` does not run, or stopped meanwhile.
    """
    if not loop.is_running():
        coroutine.close()
        raise OutOfContextError(
            "the event loop that serves this backend does not run: keep the app open while coroutines use it"
        )
    work = _Work(loop, coroutine, undo)
    try:
        work.begin()
        await work.wait_for_its_end()
        return work.result()
    except BaseException as error:
        if not work.ended or work.results:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(work.start if finish else work.abandon)
            if not isinstance(error, GeneratorExit):  # which allows no other await
                await work.outlast()
        raise
    finally:
        del work  # it refers to its error, whose traceback refers to this frame


class _Work(Work[T]):
    """A coroutine that one on another event loop waits for."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], object] | None
    ) -> None:
        super().__init__(loop, coroutine, undo)
        self._home = running_loop()
        self._end: asyncio.Future[None] = self._home.create_future()

    def _wake(self) -> None:
        try:
            self._home.call_soon_threadsafe(self._set_end)
        except RuntimeError:  # the loop of what waits is closed
            self._take_back()

    def _set_end(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    async def wait_for_its_end(self) -> None:
        """Wait until it has ended, or its loop has."""
        while not self.ended and self._loop.is_running():
            await asyncio.wait({self._end}, timeout=LOOK)

    async def outlast(self) -> None:
        """The same, however often the caller is cancelled meanwhile."""
        with shielded():
            while not self.ended and self._loop.is_running():
                with suppress(asyncio.CancelledError):
                    await self.wait_for_its_end()
