"""A lease that a thread took is its holder's also where a pool of threads carries its work out, here and there."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from grelmicro.coordination import (
    Lock,
    LockLostError,
    LockNotOwnedError,
    LockTimeoutError,
    TaskLock,
    ThreadLockHandle,
    WouldBlockError,
)
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World, eventually, pass_by

LONG = 3600.0


@contextmanager
def guard(lock: Lock | TaskLock) -> Iterator[ThreadLockHandle]:
    """A block around a yield, as a dependency of a framework has it."""
    with lock.from_thread as held:
        yield held


@pytest.mark.parametrize("kind", [Lock, TaskLock])
@pytest.mark.parametrize("ended", [False, True], ids=["its thread lives", "its thread ended"])
async def test_a_block_can_end_in_another_thread(
    world: World, clock: MovableClock, ended: bool, kind: type[Lock] | type[TaskLock]
) -> None:
    loop = asyncio.get_running_loop()
    async with world.client() as client:
        lock = kind("cart", backend=client, lease_duration=9, auto_renew=True)
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
            block = guard(lock)
            held = await loop.run_in_executor(one, block.__enter__)
            if ended:
                await asyncio.to_thread(one.shutdown)
            await pass_by(clock, client, 30)
            assert held.valid
            await loop.run_in_executor(another, block.__exit__, None, None, None)
        assert not await lock.locked()
        assert not lock._held
        assert len(client.renewer) == 0


async def test_a_block_that_ends_in_another_thread_keeps_the_bodys_error(world: World, clock: MovableClock) -> None:
    loop = asyncio.get_running_loop()
    async with world.client() as client:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
            block = Lock("cart", backend=client, lease_duration=9).from_thread
            await loop.run_in_executor(one, block.__enter__)
            await clock.advance(10)
            error = ZeroDivisionError()
            await loop.run_in_executor(another, block.__exit__, ZeroDivisionError, error, None)
            assert ["its lease ran out" in note for note in error.__notes__] == [True]


async def test_a_strange_thread_cannot_end_another_threads_block(world: World) -> None:
    loop = asyncio.get_running_loop()
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
            block = lock.from_thread
            held = await loop.run_in_executor(one, block.__enter__)
            for act in (lock.from_thread.release, lock.from_thread.extend):
                with pytest.raises(LockNotOwnedError):
                    await loop.run_in_executor(another, act)
            with pytest.raises(LockNotOwnedError):
                await loop.run_in_executor(another, lock.from_thread.__exit__, None, None, None)
            assert held.valid
            await loop.run_in_executor(one, block.__exit__, None, None, None)
            assert not await lock.locked()


async def test_a_pool_serves_one_holder_after_another_with_one_thread(real_world: World) -> None:
    """A request that enters its block in the thread that another one's block was entered in waits for it."""
    async with real_world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        threads: set[int] = set()
        inside = most = 0

        def enter(block: Any) -> None:
            threads.add(threading.get_ident())
            block.__enter__()

        async def request() -> None:
            nonlocal inside, most
            block = guard(lock)
            await anyio.to_thread.run_sync(enter, block)
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1
            await anyio.to_thread.run_sync(block.__exit__, None, None, None)

        await asyncio.gather(request(), request())
        for _ in range(3):
            await asyncio.gather(*(request() for _ in range(6)))
        assert most == 1
        assert len(threads) < 26, "threads are used again"
        assert not lock._held


async def test_a_call_in_a_pool_does_not_act_for_the_one_before_it(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        with ThreadPoolExecutor(1) as pool:
            asyncio.get_running_loop().set_default_executor(pool)
            held = await asyncio.to_thread(lock.from_thread.acquire)
            for act in (lock.from_thread.release, lock.from_thread.extend):
                with pytest.raises(LockNotOwnedError):
                    await asyncio.to_thread(act)
            with pytest.raises(WouldBlockError):
                await asyncio.to_thread(lock.from_thread.acquire_nowait)
            await asyncio.to_thread(held.release)


async def test_what_a_call_in_a_pool_left_held_is_not_renewed(world: World, clock: MovableClock) -> None:
    """Its thread goes on to serve others."""
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        await asyncio.to_thread(lock.from_thread.acquire)
        gc.collect()
        # The thread drops the call a moment after it has given the result.
        await eventually(lambda: all(owner.done() for owner in lock._held), "the call has ended")
        await pass_by(clock, client, 9.5)
        assert len(client.renewer) == 0
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_threads_handle_guards_a_block(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9)
        theirs = Lock("cart", backend=other, lease_duration=LONG)

        def work() -> None:
            with lock.from_thread.acquire(timeout=5) as held:
                assert held.valid
            with pytest.raises(ZeroDivisionError), lock.from_thread.acquire_nowait():
                raise ZeroDivisionError
            with lock.from_thread.acquire(timeout=5) as held:
                held.release()

        def lose() -> None:
            loop = client.get_loop()
            with pytest.raises(LockLostError), lock.from_thread.acquire(timeout=5):
                asyncio.run_coroutine_threadsafe(clock.advance(10), loop).result(10)

        def busy() -> None:
            with pytest.raises(LockTimeoutError), lock.from_thread.acquire(timeout=0):
                raise AssertionError

        await asyncio.to_thread(work)
        assert not await theirs.locked()
        await asyncio.to_thread(lose)
        await theirs.acquire()
        await asyncio.to_thread(busy)
        assert not lock._held
