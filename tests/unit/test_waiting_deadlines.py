"""What a waiter gets at its deadline: "unknown" only if a request that had the time to be answered was not."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from grelmicro.coordination import (
    BackendUnavailableError,
    CoordinationBackendError,
    CoordinationError,
    Lock,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    MultiLock,
    OutcomeUnknownError,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.wait import PATIENCE
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Fault, Gate, TroubledStore, refused, silence
from tests.helpers.worlds import World, eventually

LONG = 3600.0
BARELY = 0.005
"""Seconds before the deadline: too few for any store to answer."""


async def line_of(client: LockAdapter, count: int) -> None:
    lines = client.queues.lines
    await eventually(lambda: "lock:cart" in lines and len(lines["lock:cart"].places) == count, f"{count} wait")


async def asleep(client: LockAdapter, store: TroubledStore, asked: int) -> None:
    """Wait until the first in line was answered, `asked` requests in all, and sleeps."""
    lines = client.queues.lines
    await eventually(lambda: store.calls["acquire"] == asked and lines["lock:cart"].asked_at is None, "it sleeps")


def from_task(client: LockAdapter, timeout: float) -> "asyncio.Task[Any]":
    return asyncio.create_task(Lock("cart", backend=client).acquire(timeout=timeout))


def from_thread(client: LockAdapter, timeout: float) -> "asyncio.Task[Any]":
    lock = Lock("cart", backend=client).from_thread
    return asyncio.create_task(asyncio.to_thread(lock.acquire, timeout=timeout))


def among_several(client: LockAdapter, timeout: float) -> "asyncio.Task[Any]":
    return asyncio.create_task(
        MultiLock(*(Lock(name, backend=client) for name in ("a", "cart"))).acquire(timeout=timeout)
    )


@pytest.mark.parametrize("form", [from_task, from_thread, among_several])
@pytest.mark.parametrize("operation", ["watch", "acquire"])
async def test_one_that_is_first_just_before_its_deadline_was_refused(
    world: World, clock: MovableClock, form: Any, operation: str
) -> None:
    """Whether it is its subscription or its request that is cut off."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        head = from_task(client, 9)
        await asleep(client, store, 2)
        follower = form(client, 9 + BARELY)
        await line_of(client, 2)
        gate = Gate()
        store.suffer(operation, gate)
        await clock.advance(9)
        await asyncio.wait({head}, timeout=10)
        await asyncio.wait_for(gate.arrived.wait(), 10)
        await clock.advance(BARELY * 2)
        for waiter in (head, follower):
            with pytest.raises(
                LockTimeoutError, match="lock 'cart' is held by another holder|lock 'cart' was not"
            ) as caught:
                await asyncio.wait_for(waiter, 10)
            assert caught.value.name == "cart"
        await eventually(lambda: not client._background, "the undo has ended")
        await held.release()


async def test_one_that_follows_a_request_in_flight_was_refused(world: World, clock: MovableClock) -> None:
    """The first in line asks, and had too little time to be answered when the deadline of another one passes."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await Lock("cart", backend=other, lease_duration=LONG).acquire()
        gate = Gate()
        store.suffer("acquire", gate)
        head = from_task(client, 10)
        await gate.arrived.wait()
        follower = from_task(client, BARELY)
        await line_of(client, 2)
        await clock.advance(BARELY * 2)
        with pytest.raises(LockTimeoutError):
            await asyncio.wait_for(follower, 10)
        await held.release()
        gate.open.set()
        await (await asyncio.wait_for(head, 10)).release()


async def test_a_short_timeout_does_not_blame_a_store_that_answers_others(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        for _ in range(5):
            await (await Lock("other", backend=client).acquire(timeout=5)).release()
            gate = Gate()
            store.suffer("acquire", gate)
            waiter = from_task(client, PATIENCE / 2)
            await gate.arrived.wait()
            await clock.advance(PATIENCE)
            with pytest.raises(LockTimeoutError, match="in which the store had too little time to answer"):
                await asyncio.wait_for(waiter, 10)
            await eventually(lambda: not client._background, "the undo has ended")


async def test_short_timeouts_blame_a_store_that_answers_nothing(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.break_down(silence, "acquire")
        seen: Counter[type[object]] = Counter()
        for number in range(6):
            waiter = from_task(client, PATIENCE / 2)
            while store.calls["acquire"] < number + 1:
                await asyncio.sleep(0)
            await clock.advance(PATIENCE)
            seen.update(map(type, await asyncio.gather(waiter, return_exceptions=True)))
        assert seen == {LockTimeoutError: 2, OutcomeUnknownError: 4}
        store.heal()
        await clock.advance(5)
        await eventually(lambda: not client._background, "the undos have ended")


async def test_many_short_timeouts_at_once_are_one_silence(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        gate = Gate()
        store.break_down(gate, "acquire")
        waiters = [
            asyncio.create_task(Lock(f"cart{number}", backend=client).acquire(timeout=PATIENCE / 2))
            for number in range(20)
        ]
        await eventually(lambda: store.calls["acquire"] == 20, "all ask")
        await clock.advance(PATIENCE)
        for error in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(error, LockTimeoutError)
        gate.open.set()
        await eventually(lambda: not client._background, "the undos have ended")


async def test_a_request_that_had_the_time_to_be_answered_is_unknown(world: World, clock: MovableClock) -> None:
    """However well the store answers other requests."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        await (await Lock("other", backend=client).acquire(timeout=5)).release()
        store.suffer("acquire", silence)
        waiter = from_task(client, PATIENCE * 2)
        await eventually(lambda: store.calls["acquire"] == 2, "it asks")
        await (await Lock("other", backend=client).acquire(timeout=5)).release()
        await clock.advance(PATIENCE * 3)
        with pytest.raises(OutcomeUnknownError) as caught:
            await asyncio.wait_for(waiter, 10)
        assert caught.value.name == "cart"
        await eventually(lambda: not client._background, "the undo has ended")


