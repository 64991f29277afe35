"""A clock that the test moves, and stores that it waits for before it moves the clock on."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
from tests.helpers.stores import Apply, Fault, TroubledStore
from tests.helpers.worlds import World

T = TypeVar("T")

STEP = 0.25
"""Seconds by which the clock moves at a time: less than what a test tells apart."""


def takes(clock: MovableClock, *, request: float = 0.0, reply: float = 0.0) -> Fault:
    """The request takes `request` seconds of the clock to arrive, its reply takes `reply`."""

    async def fault(apply: Apply) -> object:
        await pause(clock, request)
        answer = await apply()
        await pause(clock, reply)
        return answer

    return fault


def stalled_until(clock: MovableClock, when: float) -> Fault:
    """The store carries out nothing before then."""

    async def fault(apply: Apply) -> object:
        await pause(clock, when - clock.now())
        return await apply()

    return fault


async def pause(clock: MovableClock, seconds: float) -> None:
    """Wait until the clock has been moved by `seconds`."""
    if seconds > 0:
        moved = asyncio.Event()
        timer = clock.call_later(seconds, moved.set)
        try:
            await moved.wait()
        finally:
            timer.cancel()


class CountedStore(TroubledStore):
    """It knows how many requests the store itself is working on, so that the clock need not move meanwhile."""

    busy = 0
    live_until = 0.0
    """When the lease ends that the store told of last, whether or not the answer arrived."""

    async def open(self) -> None:
        await self._count(super().open)

    async def close(self) -> None:
        await self._count(super().close)

    async def _send(self, operation: str, apply: Callable[[], Awaitable[T]]) -> T:
        return await super()._send(operation, lambda: self._count(apply))

    async def _count(self, work: Callable[[], Awaitable[T]]) -> T:
        self.busy += 1
        try:
            answer = await work()
        finally:
            self.busy -= 1
        if isinstance(answer, Lease) and answer.live:
            self.live_until = self.clock.now() + answer.remaining
        return answer


class UnorderedCountedStore(CountedStore):
    """One whose requests can overtake each other."""

    ordered = False


class Timeline:
    """The time in which several clients of one world live."""

    def __init__(self, world: World, clock: MovableClock) -> None:
        self.world = world
        self.clock = clock
        self.stores: list[CountedStore] = []

    def connect(self, *, ordered: bool = True) -> CountedStore:
        """A connection to the store, for one client."""
        store = (CountedStore if ordered else UnorderedCountedStore)(self.world.store())
        self.stores.append(store)
        return store

    async def let_pass(self, seconds: float, *, step: float = STEP) -> None:
        """Move the clock, and let everybody do at each step what falls due."""
        until = self.clock.now() + seconds
        await self.settle()
        while (left := until - self.clock.now()) > 1e-9:
            await self.clock.advance(min(step, left))
            await self.settle()
            await self.check()

    async def settle(self) -> None:
        """Let everybody go on until all wait for the clock or for each other."""
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if not any(store.busy for store in self.stores):
                return
            await asyncio.sleep(0.0005)

    async def check(self) -> None:
        """Look after each step whether what must always hold does."""
