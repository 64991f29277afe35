"""What is measured, on anything that has `acquire` and `release`. Times are seconds."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

BODY = 0.001
"""Seconds for which each of several competing tasks keeps the lock."""


class Guard(Protocol):
    """A lock, as far as it is measured."""

    async def acquire(self) -> object: ...

    async def release(self) -> object: ...


class Measurements:
    """The commands of a worker.

    Args:
        make: builds a lock of that name; locks of one name exclude each other.
        build: builds a lock as an application would, for the time that it takes.
        calls: how often the store was called and probed, if that is counted.
    """

    def __init__(self, make: Callable[[str], Guard], build: Callable[[str], object], calls: Counter[str]) -> None:
        self._make = make
        self._build = build
        self._calls = calls
        self._shared = make("shared")
        self._built = 0

    async def ready(self) -> None:
        """Nothing: the answer says that the process has started."""

    async def pairs(self, count: int) -> list[float]:
        """How long each uncontended acquisition with its release took."""
        lock = self._make("pair")
        for _ in range(20):
            await lock.acquire()
            await lock.release()
        samples = []
        for _ in range(count):
            start = perf_counter()
            await lock.acquire()
            await lock.release()
            samples.append(perf_counter() - start)
        return samples

    async def handovers(self, count: int, shortest: float, longest: float) -> list[float]:
        """From the begin of each release to the moment at which the next holder runs, in this process.

        The lock is kept for a random time in between, so that a waiter who polls is met anywhere in its pause.
        """
        holder, waiter = self._make("handover"), self._make("handover")
        samples = []
        for _ in range(count):
            await holder.acquire()
            waiting = asyncio.create_task(_arrival(waiter))
            await asyncio.sleep(random.uniform(shortest, longest))
            start = time.monotonic()
            await holder.release()
            samples.append(await waiting - start)
        return samples

    async def take(self) -> None:
        """Take what `wait` in another process waits for."""
        await self._shared.acquire()

    async def give(self) -> float:
        """Release it; the moment before that, on the clock that all processes share."""
        start = time.monotonic()
        await self._shared.release()
        return start

    async def wait(self) -> float:
        """Wait for it; the moment of the grant, on that clock."""
        return await _arrival(self._shared)

    async def contended(self, tasks: int, each: int) -> dict[str, float]:
        """Let tasks compete: how many grants in how many seconds, and how long a body really was."""
        bodies: list[float] = []
        start = perf_counter()
        await asyncio.gather(*(_compete(self._make("contended"), each, bodies) for _ in range(tasks)))
        return {"grants": len(bodies), "seconds": perf_counter() - start, "body": sum(bodies) / len(bodies)}

    async def construct(self, count: int) -> float:
        """How long it takes to build a lock with a name made for one request."""
        start = perf_counter()
        for number in range(self._built, self._built + count):
            self._build(f"order:{number}")
        self._built += count
        return (perf_counter() - start) / count

    async def waiters(self, count: int, settle: float, seconds: float) -> dict[str, float]:
        """Let some wait for a lock that stays taken: calls and probes of the store, and seconds of processor time.

        What happens in the first `settle` seconds does not count; with 0 each waiter's first try does.
        """
        holder = self._make("kept")
        await holder.acquire()
        before = self._spent()
        waiting = [asyncio.create_task(self._make("kept").acquire()) for _ in range(count)]
        if settle:
            await asyncio.sleep(settle)
            before = self._spent()
        await asyncio.sleep(seconds)
        after = self._spent()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await holder.release()
        return {what: after[what] - before[what] for what in after}

    def _spent(self) -> dict[str, float]:
        return {
            "calls": self._calls["calls"],
            "probes": self._calls["probes"],
            "processor": time.process_time(),
            "seconds": perf_counter(),
        }


async def _arrival(lock: Guard) -> float:
    await lock.acquire()
    arrived_at = time.monotonic()
    await lock.release()
    return arrived_at


async def _compete(lock: Guard, each: int, bodies: list[float]) -> None:
    for _ in range(each):
        await lock.acquire()
        start = perf_counter()
        await asyncio.sleep(BODY)
        bodies.append(perf_counter() - start)
        await lock.release()
