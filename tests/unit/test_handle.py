"""A handle is a held lease: its deadline is on the safe side, it tells the truth, and never takes anything again."""

import asyncio
import copy
import pickle
from typing import Any, cast

import pytest

from grelmicro.coordination import (
    BackendUnavailableError,
    Lock,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.primitive import SHORTEST_CYCLE
from grelmicro.errors import OutOfContextError
from grelmicro.leases import Lease
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Gate, TroubledStore, late
from tests.helpers.worlds import World, eventually

LONG = 3600.0


async def test_the_deadline_counts_from_before_the_request(world: World, clock: MovableClock) -> None:
    """A late reply shortens what is left of the lease; a share is given up for clocks of different speed."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        gate = Gate(after=True)
        store.suffer("acquire", gate)
        asking = asyncio.create_task(Lock("cart", backend=client, lease_duration=10).acquire())
        await gate.arrived.wait()
        await clock.advance(4)
        gate.open.set()
        handle = await asking
        assert handle.expires_in == pytest.approx(10 * 0.99 - 4)


async def test_a_late_renewal_counts_from_before_it_was_sent(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client, lease_duration=10).acquire()
        gate = Gate(after=True)
        store.suffer("renew", gate)
        extending = asyncio.create_task(handle.extend())
        await gate.arrived.wait()
        await clock.advance(6)
        gate.open.set()
        await extending
        assert handle.expires_in == pytest.approx(10 * 0.99 - 6)


async def test_a_handle_ends_before_the_lease_does(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        handle = await Lock("cart", backend=client, lease_duration=100).acquire()
        await clock.advance(99.5)
        assert not handle.valid
        assert handle.expires_in == 0
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        await clock.advance(1)
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_grant_older_than_the_lease_is_none(world: World, clock: MovableClock) -> None:
    """A process that slept between the store's answer and its own next step holds nothing, and goes on waiting."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=10)
        gate = Gate(after=True)
        store.suffer("acquire", gate)
        asking = asyncio.create_task(lock.acquire(timeout=60))
        await gate.arrived.wait()
        await clock.advance(11)
        winner = await Lock("cart", backend=other, lease_duration=10).acquire()
        gate.open.set()
        await clock.advance(0)
        await asyncio.sleep(0.05)
        assert not asking.done()
        await winner.release()
        handle = await asyncio.wait_for(asking, 5)
        assert handle.fencing_token > winner.fencing_token
        assert handle.valid


async def test_a_grant_older_than_the_lease_is_asked_for_again_at_once(world: World, clock: MovableClock) -> None:
    """When nobody took it meanwhile, the caller does not wait out a lease that is nobody's."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        subscribing, answering = Gate(), Gate(after=True)
        store.suffer("watch", subscribing)
        store.suffer("acquire", late(), answering)
        asking = asyncio.create_task(Lock("cart", backend=client, lease_duration=10).acquire())
        await subscribing.arrived.wait()
        await held.release()
        subscribing.open.set()
        await answering.arrived.wait()
        await clock.advance(11)
        answering.open.set()
        await eventually(lambda: store.calls["release"], "the late answer is used for nothing")
        for _ in range(5):
            await asyncio.sleep(0.01)
            await clock.advance(0.01)
        assert (await asyncio.wait_for(asking, 5)).valid


class LateStore(TroubledStore):
    """Each answer to an acquire comes when the lease has run out."""

    async def acquire(self, *args: Any, **options: Any) -> Lease:
        lease = await super().acquire(*args, **options)
        await cast(MovableClock, self.clock).advance(0.03)
        return lease


async def test_who_waits_while_every_answer_is_older_than_the_lease_asks_now_and_then(
    world: World, clock: MovableClock
) -> None:
    store = LateStore(world.troubled().inner)
    async with LockAdapter(store) as client:
        asking = asyncio.create_task(Lock("cart", backend=client, lease_duration=0.02).acquire())
        await eventually(lambda: store.calls["acquire"] >= 2, "it is asked")
        began, before = clock.now(), store.calls["acquire"]

        while store.calls["acquire"] < before + 10:
            await clock.advance(0.01)
            await asyncio.sleep(0.001)
        assert clock.now() - began > 9 * SHORTEST_CYCLE
        asking.cancel()
        await asyncio.wait({asking})


async def test_one_try_whose_answer_is_older_than_the_lease_is_not_called_busy(
    world: World, clock: MovableClock
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        gate = Gate(after=True)
        store.suffer("acquire", gate)
        asking = asyncio.create_task(Lock("cart", backend=client, lease_duration=10).acquire_nowait())
        await gate.arrived.wait()
        await clock.advance(9.95)
        gate.open.set()
        with pytest.raises(BackendUnavailableError, match="the store's answer came when the lease had run out"):
            await asking
        await Lock("cart", backend=other).acquire_nowait()


async def test_extending_after_the_end_takes_nothing_again(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=10)
        handle = await lock.acquire()
        await clock.advance(11)
        with pytest.raises(LockNotOwnedError, match="its lease ran out"):
            await handle.extend()
        with pytest.raises(LockNotOwnedError):
            await lock.extend()
        assert not await lock.locked()
        assert not await lock.owned()
        again = await lock.acquire_nowait()
        assert again.fencing_token == handle.fencing_token + 1
        with pytest.raises(LockNotOwnedError):
            await handle.extend()
        with pytest.raises(LockNotOwnedError):
            await handle.release()
        assert await lock.owned()
        assert handle.lost
        assert again.valid


async def test_extending_lasts_the_whole_duration_under_one_fence(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=10)
        handle = await lock.acquire()
        fence = handle.fencing_token
        for _ in range(5):
            await clock.advance(8)
            assert await lock.extend() is handle
            assert handle.expires_in == pytest.approx(9.9)
            assert handle.fencing_token == fence
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()


async def test_a_lease_of_a_fifth_of_a_second_lasts_that_long(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        await Lock("cart", backend=client, lease_duration=0.2).acquire()
        await clock.advance(0.199)
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        await clock.advance(0.002)
        await Lock("cart", backend=other).acquire_nowait()


async def test_releasing_twice_is_refused(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client)
        handle = await lock.acquire()
        await handle.release()
        with pytest.raises(LockNotOwnedError, match="is released already: acquire it again"):
            await handle.release()
        with pytest.raises(LockNotOwnedError, match="this task or thread does not hold it"):
            await lock.release()
        with pytest.raises(LockNotOwnedError, match="it is released; acquire it again"):
            await handle.extend()
        assert handle.released
        assert not handle.lost
        handle.raise_if_lost()


async def test_giving_back_what_was_taken_away_is_told(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client).acquire()
        assert await store.inner.release(handle.lease)  # by an operator
        assert handle.valid, "nobody knows here"
        with pytest.raises(LockNotOwnedError, match="it expired or was taken over"):
            await handle.release()
        assert handle.lost


async def test_a_stranger_cannot_act_for_the_holder(world: World) -> None:
    """Neither another task nor another lock of the same name and worker holds what a task of this lock does."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, worker="web-1")
        twin = Lock("cart", backend=client, worker="web-1")
        handle = await lock.acquire()

        async def strange() -> None:
            for stranger in (lock, twin):
                with pytest.raises(LockNotOwnedError):
                    await stranger.release()
                with pytest.raises(LockNotOwnedError):
                    await stranger.extend()
                with pytest.raises(WouldBlockError):
                    await stranger.acquire_nowait()
                assert not await stranger.owned()

        await asyncio.create_task(strange())
        with pytest.raises(WouldBlockError):
            await twin.acquire_nowait()
        assert await lock.owned()
        assert handle.valid


async def test_a_handle_works_from_any_task_and_thread(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client)
        handle = await lock.acquire()
        await asyncio.create_task(handle.extend())
        await asyncio.to_thread(handle.from_thread.extend)
        await asyncio.to_thread(handle.from_thread.release)
        assert handle.released
        assert not await lock.locked()
        await (await lock.acquire()).release()


async def test_a_lock_is_not_reentrant(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=10)
        await lock.acquire()
        for again in (lock.acquire, lock.acquire_nowait, lock.__aenter__):
            with pytest.raises(LockReentrantError):
                await again()
        await clock.advance(11)
        handle = await lock.acquire_nowait()
        assert handle.valid, "what was lost is not held any more"


async def test_a_thread_is_not_reentrant_and_no_stranger_to_itself(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client)

        def work() -> None:
            with lock.from_thread:
                with pytest.raises(LockReentrantError):
                    lock.from_thread.acquire()
                with pytest.raises(LockReentrantError):
                    lock.from_thread.acquire_nowait()
                lock.from_thread.extend()
                assert lock.from_thread.owned()

        await asyncio.to_thread(work)
        assert not await lock.locked()


async def test_waiting_for_the_loss_ends_at_the_deadline(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        handle = await Lock("cart", backend=client, lease_duration=10).acquire()
        waiting = asyncio.create_task(handle.wait_lost())
        await clock.advance(5)
        await handle.extend()
        await clock.advance(9.8)
        assert not waiting.done()
        await clock.advance(0.2)
        await asyncio.wait_for(waiting, 5)
        with pytest.raises(LockLostError):
            handle.raise_if_lost()


async def test_waiting_for_the_loss_ends_with_a_release_and_with_a_loss(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()
        waiting = [asyncio.create_task(handle.wait_lost()) for _ in range(3)]
        await asyncio.sleep(0)
        await handle.release()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        taken = await lock.acquire()
        waiting = [asyncio.create_task(taken.wait_lost()) for _ in range(3)]
        await client.release(taken.lease)
        with pytest.raises(LockNotOwnedError):
            await taken.extend()
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        await taken.wait_lost()


async def test_after_its_app_closed_a_handle_says_so(world: World) -> None:
    client = world.client()
    async with client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()
    for act in (handle.extend, handle.release):
        with pytest.raises(LockNotOwnedError, match="gave it back; stop the guarded work, and keep the app open until"):
            await act()
    for use in (lock.acquire, lock.locked):
        with pytest.raises(OutOfContextError, match="LockAdapter is not open: use it inside `async with`"):
            await use()
    async with client:
        assert not await lock.locked()


async def test_a_handle_cannot_be_sent_to_another_process(world: World) -> None:
    text = "the handle of lock 'cart' cannot be copied or pickled: acquire the lock where it is needed"
    async with LockAdapter(world.store()) as client, Lock("cart", backend=client) as handle:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=text):
                copied(handle)
        with pytest.raises(TypeError, match=text):
            pickle.dumps(handle.from_thread)
