"""Cancel work whose lease was lost, and take that cancellation back when the work has ended."""

import asyncio


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


def _current_task(task: asyncio.Task[object]) -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
