"""A clock that tests move: leases run out, waits end and renewals fall due without anybody waiting for it."""

import asyncio
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from grelmicro.clock import SYSTEM_CLOCK
from grelmicro.config import Duration, check_seconds
from grelmicro.coordination.threads import call
from grelmicro.errors import SettingsValidationError

ROUNDS = 20
"""How often the event loop runs after each timer, so that whatever it woke can go on to its next wait."""


WORK_LIMIT = 5.0
"""Real seconds for which the clock waits for work that does not wait for it, before it moves on all the same."""

WORK_POLL = 0.001
"""Real seconds between two looks at such work."""


class _Work:
    """Something that goes on, and the timers that it waits for."""

    def __init__(self) -> None:
        self.timers: set[_Timer] = set()
        self.awaited = True
        """Whether the clock still waits for it."""

    @property
    def busy(self) -> bool:
        """Whether the clock must not move."""
        return self.awaited and not self.timers


_work: ContextVar[_Work | None] = ContextVar("grelmicro_work", default=None)


class _Timer:
    """A call at a time of the clock, on the event loop that asked for it.

    Args:
        when: the time.
        callback: called then.
        delay: real seconds after which it is called unless the clock was moved there before; None: never.
    """

    def __init__(self, when: float, callback: Callable[[], object], delay: float | None) -> None:
        self.when = when
        self.callback: Callable[[], object] | None = callback
        self.loop = asyncio.get_running_loop()
        self._real = None if delay is None else self.loop.call_later(delay, self.fire)
        self._work = _work.get()
        if self._work is not None:
            self._work.timers.add(self)

    def cancel(self) -> None:
        """Do not call back any more."""
        self.callback = None
        if self._real is not None:
            self._real.cancel()
        if self._work is not None:
            self._work.timers.discard(self)

    def hasten(self, delay: float) -> None:
        """The clock was moved, so that it is `delay` real seconds away now."""
        if self.callback is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._rearm, delay)

    def _rearm(self, delay: float) -> None:
        if self.callback is not None:
            if self._real is not None:
                self._real.cancel()
            self._real = self.loop.call_later(delay, self.fire)

    def fire(self) -> None:
        """Call back, on the loop that asked for it."""
        callback, here = self.callback, self.loop is asyncio.get_running_loop()
        if not here:
            self._real = None  # only its own loop can cancel it: it finds nothing to call
        self.cancel()
        if callback is None:
            return
        if here:
            callback()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(callback)


