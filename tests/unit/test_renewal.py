"""A renewed lease lasts as long as its holder, no longer, and at the cost of one call for all."""

import asyncio
import gc
import logging
import threading
from contextvars import ContextVar

import pytest

from grelmicro.coordination import (
    Lock,
    LockHandle,
    LockLostError,
    LockNotOwnedError,
    OutcomeUnknownError,
    TaskLock,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.events import Event, listen
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Apply, Gate, reply_lost, request_lost, silence
from tests.helpers.worlds import World, eventually, pass_by


async def test_a_renewed_lease_lasts(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        async with lock as handle:
            fence = handle.fencing_token
            await pass_by(clock, client, 60)
            assert handle.valid
            assert handle.fencing_token == fence
            with pytest.raises(WouldBlockError):
                await Lock("cart", backend=other).acquire_nowait()
            assert 18 <= store.calls["renew_many"] <= 22, "at a third of the lease"
        assert len(client.renewer) == 0
        await Lock("cart", backend=other).acquire_nowait()
        renewed = store.calls["renew_many"]
        await clock.advance(30)
        assert store.calls["renew_many"] == renewed


async def test_without_renewal_a_lease_ends(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        await Lock("cart", backend=client, lease_duration=9).acquire()
        await clock.advance(10)
        assert store.calls["renew_many"] == 0
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_hundred_leases_are_renewed_in_one_call(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        locks = [Lock(f"order:{n}", backend=client, lease_duration=9, auto_renew=True) for n in range(100)]
        handles = [await lock.acquire() for lock in locks]
        await pass_by(clock, client, 30, step=1)
        assert all(handle.valid for handle in handles)
        assert 9 <= store.calls["renew_many"] <= 11
        assert store.calls["renew"] == 0
        await asyncio.gather(*(handle.release() for handle in handles))


async def test_a_renewal_that_is_never_answered_is_given_up_in_time(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire()
        for _ in range(3):
            store.suffer("renew_many", silence)
            await pass_by(clock, client, 9, step=1.0)
            assert handle.valid
        await handle.release()


async def test_an_unknown_renewal_is_tried_again_in_time(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire()
        for _ in range(10):
            store.suffer("renew_many", reply_lost, request_lost)
            await pass_by(clock, client, 6)
            assert handle.valid
        await handle.release()


async def test_replies_that_take_long_never_stretch_the_deadline(world: World, clock: MovableClock) -> None:
    """At each moment the holder's deadline is before the end of the lease in the store."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client, lease_duration=10, auto_renew=True).acquire()
        for _ in range(6):
            gate = Gate(after=True)
            store.suffer("renew_many", gate)
            while not gate.arrived.is_set():
                await clock.advance(0.1)
                await asyncio.sleep(0.005)
            await clock.advance(2)
            gate.open.set()
            await asyncio.sleep(0.01)
            record = await store.inner.read("lock:cart")
            assert record is not None
            assert handle.expires_in < record.remaining
        await handle.release()


async def test_a_hold_never_exceeds_its_limit(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True, max_hold=20)
        handle = await lock.acquire()
        began = clock.now()
        while handle.valid:
            await pass_by(clock, client, 0.1, step=0.1)
            record = await other.read("lock:cart")
            assert record is not None
            assert clock.now() + record.remaining <= began + 20.001
        assert 19.5 < clock.now() - began < 20.001
        with pytest.raises(LockLostError, match="it was held for max_hold"):
            handle.raise_if_lost()
        await clock.advance(0.5)
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_limit_below_the_lease_shortens_it(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        handle = await Lock("cart", backend=client, lease_duration=60, max_hold=5).acquire()
        await clock.advance(4)
        await handle.extend()
        assert handle.expires_in < 1
        await clock.advance(1.1)
        await Lock("cart", backend=other).acquire_nowait()


async def test_renewal_ends_with_its_task(world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)

        async def leave_held() -> LockHandle:
            return await lock.acquire()

        gc.disable()  # a handle ends with its last reference, not at the next collection
        try:
            await asyncio.create_task(leave_held())
            await pass_by(clock, client, 9.5)
        finally:
            gc.enable()
        assert len(client.renewer) == 0
        assert "was dropped without a release: its lease is not renewed" in caplog.text
        await Lock("cart", backend=other).acquire_nowait()


async def test_renewal_ends_with_its_thread_and_not_before(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        finish = threading.Event()

        def work() -> None:
            lock.from_thread.acquire()
            finish.wait(30)

        thread = threading.Thread(target=work)
        thread.start()
        await eventually(lambda: len(client.renewer), "the thread holds it")
        await pass_by(clock, client, 30)
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        finish.set()
        await asyncio.to_thread(thread.join)
        await pass_by(clock, client, 9.5)
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_dropped_handle_is_not_renewed(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:

        async def acquire(name: str) -> LockHandle:
            return await Lock(name, backend=client, lease_duration=9, auto_renew=True).acquire()

        kept = [await acquire(f"kept:{number}") for number in range(20)]
        dropped = [await acquire(f"dropped:{number}") for number in range(20)]
        for _ in range(9):
            gc.collect()
            await pass_by(clock, client, 1)
        gc.disable()  # a handle ends with its last reference, not at the next collection
        try:
            dropped.clear()
            assert len(client.renewer) == 20
        finally:
            gc.enable()
        assert caplog.text.count("was dropped without a release") == 20
        await pass_by(clock, client, 18)
        assert all(handle.valid for handle in kept)
        await Lock("dropped:0", backend=other).acquire_nowait()
        with pytest.raises(WouldBlockError):
            await Lock("kept:0", backend=other).acquire_nowait()
        await asyncio.gather(*(handle.release() for handle in kept))


@pytest.mark.parametrize("after", [False, True], ids=["request under way", "reply under way"])
async def test_no_renewal_moves_a_lease_after_its_release(world: World, clock: MovableClock, after: bool) -> None:
    store = world.troubled(ordered=False)
    told: list[Event] = []
    stop = listen(told.append)
    async with LockAdapter(store) as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        handle = await lock.acquire()
        gate = Gate(after=after)
        store.suffer("renew_many", gate)
        await clock.advance(3.1)
        await eventually(gate.arrived.is_set, "it is renewed")
        await handle.release()
        gate.open.set()
        await asyncio.sleep(0.02)
        record = await other.read("lock:cart")
        assert record is not None
        assert not record.live
        assert handle.released
        assert not handle.lost
        assert len(client.renewer) == 0
    stop()
    assert [event.kind for event in told] == ["acquired", "held"]


async def test_a_thousand_short_holds_leave_nothing_to_renew(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=0.015, auto_renew=True)
        count = 1000 if world.kind == "memory" else 100
        for _ in range(count):
            async with lock:
                pass
        assert len(client.renewer) == 0
        await asyncio.sleep(0.01)
        assert not client.renewer._calls


async def test_renewals_keep_nothing_of_the_request_that_began_them(world: World, clock: MovableClock) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[str] = []
    store = world.troubled()

    async def look(apply: Apply) -> object:
        seen.append(request.get())
        return await apply()

    async with LockAdapter(store) as client:
        request.set("a request")
        async with Lock("cart", backend=client, lease_duration=9, auto_renew=True):
            store.suffer("renew_many", look)
            await pass_by(clock, client, 4)
    assert seen == ["none"]


@pytest.mark.parametrize("automatic", [False, True])
async def test_a_renewal_that_shortens_counts_before_its_answer(
    world: World, clock: MovableClock, automatic: bool
) -> None:
    """A task that began late counts its hold, and with it the limit of it, from when it was due."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = TaskLock("job", backend=client, lease_duration=60, max_hold=60, auto_renew=automatic)
        async with lock as handle:
            handle.backdate(10)
            store.suffer("renew_many" if automatic else "renew", reply_lost)
            if automatic:
                await pass_by(clock, client, 20.5)
                assert store.calls["renew_many"] == 1
            else:
                with pytest.raises(OutcomeUnknownError):
                    await handle.extend()
            record = await store.inner.read("tasklock:job")
            assert record is not None
            assert handle.expires_in < record.remaining


async def test_what_reached_its_limit_is_not_extended_and_lasts_until_its_end(
    world: World, clock: MovableClock
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = TaskLock("job", backend=client, lease_duration=60, max_hold=60)
        async with lock as handle:
            handle.backdate(10)
            await clock.advance(55)
            with pytest.raises(LockNotOwnedError, match="reached its max_hold"):
                await handle.extend()
            assert handle.valid
            assert store.calls["renew"] == 0


async def test_the_answer_to_a_renewal_does_not_end_a_minimum_hold(world: World, clock: MovableClock) -> None:
    store = world.troubled(ordered=False)
    async with LockAdapter(store) as client, world.client() as other:
        gate = Gate(after=True)
        async with TaskLock("job", backend=client, lease_duration=60, min_hold_duration=60, auto_renew=True):
            store.suffer("renew_many", gate)
            await clock.advance(20.1)
            await eventually(gate.arrived.is_set, "it is renewed")
        gate.open.set()
        await asyncio.sleep(0.02)
        assert not client._background, "nothing is undone"
        record = await other.read("tasklock:job")
        assert record is not None
        assert record.remaining > 30


async def test_what_was_given_back_or_shortened_is_not_renewed(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        async with TaskLock("job", backend=client, lease_duration=9, min_hold_duration=5, auto_renew=True) as short:
            pass
        given_back = await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire()
        store.break_down(request_lost, "release")
        given_back.give_back()
        assert len(client.renewer) == 0
        await pass_by(clock, client, 9.5)
        assert store.calls["renew_many"] == 0
        assert short.released
        assert given_back.released
        await Lock("cart", backend=other).acquire_nowait()
        async with TaskLock("job", backend=other):
            pass
        store.heal()


async def test_what_was_lost_is_not_renewed(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire()
        await client.release(handle.lease)
        with pytest.raises(LockNotOwnedError):
            await handle.extend()
        assert handle.lost
        await pass_by(clock, client, 9.5)
        assert store.calls["renew_many"] == 0


async def test_a_hold_of_many_leases_is_told_once(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.client() as client:
        for _ in range(2):
            async with Lock("cart", backend=client, worker="web-1", lease_duration=9, auto_renew=True):
                await pass_by(clock, client, 44)
                assert "is held by worker" not in caplog.text
                await pass_by(clock, client, 50)
            (told,) = [record for record in caplog.records if "is held by worker" in record.getMessage()]
            assert told.levelno == logging.WARNING
            assert told.getMessage().startswith("lock:cart is held by worker 'web-1' for ")
            assert "more than 5 times its lease" in told.getMessage()
            caplog.clear()
