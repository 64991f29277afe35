"""Cancel work whose lease was lost, and take that cancellation back when the work has ended."""

import asyncio
from contextlib import suppress


class Interruption:
    """Cancels a task when its lease is lost, and takes that cancellation back at the end, as `asyncio.timeout` does."""

    __slots__ = ("_cancelling", "_fired", "_task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self._cancelling = task.cancelling()
        self._fired = False

    def fire(self) -> None:
        """Cancel the task; from within the task itself there is nothing to cancel, the caller's own call fails."""
        if not self._fired and not self._task.done() and self._task is not _current_task(self._task):
            self._fired = True
            self._task.cancel("the lease was lost")

    def absorb(self, error: BaseException | None) -> bool:
        """Take the cancellation back; whether it is what leaves the block, and no other came along."""
        if not self._fired or self._task is not _current_task(self._task):
            return False
        return self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)


class InterruptionElsewhere(Interruption):
    """The same for a task of another event loop than the one on which the loss is noticed."""

    __slots__ = ("_over",)

    def __init__(self, task: asyncio.Task[object]) -> None:
        super().__init__(task)
        self._over = False

    def fire(self) -> None:
        """Cancel the task soon, on its own event loop, unless its block has ended by then."""
        with suppress(RuntimeError):  # that loop is closed
            self._task.get_loop().call_soon_threadsafe(self._fire)

    def absorb(self, error: BaseException | None) -> bool:
        """See `Interruption.absorb`."""
        self._over = True
        return super().absorb(error)

    def _fire(self) -> None:
        if not self._over:
            super().fire()


def _current_task(task: asyncio.Task[object]) -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