class MovableClock:
    """A `grelmicro.clock.Clock` that stands still until it is moved. Any thread may read it.

    Args:
        now: seconds on the clock of leases at the beginning.
        wall: seconds since 1970 at the beginning.
        running: whether it does not stand still: time passes on it as on the machine's, and moving it adds to that.
            For tests of code that blocks a thread until its time-out.
    """

    def __init__(self, now: float = 1_000.0, wall: float = 1_750_000_000.0, *, running: bool = False) -> None:
        self._running = running
        self._now = now - self._passed()
        self._offset = wall - now
        self._mutex = threading.Lock()
        self._timers: list[tuple[float, int, _Timer]] = []
        self._count = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that asked for a timer last
        self._works: set[_Work] = set()
        self._ended = 0  # works that have ended

    def now(self) -> float:
        """Seconds on the clock of leases."""
        return self._now + self._passed()

    def wall(self) -> float:
        """Seconds since 1970."""
        return self.now() + self._offset

    def call_later(self, delay: float, callback: Callable[[], object]) -> _Timer:
        """Call `callback` once the clock has been moved by `delay` seconds."""
        timer = _Timer(self.now() + delay, callback, delay if self._running else None)
        with self._mutex:
            heapq.heappush(self._timers, (timer.when, next(self._count), timer))
            self._loop = timer.loop
        return timer

    async def advance(self, seconds: Duration) -> None:
        """Let `seconds` pass: the timers that fall due fire in their order, each at its time.

        Before the clock moves on, tasks that fire go on until they end or wait for the clock, and it waits for the
        real input and output that they do: of each fire for 5 seconds at most.

        Raises:
            SettingsValidationError: `seconds` is no number from 0 to ten years.
        """
        target = self.now() + check_seconds("seconds", seconds, zero=True)
        await self._settle()
        while (timer := self._next(target)) is not None:
            self._move_to(timer.when)
            timer.fire()
            await self._settle()
        self._move_to(target)
        self._hasten()
        await self._settle()

    @property
    def from_thread(self) -> "ThreadMovableClock":
        """The same clock for a test in another thread than that of the event loop which it serves."""
        return ThreadMovableClock(self)

    async def shift(self, seconds: Duration) -> None:
        """Jump by `seconds` as a machine does that was suspended: what fell due meanwhile fires only now, and late.

        Raises:
            SettingsValidationError: `seconds` is no number from 0 to ten years.
        """
        self._now += check_seconds("seconds", seconds, zero=True)
        while (timer := self._next(self.now())) is not None:
            timer.fire()
        self._hasten()
        await self._settle()

    def shift_wall(self, seconds: Duration) -> None:
        """Set the wall clock forward, or back, as an administrator or a time server does; leases are not touched.

        Args:
            seconds: how far; less than 0 sets it back.

        Raises:
            SettingsValidationError: `seconds` is no finite number.
        """
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not math.isfinite(seconds):
            raise SettingsValidationError(
                "shift_wall(): seconds should be a finite number: give how far to set the clock, such as 3600 or -3600"
            )
        self._offset += seconds

    @contextmanager
    def working(self) -> Iterator[None]:
        """See `grelmicro.clock.working`."""
        work = _Work()
        token = _work.set(work)
        self._works.add(work)
        try:
            yield
        finally:
            self._works.discard(work)
            self._ended += 1
            _work.reset(token)

    def _passed(self) -> float:
        """Seconds that pass without the clock being moved."""
        return SYSTEM_CLOCK.now() if self._running else 0.0

    def _move_to(self, when: float) -> None:
        self._now = max(self._now, when - self._passed())  # another task may let time pass as well

    def _hasten(self) -> None:
        """Let what is to come be as much nearer as the clock was moved."""
        if self._running:
            with self._mutex:
                timers = [timer for _, _, timer in self._timers]
            for timer in timers:
                timer.hasten(max(timer.when - self.now(), 0.0))

    async def _settle(self) -> None:
        """Let everything go on until it waits for the clock, or for what tests do."""
        until = monotonic() + WORK_LIMIT
        while True:
            ended = self._ended
            await _let_run()
            if busy := self._busy():
                if monotonic() > until:
                    for work in busy:
                        work.awaited = False
                    return
                await asyncio.sleep(WORK_POLL)
            elif self._ended == ended:  # else what follows that work has not had all rounds
                return

    def _busy(self) -> list[_Work]:
        """What the clock waits for: not for the work that moves it."""
        mine = _work.get()
        return [work for work in tuple(self._works) if work is not mine and work.busy]

    def _next(self, until: float) -> _Timer | None:
        """The next timer that is due by then."""
        with self._mutex:
            if self._timers and self._timers[0][0] <= until:
                return heapq.heappop(self._timers)[2]
            return None


class ThreadMovableClock:
    """Moves a `MovableClock` on the event loop that uses it, and waits for that."""

    def __init__(self, clock: MovableClock) -> None:
        self._clock = clock

    def advance(self, seconds: Duration) -> None:
        """See `MovableClock.advance`.

        Raises:
            SettingsValidationError: `seconds` is no number from 0 to ten years.
            OutOfContextError: this is the loop's own thread: there, await that.
        """
        self._move(self._clock.advance(seconds))

    def shift(self, seconds: Duration) -> None:
        """See `MovableClock.shift`.

        Raises:
            SettingsValidationError: `seconds` is no number from 0 to ten years.
            OutOfContextError: this is the loop's own thread: there, await that.
        """
        self._move(self._clock.shift(seconds))

    def _move(self, move: Coroutine[Any, Any, None]) -> None:
        loop = self._clock._loop
        if loop is None or not loop.is_running():  # nobody waits for it
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                asyncio.run(move)
                return
        call(loop, move)


async def _let_run() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
