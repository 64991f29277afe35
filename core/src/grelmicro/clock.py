"""Time, in one object: every deadline, lease and pause of this package reads it, and tests move it."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType, coroutine
from typing import Any, Protocol, runtime_checkable

DRIFT = 0.01
"""The share of a lease that is given up for clocks that run at different rates."""


class Timer(Protocol):
    """What `Clock.call_later` returns."""

    def cancel(self) -> object:
        """Do not call back any more."""


@runtime_checkable
class Clock(Protocol):
    """A source of time, in seconds as float."""

    def now(self) -> float:
        """Seconds on a clock that never goes back and goes on while the machine sleeps."""

    def wall(self) -> float:
        """Seconds since 1970, for display and for numbers that must outlive a restart."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` on the running event loop after `delay` seconds."""


class SystemClock:
    """The machine's time."""

    if hasattr(time, "CLOCK_BOOTTIME"):
        # Unlike CLOCK_MONOTONIC it counts a suspended machine, on which leases run out elsewhere.
        now = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    else:
        now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Call `callback` on the running event loop after `delay` seconds."""
        return asyncio.get_running_loop().call_later(delay, callback)


SYSTEM_CLOCK = SystemClock()


@runtime_checkable
class AttentiveClock(Protocol):
    """What a clock offers besides that moves on only when work has ended or waits for it, as one for tests does."""

    def working(self) -> AbstractContextManager[object]:
        """A block of work."""


def working(clock: Clock) -> AbstractContextManager[object]:
    """A block of work, during which a clock for tests does not move unless the work waits for that."""
    return clock.working() if isinstance(clock, AttentiveClock) else nullcontext()


class TimeLimit:
    """Raises `TimeoutError` from its `async with` block when that runs longer than `seconds` by `clock`.

    Entering gives asyncio's own scope, whose `expired()` tells whether a `TimeoutError` came from here.

    Args:
        clock: whose time.
        seconds: how long the block may run; None: no limit.
    """

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self._clock = clock
        self._seconds = seconds
        self._scope = asyncio.timeout(None)
        self._timer: Timer | None = None

    async def __aenter__(self) -> asyncio.Timeout:
        scope = await self._scope.__aenter__()
        if self._seconds is not None:
            # A time in the past makes asyncio's own scope expire now: its rules of cancellation are kept.
            self._timer = self._clock.call_later(max(self._seconds, 0.0), partial(scope.reschedule, 0.0))
        return scope

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, traceback)


async def end_within(clock: Clock, seconds: float, work: Coroutine[Any, Any, object]) -> None:
    """Await `work`, at most `seconds` by `clock`: where it never has to wait, that costs no timer.

    Raises:
        TimeoutError: it was cut off.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return
    async with TimeLimit(clock, seconds):
        await _rest(work, awaited)


@coroutine
def _rest(work: Coroutine[Any, Any, object], awaited: object) -> Generator[object, Any, None]:
    """What is left to do of a coroutine that has begun, and waits for `awaited`."""
    while True:
        try:
            answer = yield awaited
        except BaseException as error:
            step = partial(work.throw, error)
        else:
            step = partial(work.send, answer)
        try:
            awaited = step()
        except StopIteration:
            return


async def sleep(clock: Clock, seconds: float) -> None:
    """Sleep `seconds` by `clock`."""
    await Signal().wait(clock, seconds)


class Signal:
    """A wake-up for everyone who waits at this moment; it is remembered for nobody."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[bool]] = set()

    def send(self) -> None:
        """Wake all who wait now."""
        for future in self._waiting:
            _resolve(future, True)

    def subscribe(self) -> asyncio.Future[bool]:
        """A future that the next `send` completes; give it back to `unsubscribe`."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        return future

    def unsubscribe(self, future: asyncio.Future[bool]) -> None:
        """Forget a future of `subscribe`."""
        self._waiting.discard(future)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    async def wait(self, clock: Clock, seconds: float | None = None) -> bool:
        """Wait for the next `send`, at most `seconds` by `clock`; whether it came."""
        future = self.subscribe()
        try:
            return await expect(future, clock, seconds)
        finally:
            self.unsubscribe(future)


async def expect(future: asyncio.Future[bool], clock: Clock, seconds: float | None) -> bool:
    """Await `future` of a `Signal`, at most `seconds` by `clock`; whether the signal came."""
    if seconds is None or future.done():
        return await future
    timer = clock.call_later(max(seconds, 0.0), partial(_resolve, future, False))
    try:
        return await future
    finally:
        timer.cancel()


def _resolve(future: asyncio.Future[bool], came: bool) -> None:
    if not future.done():
        future.set_result(came)
