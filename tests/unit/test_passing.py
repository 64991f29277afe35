"""A lease that is given back goes to the first who waits in the same process by the same request, or not at all."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import (
    BackendUnavailableError,
    Lock,
    LockHandle,
    LockNotOwnedError,
    LockTimeoutError,
    OutcomeUnknownError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.leases import Lease
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Fault, Gate, Overtaken, PassingStore, refused, reply_lost, reply_never, request_lost
from tests.helpers.worlds import eventually

LONG = 3600.0


@dataclass
class Line:
    """A client that passes leases on, with a lock that is held and somebody who waits for it."""

    store: PassingStore
    client: LockAdapter
    other: LockAdapter
    lock: Lock
    held: LockHandle

    async def waits(self, timeout: float | None = None) -> "asyncio.Task[LockHandle]":
        """Somebody more waits; when nobody did, until that is known as an offer."""
        waiter = asyncio.create_task(self.lock.acquire(timeout=timeout))
        await self.offered()
        return waiter

    async def offered(self) -> None:
        """The first in line sleeps."""
        lines = self.client.queues.lines
        await eventually(lambda: "lock:cart" in lines and lines["lock:cart"].offer, "the first in line sleeps")

    async def given_to(self, waiter: "asyncio.Task[LockHandle]") -> "asyncio.Task[None]":
        """The release, in the moment when `waiter`, the first in line, has it and did not run yet."""
        offer = self.client.queues.lines["lock:cart"].offer
        assert offer is not None
        release = asyncio.create_task(self.held.release())
        while offer.lease is None:
            await asyncio.sleep(0)
        assert not waiter.done()
        return release

    async def settled(self) -> None:
        """Nothing goes on in the background."""
        await eventually(lambda: not self.client._background, "nothing is left to undo")

    async def is_free(self) -> bool:
        """Whether another process gets it at once."""
        lease = await self.other.acquire("lock:cart", "other", LONG)
        return lease.granted_to("other") and await self.other.release(lease)


@pytest.fixture
async def line(clock: MovableClock, nothing_left: None) -> AsyncIterator[Line]:
    memory = MemoryStore(clock=clock)
    store = PassingStore(memory)
    async with LockAdapter(store) as client, LockAdapter(memory) as other:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        yield Line(store, client, other, lock, await lock.acquire())


async def test_it_goes_to_the_first_in_line_in_one_request(line: Line) -> None:
    waiters = [await line.waits() for _ in range(3)]
    line.store.calls.clear()
    fence = line.held.fencing_token
    await line.held.release()
    for number, waiter in enumerate(waiters, 1):
        handle = await asyncio.wait_for(waiter, 10)
        assert handle.valid
        assert handle.fencing_token == fence + number
        assert not line.held.valid
        if number < 3:
            await line.offered()
        await handle.release()
    assert line.store.calls["acquire"] == 0
    assert line.store.calls["pass_on"] == 2 + 1
    assert line.store.calls["release"] == 1  # the last one, for whom nobody waits
    assert not line.client.queues.lines


async def test_the_deadline_of_what_is_passed_on_counts_from_the_request(line: Line, clock: MovableClock) -> None:
    waiter = await line.waits()
    gate = Gate(after=True)
    line.store.suffer("pass_on", gate)
    release = asyncio.create_task(line.held.release())
    await gate.arrived.wait()
    await clock.advance(100)
    gate.open.set()
    await release
    handle = await waiter
    assert handle.expires_in == pytest.approx(LONG * 0.99 - 100)


async def test_an_answer_older_than_the_lease_is_no_grant(line: Line, clock: MovableClock) -> None:
    waiter = await line.waits()
    gate = Gate(after=True)
    line.store.suffer("pass_on", gate)
    release = asyncio.create_task(line.held.release())
    await gate.arrived.wait()
    await clock.advance(LONG + 1)
    gate.open.set()
    await release
    handle = await waiter  # which asked by itself then
    assert handle.expires_in > LONG / 2
    await handle.release()
    await line.settled()
    assert await line.is_free()


@pytest.mark.parametrize("gone", ["cancelled", "out of time"])
async def test_what_comes_when_nobody_waits_any_more_is_given_back(line: Line, clock: MovableClock, gone: str) -> None:
    waiter = await line.waits(timeout=10.0)
    gate = Gate()
    line.store.suffer("pass_on", gate)
    release = asyncio.create_task(line.held.release())
    await gate.arrived.wait()
    if gone == "cancelled":
        waiter.cancel()
    else:
        await clock.advance(11)
    await asyncio.wait({waiter})
    gate.open.set()
    await release
    assert line.held.released
    await line.settled()
    assert await line.is_free()
    if gone == "out of time":
        assert isinstance(waiter.exception(), LockTimeoutError)


async def test_who_is_cancelled_in_the_moment_of_the_grant_gives_it_back(line: Line) -> None:
    for _ in range(5):
        waiter = await line.waits()
        release = await line.given_to(waiter)
        waiter.cancel()
        await asyncio.wait({waiter})
        assert waiter.cancelled()
        await release
        await line.settled()
        assert await line.is_free()
        line.held = await line.lock.acquire()


async def test_the_next_in_line_goes_on_where_the_first_left_in_the_moment_of_the_grant(line: Line) -> None:
    first = await line.waits()
    second = asyncio.create_task(line.lock.acquire())
    await eventually(lambda: len(line.client.queues.lines["lock:cart"].places) == 2, "two wait")
    release = await line.given_to(first)
    first.cancel()
    assert (await asyncio.wait_for(second, 10)).valid
    assert first.cancelled()
    await release


async def test_who_gets_it_goes_on_before_who_gave_it_back(line: Line) -> None:
    order: list[str] = []

    async def take() -> None:
        await line.lock.acquire()
        order.append("taken")

    waiter = asyncio.create_task(take())
    await line.offered()
    await line.held.release()
    order.append("given back")
    await waiter
    assert order == ["taken", "given back"]


async def test_a_release_that_is_cancelled_when_it_is_done_takes_nothing_from_the_next(line: Line) -> None:
    waiter = await line.waits()
    release = await line.given_to(waiter)
    release.cancel()
    with pytest.raises(asyncio.CancelledError):
        await release
    handle = await waiter
    await line.held.release()  # nothing is left to do
    assert line.held.released
    await line.settled()
    assert handle.valid
    assert await line.lock.locked()
    await handle.release()


@pytest.mark.parametrize("fault", [refused, request_lost, reply_lost])
async def test_a_failure_is_undone_and_the_waiter_gets_it_all_the_same(line: Line, fault: Fault) -> None:
    waiter = await line.waits()
    line.store.suffer("pass_on", fault)
    with pytest.raises(BackendUnavailableError if fault is refused else OutcomeUnknownError):
        await line.held.release()
    handle = await asyncio.wait_for(waiter, 10)
    assert handle.valid
    await line.settled()
    assert handle.valid
    record = await line.client.read("lock:cart")
    assert record is not None
    assert record.granted_to(handle.token)
    await handle.release()
    assert await line.is_free()
    assert not line.client._void


@pytest.mark.parametrize("fault", [Gate(), reply_never], ids=["request under way", "reply under way"])
async def test_a_release_that_is_cancelled_leaves_nothing_held(line: Line, fault: Fault) -> None:
    waiter = await line.waits()
    line.store.suffer("pass_on", fault)
    release = asyncio.create_task(line.held.release())
    await eventually(lambda: line.store.calls["pass_on"], "it is under way")
    release.cancel()
    await asyncio.wait({release})
    assert release.cancelled()
    handle = await asyncio.wait_for(waiter, 10)
    await line.settled()
    assert handle.valid
    await handle.release()
    assert await line.is_free()


async def test_a_request_that_arrives_after_all_was_undone_passes_nothing_on(line: Line) -> None:
    waiter = await line.waits()
    late = Overtaken()
    line.store.suffer("pass_on", late)
    with pytest.raises(OutcomeUnknownError):
        await line.held.release()
    handle = await asyncio.wait_for(waiter, 10)
    await line.settled()
    assert await late.arrive() is None
    record = await line.client.read("lock:cart")
    assert record is not None
    assert record.granted_to(handle.token)


async def test_a_request_that_arrives_before_the_release_is_repeated_is_undone(line: Line) -> None:
    waiter = await line.waits()
    late, gate = Overtaken(), Gate()
    line.store.suffer("pass_on", late)
    line.store.suffer("release", gate)
    with pytest.raises(OutcomeUnknownError):
        await line.held.release()
    await gate.arrived.wait()
    assert await late.arrive() is not None  # nobody has what it brought
    gate.open.set()
    handle = await asyncio.wait_for(waiter, 10)
    await line.settled()
    record = await line.client.read("lock:cart")
    assert record is not None
    assert record.granted_to(handle.token)


async def test_what_was_lost_is_not_passed_on(line: Line, clock: MovableClock) -> None:
    waiter = await line.waits()
    lease = await line.other.read("lock:cart")
    assert lease is not None
    assert await line.other.release(lease)  # by an operator
    with pytest.raises(LockNotOwnedError):
        await line.held.release()
    handle = await asyncio.wait_for(waiter, 10)
    assert handle.valid


async def test_no_offer_is_left_when_nobody_waits(line: Line) -> None:
    waiter = await line.waits()
    waiter.cancel()
    await asyncio.wait({waiter})
    await line.held.release()
    assert line.store.calls["pass_on"] == 0
    assert await line.is_free()


async def test_a_thread_may_be_the_next(line: Line) -> None:
    def work() -> int:
        with line.lock.from_thread as held:
            return held.fencing_token

    working = asyncio.create_task(asyncio.to_thread(work))
    await line.offered()
    await line.held.release()
    assert await asyncio.wait_for(working, 10) == line.held.fencing_token + 1
    assert line.store.calls["pass_on"] == 1


async def test_what_an_undo_gives_back_is_not_passed_on(line: Line) -> None:
    """Nobody had it, and what it was taken for is not known to be over."""
    waiter = await line.waits()
    assert await line.client.release(Lease("lock:cart", line.held.token, 0))
    assert (await asyncio.wait_for(waiter, 10)).valid
    assert line.store.calls["pass_on"] == 0
