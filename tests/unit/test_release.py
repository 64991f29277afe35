"""A handle is not valid from the moment at which its release is begun, however the release ends."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from grelmicro.coordination import Lock, LockHandle, LockNotOwnedError, MultiLock, OutcomeUnknownError, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.events import listen
from tests.helpers.stores import Apply, Fault, Gate, reply_lost, request_lost
from tests.helpers.worlds import World, eventually

LONG = 3600.0

Break = Callable[[Gate, "asyncio.Task[None]"], Awaitable[None]]


async def cancelled(gate: Gate, releasing: "asyncio.Task[None]") -> None:
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing


async def failed(gate: Gate, releasing: "asyncio.Task[None]") -> None:
    gate.open.set()
    with pytest.raises(OutcomeUnknownError):
        await releasing


def check_over(handle: LockHandle) -> None:
    """It is over, and nothing was lost."""
    assert not handle.valid
    assert handle.expires_in == 0
    assert not handle.lost
    handle.raise_if_lost()


@pytest.mark.parametrize(("end", "fault"), [(cancelled, request_lost), (failed, request_lost), (failed, reply_lost)])
async def test_it_is_over_once_its_release_was_begun(world: World, end: Break, fault: Fault) -> None:
    seen: Counter[str] = Counter()
    stop = listen(lambda event: seen.update([event.kind]))
    store = world.troubled()
    try:
        async with LockAdapter(store) as client, world.client() as other:
            lock = Lock("cart", backend=client, lease_duration=LONG)
            handle = await lock.acquire()
            waiting = asyncio.create_task(handle.wait_lost())
            gate = Gate()

            async def broken(apply: Apply) -> object:
                await gate(partial(asyncio.sleep, 0))
                return await fault(apply)

            store.suffer("release", broken)
            releasing = asyncio.create_task(handle.release())
            await gate.arrived.wait()
            check_over(handle)
            with pytest.raises(LockNotOwnedError, match="cannot be extended: it is released"):
                await handle.extend()
            await end(gate, releasing)
            await asyncio.wait_for(waiting, 10)
            check_over(handle)
            assert seen["held"] == 1
            theirs = await Lock("cart", backend=other).acquire(timeout=10)
            check_over(handle)
            await handle.release()
            assert handle.released
            assert theirs.valid
            await theirs.release()
            async with lock:
                assert seen["held"] == 2
            assert seen["lost"] == 0
            await eventually(lambda: not client._background, "the repetition has ended")
    finally:
        stop()


async def test_a_block_whose_release_was_cancelled_ends_without_an_error(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = Lock("cart", backend=client, lease_duration=LONG, auto_renew=True)
        async with lock as handle:
            store.suffer("release", Gate())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await handle.release()
        assert handle.released
        await eventually(lambda: not client._background, "the repetition has ended")


async def test_several_are_over_once_the_release_of_one_was_begun(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        held = await MultiLock(*(Lock(name, backend=client, lease_duration=LONG) for name in "ab")).acquire()
        gate = Gate()
        store.suffer("release", gate)
        releasing = asyncio.create_task(held.release())
        await gate.arrived.wait()
        assert not held.valid
        assert not held.lost
        assert not held.from_thread.valid
        gate.open.set()
        await releasing


async def test_a_task_lock_is_over_once_it_is_left(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        gate = Gate()
        lock = TaskLock("report", backend=client, min_hold_duration=10)
        handle = await lock.__aenter__()
        store.suffer("renew", gate)
        leaving = asyncio.create_task(handle.leave(None, lock._end))
        await gate.arrived.wait()
        check_over(handle)
        gate.open.set()
        await leaving
        check_over(handle)
