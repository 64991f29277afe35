"""A lease is its holder's also where another task did the work, or ends it."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

import pytest

from grelmicro.coordination import (
    Lock,
    LockHandle,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    TaskLock,
    WouldBlockError,
)
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World, eventually, pass_by

LONG = 3600.0

T = TypeVar("T")

Wrap = Callable[[Coroutine[Any, Any, T]], Coroutine[Any, Any, T]]


async def in_task(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.create_task(work)


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.shield(work)


async def waited_for(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wait_for(work, 5)


WRAPS: list[Wrap[Any]] = [in_task, shielded, waited_for]


@pytest.mark.parametrize("wrap", WRAPS)
async def test_who_asks_is_the_holder_though_another_task_does_the_work(
    world: World, clock: MovableClock, wrap: Wrap[Any]
) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        for acquire in (lock.acquire, lock.acquire_nowait):
            await wrap(acquire())
            gc.collect()
            await pass_by(clock, client, 30)
            assert await lock.owned()
            assert await wrap(lock.owned())
            with pytest.raises(LockReentrantError):
                await lock.acquire()
            with pytest.raises(WouldBlockError):
                await Lock("cart", backend=other).acquire_nowait()
            assert (await wrap(lock.extend())).valid
            await lock.release()
            await wrap(lock.acquire())
            await wrap(lock.release())
            assert not await lock.locked()
        assert not lock._held


@pytest.mark.parametrize("wrap", WRAPS)
async def test_a_task_lock_is_refreshed_through_another_task(world: World, wrap: Wrap[Any]) -> None:
    async with world.client() as client:
        lock = TaskLock("report", backend=client)
        async with lock as held:
            assert await wrap(lock.refresh()) is held


async def test_who_asks_may_wait_for_itself_in_another_task(world: World) -> None:
    """It is no self-deadlock: it can release what it holds meanwhile."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        first = await lock.acquire()
        waiting = asyncio.create_task(lock.acquire())
        await eventually(lambda: client.queues.lines, "it waits")
        await lock.release()
        second = await waiting
        assert second.fencing_token == first.fencing_token + 1
        await lock.release()
        assert second.released


async def test_where_who_asked_has_ended_only_the_handle_counts(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        blocker = await Lock("cart", backend=client).acquire()

        async def ask() -> asyncio.Task[LockHandle]:
            return asyncio.create_task(lock.acquire())

        waiting = await asyncio.create_task(ask())
        await eventually(lambda: client.queues.lines, "it waits")
        await blocker.release()
        handle = await waiting
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        await handle.release()


async def test_a_lease_goes_on_while_somebody_has_its_handle(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its task has ended; the handle is what counts, and without it nothing can end the lease but time."""
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)

        async def take() -> LockHandle:
            return await lock.acquire()

        handle: LockHandle | None = await asyncio.create_task(take())
        await pass_by(clock, client, 30)
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        assert handle is not None
        assert handle.valid
        gc.disable()
        try:
            handle = None
            assert len(client.renewer) == 0
        finally:
            gc.enable()
        assert "was dropped without a release" in caplog.text
        await pass_by(clock, client, 9.5)
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_block_can_end_in_another_task(world: World, clock: MovableClock) -> None:
    """As that of a fixture does, and an exit stack that is shielded while it closes."""
    async with world.client() as client, world.client() as other:
        for lock in (
            Lock("cart", backend=client, lease_duration=9, auto_renew=True),
            TaskLock("cart", backend=client, lease_duration=9, min_hold_duration=0.01, auto_renew=True),
        ):
            stack = AsyncExitStack()
            handle = await asyncio.create_task(stack.enter_async_context(lock))
            await pass_by(clock, client, 30)
            assert handle.valid
            await stack.aclose()
            assert handle.released
            handle = await stack.enter_async_context(lock)
            await asyncio.shield(stack.aclose())
            assert handle.released
            assert not lock._blocks
            assert not lock._held
        assert not await Lock("cart", backend=other).locked()


async def test_a_block_that_ends_in_another_task_tells_its_loss(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        stack = AsyncExitStack()
        handle = await asyncio.create_task(stack.enter_async_context(lock))
        await client.release(handle.lease)
        await pass_by(clock, client, 9)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        with pytest.raises(LockLostError):
            await stack.aclose()


async def test_another_cancellation_is_not_taken_for_the_loss(world: World, clock: MovableClock) -> None:
    """The block was entered by a task that was cancelled for the loss; who leaves it was cancelled by somebody else."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        entered = asyncio.Event()

        async def enter() -> None:
            await lock.__aenter__()
            entered.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        entering = asyncio.create_task(enter())
        await entered.wait()
        await client.release(lock._blocks[0].lease)
        await pass_by(clock, client, 9)
        await entering
        cancelled = asyncio.CancelledError()
        assert not await lock.__aexit__(asyncio.CancelledError, cancelled, None)  # type: ignore[func-returns-value]
        assert len(cancelled.__notes__) == 1


async def test_a_block_that_nobody_entered_cannot_be_left(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()

        async def stranger() -> None:
            with pytest.raises(LockNotOwnedError, match="released at the end of its block"):
                await lock.__aexit__(None, None, None)

        def strange_thread() -> None:
            with pytest.raises(LockNotOwnedError, match="released at the end of its block"):
                lock.from_thread.__exit__(None, None, None)

        await asyncio.create_task(stranger())
        await asyncio.to_thread(strange_thread)
        assert handle.valid
        assert await lock.locked()


async def test_which_of_two_blocks_a_stranger_leaves_is_not_guessed(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9)
        go = [asyncio.Event(), asyncio.Event()]
        handles: list[LockHandle] = []

        async def block(end: asyncio.Event) -> None:
            async with lock as handle:
                handles.append(handle)
                await end.wait()

        first = asyncio.create_task(block(go[0]))
        await eventually(lambda: len(handles) == 1, "the first is in")
        await clock.advance(10)
        second = asyncio.create_task(block(go[1]))
        await eventually(lambda: len(handles) == 2, "the second is in")
        with pytest.raises(LockNotOwnedError):
            await lock.__aexit__(None, None, None)
        assert handles[1].valid
        for end in go:
            end.set()
        with pytest.raises(LockLostError):
            await first
        await second
        assert handles[1].released


async def test_a_stranger_leaves_the_block_of_a_task_that_has_ended(world: World, clock: MovableClock) -> None:
    """The task of the other one is there to leave it itself."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9)
        entered, end = asyncio.Event(), asyncio.Event()

        async def block() -> None:
            async with lock:
                entered.set()
                await end.wait()

        lost = asyncio.create_task(block())
        await entered.wait()
        await clock.advance(10)
        handle = await asyncio.create_task(lock.__aenter__())
        await lock.__aexit__(None, None, None)
        assert handle.released
        end.set()
        with pytest.raises(LockLostError):
            await lost
