"""Waiting for a lock: in order, woken by the release, at the cost of one waiter a process, never past the deadline."""

import asyncio
from time import monotonic

import pytest

from grelmicro.coordination import (
    BackendUnavailableError,
    CoordinationBackendError,
    Lock,
    LockHandle,
    LockTimeoutError,
    OutcomeUnknownError,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.wait import PATIENCE, SAFETY_POLL, SUBSCRIBING
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Fault, Gate, late, refused, reply_never, request_lost, silence
from tests.helpers.worlds import World, eventually

LONG = 3600.0


async def line_of(client: LockAdapter, count: int) -> None:
    """Wait until `count` tasks stand in the line."""
    line = client.queues.lines
    await eventually(lambda: "lock:cart" in line and len(line["lock:cart"].places) == count, f"{count} wait")


async def asleep(client: LockAdapter) -> None:
    """Wait until the first in line was answered and sleeps."""
    lines = client.queues.lines
    await eventually(lambda: "lock:cart" in lines, "somebody waits")
    silent = 0
    while silent < 10:
        await asyncio.sleep(0.002)
        silent = silent + 1 if lines["lock:cart"].asked_at is None else 0


async def test_a_thousand_waiters_cost_the_store_one(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client, lease_duration=LONG)
        waiters = [asyncio.create_task(lock.acquire()) for _ in range(1000)]
        await line_of(client, 1000)
        await asleep(client)
        assert 2 <= store.calls["acquire"] <= 3, "a change of the file may wake the first one once"
        assert store.calls["watch"] == 1
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        await eventually(lambda: not client._background, "what was cut off is undone")
        assert not client.queues.lines
        assert store.calls["acquire"] <= 4
        await held.release()


async def test_first_come_first_served(world: World) -> None:
    order: list[int] = []

    async def wait(number: int) -> None:
        async with Lock("cart", backend=client, lease_duration=LONG):
            order.append(number)

    async with world.client() as client:
        held = await Lock("cart", backend=client, lease_duration=LONG).acquire()
        waiters = []
        for number in range(30):
            waiters.append(asyncio.create_task(wait(number)))
            await asyncio.sleep(0)
        await line_of(client, 30)
        await held.release()
        await asyncio.gather(*waiters)
        assert order == list(range(30))
        assert not client.queues.lines


async def test_two_locks_of_one_name_stand_in_one_line(world: World) -> None:
    async with world.client() as client:
        first, second = (Lock("cart", backend=client, lease_duration=LONG) for _ in range(2))
        held = await first.acquire()
        waiters = [asyncio.create_task(lock.acquire()) for lock in (first, second, first)]
        await line_of(client, 3)
        await held.release()
        for waiter in waiters:
            await (await waiter).release()


async def test_a_head_that_gives_up_wakes_the_next_at_once(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client, lease_duration=LONG)
        head = asyncio.create_task(lock.acquire())
        await asleep(client)
        follower = asyncio.create_task(lock.acquire())
        await line_of(client, 2)
        asked = store.calls["acquire"]
        head.cancel()
        await eventually(lambda: store.calls["acquire"] > asked, "the next one asks")
        await held.release()
        await (await asyncio.wait_for(follower, 10)).release()
        assert head.cancelled()


async def test_a_head_that_gives_up_at_the_release_loses_no_wake_up(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        for _ in range(50):
            held = await lock.acquire()
            head, follower = (asyncio.create_task(lock.acquire()) for _ in range(2))
            await line_of(client, 2)
            await held.release()
            head.cancel()
            (granted,) = await asyncio.gather(head, return_exceptions=True)
            if isinstance(granted, LockHandle):
                await granted.release()
            await (await asyncio.wait_for(follower, 10)).release()


async def test_a_line_ends_with_its_last_waiter(world: World) -> None:
    async with world.client() as client:
        for number in range(100):
            async with Lock(f"order:{number}", backend=client):
                pass
        assert not client.queues.lines
        assert len(client.renewer) == 0


async def test_a_timeout_of_zero_is_one_try_without_a_line(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=60).acquire()
        lock = Lock("cart", backend=client)
        with pytest.raises(LockTimeoutError) as caught:
            await lock.acquire(timeout=0)
        assert caught.value.retry_after == pytest.approx(60, abs=1)
        assert (store.calls["acquire"], store.calls["watch"]) == (1, 0)
        head = asyncio.create_task(lock.acquire())
        await asleep(client)
        asked = store.calls["acquire"]
        with pytest.raises(WouldBlockError):
            await lock.acquire_nowait()
        assert store.calls["acquire"] == asked + 1
        await held.release()
        await (await head).release()


async def test_a_sleeping_waiter_leaves_at_its_deadline(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client, retry_interval=2)
        waiter = asyncio.create_task(lock.acquire(timeout=0.2))
        await asleep(client)
        await clock.advance(0.19)
        assert not waiter.done()
        await clock.advance(0.02)
        with pytest.raises(LockTimeoutError) as caught:
            await waiter
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, WouldBlockError)
        assert caught.value.__cause__ is None


async def test_a_deadline_is_kept_while_the_store_is_silent(real_world: World) -> None:
    store = real_world.troubled()
    async with LockAdapter(store) as client:
        store.break_down(silence, "acquire")
        began = monotonic()
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client).acquire(timeout=PATIENCE + 0.1)
        assert monotonic() - began < 2