@pytest.mark.parametrize(("fault", "timeout"), [(silence, 10.0), (refused, 0.0)], ids=["silent", "failing"])
@pytest.mark.parametrize(
    ("operation", "expected"), [("watch", BackendUnavailableError), ("acquire", OutcomeUnknownError)]
)
async def test_one_that_comes_after_a_request_without_an_answer_is_not_busy(
    world: World,
    clock: MovableClock,
    fault: Fault,
    timeout: float,
    operation: str,
    expected: type[CoordinationBackendError],
) -> None:
    """The first in line gets no answer until its deadline, or fails at once; the next one has too little time."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        held = await Lock("cart", backend=client, lease_duration=LONG).acquire()
        begin, gate = Gate(), Gate()
        store.suffer("watch", begin)
        head = from_task(client, 10)
        await begin.arrived.wait()
        follower = from_task(client, timeout + BARELY)
        await line_of(client, 2)
        store.suffer("acquire", fault)
        store.suffer(operation, gate)
        begin.open.set()
        await eventually(lambda: store.calls["acquire"] >= 3, "it asks")
        await clock.advance(timeout)
        with pytest.raises(CoordinationBackendError):
            await asyncio.wait_for(head, 10)
        await asyncio.wait_for(gate.arrived.wait(), 10)
        await clock.advance(BARELY * 2)
        with pytest.raises(expected):
            await asyncio.wait_for(follower, 10)
        await held.release()
        await eventually(lambda: not client._background, "the undo has ended")


async def test_errors_name_their_lock(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock, theirs = Lock("cart", backend=client), Lock("cart", backend=other)
        held = await lock.acquire()
        with pytest.raises(LockReentrantError) as reentrant:
            await lock.acquire()
        for timeout in (0.0, 5.0):
            waiter = asyncio.create_task(theirs.acquire(timeout=timeout))
            if timeout:
                await line_of(other, 1)
                await eventually(lambda: other.queues.lines["lock:cart"].offer, "it sleeps")
                await clock.advance(timeout * 2)
            with pytest.raises(LockTimeoutError) as busy:
                await asyncio.wait_for(waiter, 10)
            assert busy.value.timeout == timeout
            assert busy.value.name == "cart"
        with pytest.raises(WouldBlockError) as would_block:
            await theirs.acquire_nowait()
        with pytest.raises(LockNotOwnedError) as foreign:
            await theirs.release()
        held.lose("a test said so")
        with pytest.raises(LockLostError) as lost:
            held.raise_if_lost()
        for caught in (reentrant, would_block, foreign, lost):
            assert caught.value.name == "cart"
        assert BackendUnavailableError("text").name is None


async def test_refusals_of_a_healthy_store_are_never_unknown(real_world: World) -> None:
    """Waiters of one process that come, and give up, shortly after each other."""
    async with real_world.client() as client, real_world.client() as other:

        async def refused_after(pause: float) -> type[object]:
            await asyncio.sleep(pause)
            with pytest.raises(CoordinationError) as caught:
                await Lock("cart", backend=client).acquire(timeout=0.05)
            return caught.type

        async with Lock("cart", backend=other, lease_duration=LONG):
            for gap in (0, 0.0002, 0.001, 0.005):
                seen = await asyncio.gather(*(refused_after(number * gap) for number in range(10)))
                assert set(seen) == {LockTimeoutError}
        await eventually(lambda: not client._background, "the undos have ended")
