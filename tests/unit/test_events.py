"""What happens to locks is told to whoever listens, busy apart from failing, and a listener can break nothing."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import (
    BackendUnavailableError,
    Coordination,
    LeaderElection,
    Lock,
    LockLostError,
    LockNotOwnedError,
    LockTimeoutError,
    OutcomeUnknownError,
    TaskLock,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.events import Event, emit, listen, listeners
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import Tasks
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import refused, reply_lost
from tests.helpers.worlds import World, eventually


@pytest.fixture
def told() -> Iterator[list[Event]]:
    """Everything that is told."""
    events: list[Event] = []
    stop = listen(events.append)
    yield events
    stop()
    assert listeners == []


def kinds(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.kind, event.name) for event in events]


async def test_a_hold_is_told_with_its_length(world: World, clock: MovableClock, told: list[Event]) -> None:
    async with world.client() as client:
        async with Lock("cart", backend=client):
            await clock.advance(3)
        async with TaskLock("report", backend=client, min_hold_duration=5):
            await clock.advance(2)
    assert kinds(told) == [
        ("acquired", "lock:cart"),
        ("held", "lock:cart"),
        ("acquired", "tasklock:report"),
        ("held", "tasklock:report"),
    ]
    assert [event.seconds for event in told if event.kind == "held"] == [pytest.approx(3), pytest.approx(2)]


async def test_a_wait_is_told_with_its_length(world: World, clock: MovableClock, told: list[Event]) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=60)
        handle = await lock.acquire()
        waiter = asyncio.create_task(lock.acquire())
        await eventually(lambda: client.queues.lines, "it waits")
        await clock.advance(3)
        told.clear()
        await handle.release()
        await waiter
    (wait,) = [event for event in told if event.kind == "waited"]
    assert wait.name == "lock:cart"
    assert wait.seconds == pytest.approx(3)


async def test_busy_is_told_without_an_error(world: World, clock: MovableClock, told: list[Event]) -> None:
    async with world.client() as client, world.client() as other:
        await Lock("cart", backend=other).acquire()
        await TaskLock("cart", backend=other).__aenter__()
        told.clear()
        lock = Lock("cart", backend=client)
        with pytest.raises(WouldBlockError):
            await lock.acquire_nowait()
        with pytest.raises(LockTimeoutError):
            await lock.acquire(timeout=0)
        with pytest.raises(WouldBlockError):
            await TaskLock("cart", backend=client).__aenter__()
        waiter = asyncio.create_task(lock.acquire(timeout=2))
        await eventually(lambda: client.queues.lines, "it waits")
        await asyncio.sleep(0.02)
        await clock.advance(2.1)
        with pytest.raises(LockTimeoutError):
            await waiter
    assert [(event.kind, event.name, event.detail) for event in told] == [
        ("refused", "lock:cart", ""),
        ("refused", "lock:cart", ""),
        ("refused", "tasklock:cart", ""),
        ("refused", "lock:cart", ""),
    ]
    assert told[-1].seconds == pytest.approx(2, abs=0.1)


async def test_a_failing_store_is_told_with_its_error(world: World, told: list[Event]) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = Lock("cart", backend=client)
        for timeout in (0, 5, None):
            store.suffer("acquire", refused, reply_lost)
            with pytest.raises(BackendUnavailableError):
                await lock.acquire(timeout=timeout)
            with pytest.raises(OutcomeUnknownError):
                await lock.acquire(timeout=timeout)
        await eventually(lambda: not client._background, "the undos have ended")
    assert [(event.kind, event.detail) for event in told] == [
        ("refused", "BackendUnavailableError"),
        ("refused", "OutcomeUnknownError"),
    ] * 3


async def test_renewals_are_told(world: World, clock: MovableClock, told: list[Event]) -> None:
    async with world.client() as client, Lock("cart", backend=client, lease_duration=9, auto_renew=True) as handle:
        await clock.advance(3.1)
        await eventually(lambda: ("renewed", "lock:cart") in kinds(told), "it is renewed")
        await handle.extend()
    assert [kind for kind, _ in kinds(told)] == ["acquired", "renewed", "renewed", "held"]


async def test_losses_are_told_with_their_reason(world: World, clock: MovableClock, told: list[Event]) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=10)

        async def outlive() -> None:
            async with lock:
                await clock.advance(11)

        with pytest.raises(LockLostError):
            await outlive()
        handle = await lock.acquire()
        await client.release(handle.lease)
        with pytest.raises(LockNotOwnedError):
            await handle.extend()
        with pytest.raises(LockNotOwnedError):
            await handle.release()
    lost = [event for event in told if event.kind == "lost"]
    assert [(event.name, event.detail) for event in lost] == [
        ("lock:cart", "its lease ran out"),
        ("lock:cart", "it expired or was taken over"),
    ]
    assert lost[0].seconds == pytest.approx(11)
    assert not [event for event in told if event.kind == "held"]


async def test_terms_and_fires_are_told(told: list[Event]) -> None:
    tasks = Tasks()
    ran = asyncio.Event()

    @tasks.every(seconds=0.01)
    async def tick() -> None:
        ran.set()

    election = LeaderElection("main", retry_interval=0.01)
    tasks.add_task(election)
    async with Grelmicro(uses=[Coordination(MemoryProvider()), tasks]):
        await asyncio.wait_for(election.wait_for_leader(), 10)
        await asyncio.wait_for(ran.wait(), 10)
    seen = {event.kind: event for event in told}
    assert seen["acquired"].name == seen["handed_over"].name == seen["led"].name == "leader:main"
    assert seen["fired"].name.endswith("tick")
    # On a loaded machine the last of its fires may be a missed one.
    assert "success" in {event.detail for event in told if event.kind == "fired"}


async def test_a_listener_that_raises_breaks_nothing(
    world: World, told: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError

    stop = listen(broken)
    later: list[Event] = []
    stop_later = listen(later.append)
    async with world.client() as client, Lock("cart", backend=client):
        pass
    stop()
    stop_later()
    assert later == told
    assert len(caplog.records) == len(told)
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "a listener of grelmicro events failed on acquired" in caplog.text


def test_a_listener_can_stop_itself_and_twice() -> None:
    seen: list[Event] = []

    def once(event: Event) -> None:
        seen.append(event)
        stop()

    stop = listen(once)
    emit("held", "a")
    emit("held", "b")
    stop()
    assert [event.name for event in seen] == ["a"]
