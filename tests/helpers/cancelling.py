"""Cancel a coroutine at each of its suspensions in turn."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Cancel = Callable[[], object]
When = Callable[[Cancel, object], object]
"""How a cancellation comes at a suspension: gets what cancels, and what the coroutine waits for."""


def at_once(cancel: Cancel, awaited: object) -> None:
    """Before what it asked for has begun."""
    cancel()


def in_flight(cancel: Cancel, awaited: object) -> None:
    """While what it asked for is under way."""
    asyncio.get_running_loop().call_soon(cancel)


def when_answered(cancel: Cancel, awaited: object) -> None:
    """When the answer is there, and the coroutine has not seen it yet."""
    if isinstance(awaited, asyncio.Future):
        awaited.add_done_callback(lambda _: cancel())
    else:
        cancel()


class Suspended(Generic[T]):
    """Awaits `coroutine`, and at its suspension number `at` lets `when` call `cancel`. Counts the suspensions."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], at: int, when: When, cancel: Cancel) -> None:
        self.suspensions = 0
        self.interrupted = False
        """Whether a cancellation was raised in the coroutine."""
        self._coroutine = coroutine
        self._at = at
        self._when = when
        self._cancel = cancel

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                awaited = step()
            except StopIteration as stop:
                answer: T = stop.value
                return answer
            self.suspensions += 1
            if self.suspensions == self._at:
                self._when(self._cancel, awaited)
            try:
                yield awaited
            except BaseException as error:
                self.interrupted |= isinstance(error, asyncio.CancelledError)
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, None)
