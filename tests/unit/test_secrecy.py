"""No error and no line of a log tells who holds a lease: whoever knows a holder's name could act in its place."""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockHandle, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.events import Event, listen
from grelmicro.leases import Lease
from grelmicro.leases.identity import mint
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Apply, Fault, TroubledStore, refused, reply_lost, request_lost
from tests.helpers.worlds import World, eventually


async def odd_error(apply: Apply) -> object:
    """A client library that fails in a way of its own, after the fact."""
    await apply()
    raise KeyError("odd")


class Told:
    """All texts that errors and logs told, and the names of holders that must not be in them."""

    def __init__(self, store: TroubledStore, caplog: pytest.LogCaptureFixture) -> None:
        self.texts: list[str] = []
        self.holders: set[str] = set()
        self._caplog = caplog
        acquire = store.inner.acquire

        async def watched(name: str, holder: str, ttl: float, **options: object) -> object:
            self.holders.add(holder)
            return await acquire(name, holder, ttl, **options)  # type: ignore[arg-type]

        store.inner.acquire = watched  # type: ignore[method-assign, assignment]

    async def attempt(self, act: Callable[[], Awaitable[object]]) -> None:
        try:
            await act()
        except Exception as error:
            self.texts += ["".join(traceback.format_exception(error)), repr(error)]

    def attempt_in_thread(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self.texts += ["".join(traceback.format_exception(error)), repr(error)]

    def check(self, least: int) -> None:
        logged = [record.getMessage() for record in self._caplog.records]
        logged += [str(record.exc_text) for record in self._caplog.records if record.exc_text]
        assert len(self.texts) + len(logged) >= least, "too little failed to say anything"
        # The process's id comes first; after it, whatever is told is told too much.
        secrets = {holder.rpartition(":")[2][16:] for holder in self.holders} | {mint()[16:32]}
        assert len(secrets) > 5
        leaks = [text for text in self.texts + logged for secret in secrets if secret in text]
        assert leaks == []


async def test_whatever_fails_keeps_the_secret(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = world.troubled(ordered=False)
    told = Told(store, caplog)
    stop = listen(lambda event: told.texts.append(str(event)))
    async with LockAdapter(store) as client:
        for fault in (refused, request_lost, reply_lost, odd_error):
            await failing_acquires(store, client, told, fault)
            await failing_holds(store, client, told, fault, clock)
        await everyday_refusals(client, told, clock)
        await clock.advance(100)
        await eventually(lambda: not client._background, "the undos have ended")
    await told.attempt(Lock("cart", backend=client).acquire)
    stop()
    told.check(least=60)


async def failing_acquires(store: TroubledStore, client: LockAdapter, told: Told, fault: Fault) -> None:
    """Every way to take one, with a store that fails."""
    lock = Lock(f"cart:{fault.__name__}", backend=client)
    for act in (lock.acquire, lock.acquire_nowait, lock.__aenter__, TaskLock("report", backend=client).__aenter__):
        store.suffer("acquire", fault)
        await told.attempt(act)
    store.suffer("read", fault, fault)
    await told.attempt(lock.locked)
    await told.attempt(lock.owned)
    store.suffer("acquire", fault)
    await asyncio.to_thread(told.attempt_in_thread, lock.from_thread.acquire)


async def failing_holds(
    store: TroubledStore, client: LockAdapter, told: Told, fault: Fault, clock: MovableClock
) -> None:
    """Every thing done with one that is held, with a store that fails."""
    lock = Lock(f"held:{fault.__name__}", backend=client, lease_duration=60, auto_renew=True)
    handle = await lock.acquire()
    told.texts += [repr(handle), str(handle), repr(lock), repr(handle.from_thread), repr(client)]
    store.suffer("renew", fault)
    await told.attempt(handle.extend)
    store.suffer("renew_many", fault)
    await clock.advance(20)
    await asyncio.sleep(0.02)
    store.suffer("release", fault, fault)
    await told.attempt(handle.release)
    await told.attempt(handle.release)
    async with TaskLock(f"held:{fault.__name__}", backend=client, min_hold_duration=5) as held:
        store.suffer("renew", fault)
        told.texts.append(repr(held))
        with suppress(Exception):
            await held.extend()


async def everyday_refusals(client: LockAdapter, told: Told, clock: MovableClock) -> None:
    """Busy, not owned, reentrant, lost."""
    lock, other = (Lock("cart", backend=client, lease_duration=10, worker="web-1") for _ in range(2))
    handle = await lock.acquire()
    for act in (lock.acquire, other.acquire_nowait, other.release, other.extend, TaskLock("a", backend=client).refresh):
        await told.attempt(act)
    waiting = asyncio.create_task(told.attempt(lambda: other.acquire(timeout=1)))
    await asyncio.sleep(0.01)
    await clock.advance(1.1)
    await waiting
    await clock.advance(10)
    for act in (handle.extend, handle.release, lock.extend, lock.release):
        await told.attempt(act)
    told.attempt_in_thread(handle.raise_if_lost)
    await told.attempt(lambda: outlived(lock, clock))
    await told.attempt(lambda: lost(Lock("lost", backend=client, auto_renew=True)))


async def outlived(lock: Lock, clock: MovableClock) -> None:
    async with lock:
        await clock.advance(11)
        raise ValueError("the body's own")


async def lost(lock: Lock) -> LockHandle:
    async with lock as handle:
        handle.lose("a test said so")
    return handle


async def test_an_app_keeps_it_too(caplog: pytest.LogCaptureFixture, world: World) -> None:
    caplog.set_level(logging.DEBUG)
    store = world.troubled()
    told = Told(store, caplog)
    events: list[Event] = []
    stop = listen(events.append)
    micro = Grelmicro(uses=[Coordination(store)])
    async with micro:
        for number in range(6):
            store.suffer("acquire", reply_lost)
            await told.attempt(Lock(f"cart:{number}").acquire)
        left = await Lock("left", auto_renew=True).acquire()
        told.texts += [repr(micro), repr(micro.coordination), repr(micro.coordination.lock_backend), repr(store)]
    await told.attempt(left.release)
    stop()
    told.texts += map(str, events)
    told.check(least=10)


def test_the_text_of_a_lease_does_not_show_its_holder() -> None:
    assert "web-1:task:secret" not in repr(Lease("lock:cart", "web-1:task:secret", 1))