async def test_what_a_silent_store_granted_is_given_back(real_world: World) -> None:
    """The holder's whole lease is not waited for."""
    store = real_world.troubled()
    async with LockAdapter(store) as client, real_world.client() as other:
        store.break_down(reply_never, "acquire")
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire(timeout=PATIENCE + 0.1)
        await Lock("cart", backend=other).acquire(timeout=5)


async def test_a_follower_learns_that_the_store_is_silent(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.break_down(silence, "acquire")
        lock = Lock("cart", backend=client)
        head = asyncio.create_task(lock.acquire())
        await eventually(lambda: store.calls["acquire"], "the first one asks")
        follower = asyncio.create_task(lock.acquire(timeout=1))
        await line_of(client, 2)
        await clock.advance(1.1)
        with pytest.raises(CoordinationBackendError):
            await follower
        head.cancel()
        await asyncio.wait({head})
        store.heal()
        await eventually(lambda: not client._background, "the undo has ended")


@pytest.mark.parametrize("joins", ["before", "during"])
async def test_a_follower_learns_that_the_store_fell_silent(world: World, clock: MovableClock, joins: str) -> None:
    """Silence counts also when the store answered before: the answers of minutes ago say nothing about now."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client)
        head = asyncio.create_task(lock.acquire())
        await asleep(client)
        store.break_down(silence, "acquire")
        if joins == "before":
            follower = asyncio.create_task(lock.acquire(timeout=SAFETY_POLL + 1))
            await line_of(client, 2)
        await clock.advance(SAFETY_POLL + 0.1)
        await eventually(lambda: store.calls["acquire"] == 3, "the first one asks again")
        if joins == "during":
            follower = asyncio.create_task(lock.acquire(timeout=PATIENCE + 0.1))
            await line_of(client, 2)
        await clock.advance(1)
        with pytest.raises(CoordinationBackendError):
            await follower
        head.cancel()
        await asyncio.wait({head})
        store.heal()
        await eventually(lambda: not client._background, "the undo has ended")
        await held.release()


async def test_a_follower_of_a_sleeping_head_is_told_that_it_is_busy(world: World, clock: MovableClock) -> None:
    """A head that was answered and sleeps asks nothing for a while; that is no silence of the store."""
    async with world.client() as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client)
        head = asyncio.create_task(lock.acquire())
        await asleep(client)
        follower = asyncio.create_task(lock.acquire(timeout=1))
        await line_of(client, 2)
        await clock.advance(1.1)
        with pytest.raises(LockTimeoutError) as caught:
            await follower
        assert caught.value.__cause__ is None
        await held.release()
        await (await head).release()


async def test_each_in_line_learns_that_the_store_fails(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client)
        waiters = [asyncio.create_task(lock.acquire(timeout=30)) for _ in range(3)]
        await line_of(client, 3)
        store.break_down(refused, "acquire")
        waiters[0].cancel()
        answers = await asyncio.gather(*waiters, return_exceptions=True)
        assert [type(answer) for answer in answers[1:]] == [BackendUnavailableError] * 2
        await held.release()


async def test_an_answer_ends_the_failure_of_the_line(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        lock = Lock("cart", backend=client)
        first, second = (asyncio.create_task(lock.acquire()) for _ in range(2))
        await asleep(client)
        follower = asyncio.create_task(lock.acquire(timeout=SAFETY_POLL + 5))
        await line_of(client, 3)
        store.suffer("acquire", refused)
        await clock.advance(SAFETY_POLL + 0.1)
        with pytest.raises(BackendUnavailableError):
            await first
        await asleep(client)
        await clock.advance(5)
        with pytest.raises(LockTimeoutError) as caught:
            await follower
        assert caught.value.__cause__ is None
        await held.release()
        await (await second).release()


async def test_a_failed_acquire_is_not_busy(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = Lock("cart", backend=client)
        for timeout in (0, 1.0, None):
            store.suffer("acquire", refused, request_lost)
            with pytest.raises(BackendUnavailableError) as caught:
                await lock.acquire(timeout=timeout)
            assert not isinstance(caught.value, WouldBlockError)
            with pytest.raises(OutcomeUnknownError) as unknown:
                await lock.acquire(timeout=timeout)
            assert not isinstance(unknown.value, WouldBlockError)
        await eventually(lambda: not client._background, "the undos have ended")


async def test_a_release_between_try_and_sleep_is_not_missed(world: World) -> None:
    """The subscription is there before the second try, however long it takes to make it."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        for _ in range(5):
            held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
            gate = Gate()
            store.suffer("watch", gate)
            waiter = asyncio.create_task(Lock("cart", backend=client, lease_duration=LONG).acquire())
            await gate.arrived.wait()
            await held.release()
            gate.open.set()
            await (await asyncio.wait_for(waiter, 5)).release()


async def test_an_expiry_wakes_a_waiter(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        await Lock("cart", backend=other, lease_duration=5).acquire()
        lock = Lock("cart", backend=client, lease_duration=LONG)
        first, second = (asyncio.create_task(lock.acquire(timeout=20)) for _ in range(2))
        await asleep(client)
        await clock.advance(4.9)
        assert not first.done()
        await clock.advance(0.2)
        handle = await asyncio.wait_for(first, 10)
        assert not second.done()
        await handle.release()
        await (await asyncio.wait_for(second, 10)).release()


async def test_a_late_reply_within_the_deadline_is_a_grant(real_world: World) -> None:
    store = real_world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", late(request=0.05, reply=0.05))
        handle = await Lock("cart", backend=client).acquire(timeout=10)
        assert handle.valid


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_a_store_that_never_begins_a_subscription_is_polled(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, timeout: float | None
) -> None:
    store = world.troubled()
    store.break_down(silence, "watch")
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        waiting = asyncio.create_task(Lock("cart", backend=client).acquire(timeout=timeout))
        await eventually(lambda: store.calls["watch"], "it subscribes")
        await clock.advance(SUBSCRIBING)
        await asleep(client)
        assert not waiting.done()
        await held.release()
        for _ in range(5):
            await clock.advance(0.1)
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(waiting, 5)).valid
        assert "lock 'cart': the store gave no hints within 1 s, so it is polled instead" in caplog.text


@pytest.mark.parametrize("fault", [silence, request_lost])
async def test_what_was_won_counts_though_its_subscription_does_not_end(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    store = world.troubled()
    store.break_down(fault, "unwatch")
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        waiting = asyncio.create_task(Lock("cart", backend=client).acquire())
        await asleep(client)
        await held.release()
        await eventually(lambda: store.calls["unwatch"], "it is granted")
        await clock.advance(SUBSCRIBING)
        assert (await asyncio.wait_for(waiting, 5)).valid
        assert "lock 'cart': a subscription to hints did not end in order" in caplog.text
