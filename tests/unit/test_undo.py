"""When an acquire ends unknown, what it may have taken is given back; nobody else ever acts under its name."""

import asyncio
import logging
from contextlib import suppress

import pytest

from grelmicro.coordination import BackendUnavailableError, Lock, OutcomeUnknownError, WouldBlockError
from grelmicro.coordination.adapters import DRAIN_LIMIT, LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Gate, Overtaken, late, refused, reply_lost, request_lost, silence
from tests.helpers.worlds import World, eventually, pass_by

LONG = 3600.0


async def give_up(client: LockAdapter, clock: MovableClock) -> None:
    """End an undo that found nothing, as the end of an event loop does: it goes on for `DRAIN_LIMIT` only."""
    client._background.copy().pop().cancel()
    while client._background:
        await clock.advance(DRAIN_LIMIT)


async def test_a_lost_reply_is_an_unknown_outcome_and_undone(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        store.suffer("acquire", reply_lost)
        with pytest.raises(OutcomeUnknownError) as caught:
            await Lock("cart", backend=client, lease_duration=LONG).acquire()
        assert isinstance(caught.value.__cause__, ConnectionResetError)
        async with asyncio.timeout(5):
            await Lock("cart", backend=other, lease_duration=LONG).acquire()
        assert store.calls["acquire"] == 1, "an unanswered acquire is never sent again"


async def test_an_outcome_is_unknown_where_the_request_was_lost(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", request_lost)
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client).acquire()
        await eventually(lambda: not client._background, "the undo has ended")


async def test_nothing_is_undone_after_a_refusal_by_the_store(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", refused)
        with pytest.raises(BackendUnavailableError) as caught:
            await Lock("cart", backend=client).acquire()
        assert not client._background
        assert store.calls["release"] == 0
        assert caught.value.__cause__ is not caught.value, "no error is its own cause"


async def test_the_undo_is_repeated_until_the_store_answers(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        store.suffer("acquire", reply_lost)
        store.break_down(request_lost, "release")
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire()
        await clock.advance(60)
        repeated = store.calls["release"]
        assert 10 < repeated < 50, "it backs off"
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        store.heal()
        await clock.advance(3)
        await eventually(lambda: not client._background, "the undo has ended")
        await Lock("cart", backend=other).acquire_nowait()


async def test_the_undo_ends_with_the_lease(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", reply_lost)
        store.break_down(request_lost, "release")
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=30).acquire()
        await clock.advance(31)
        assert not client._background
        assert not client._void


async def test_an_acquire_that_arrives_after_its_undo_is_undone_again(world: World, clock: MovableClock) -> None:
    store = world.troubled(ordered=False)
    async with LockAdapter(store) as client, world.client() as other:
        overtaken = Overtaken()
        store.suffer("acquire", overtaken)
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire()
        await eventually(lambda: store.calls["release"] == 1, "the undo came first")
        await overtaken.arrive()
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        await clock.advance(0.1)
        await eventually(lambda: not client._background, "the undo found something")
        await Lock("cart", backend=other).acquire_nowait()


async def test_where_requests_keep_their_order_one_answer_is_enough(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", request_lost)
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire()
        await eventually(lambda: not client._background, "the undo has ended")
        assert store.calls["release"] == 1


async def test_a_refusal_by_ones_own_unanswered_acquire_frees_it_at_once(world: World, clock: MovableClock) -> None:
    store = world.troubled(ordered=False)
    async with LockAdapter(store) as client:
        overtaken = Overtaken()
        store.suffer("acquire", overtaken)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        with pytest.raises(OutcomeUnknownError):
            await lock.acquire()
        await eventually(lambda: store.calls["release"] == 1, "the undo came first")
        await overtaken.arrive()
        # The undo pauses on a clock that stands still, so it is not what frees it.
        await lock.acquire_nowait()
        await lock.release()
        await give_up(client, clock)


async def test_that_refusal_is_no_failure_when_the_undo_comes_between(world: World, clock: MovableClock) -> None:
    """A store then cannot tell whether the acquire is still on its way."""
    store = world.troubled(ordered=False)
    async with LockAdapter(store) as client:
        overtaken = Overtaken()
        store.suffer("acquire", overtaken)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        with pytest.raises(OutcomeUnknownError):
            await lock.acquire()
        await eventually(lambda: store.calls["release"] == 1, "the undo came first")
        await overtaken.arrive()
        store.suffer("release", reply_lost)
        await lock.acquire_nowait()
        await lock.release()
        await give_up(client, clock)


async def test_the_name_of_an_unanswered_acquire_is_never_used_again(world: World) -> None:
    store = world.troubled()
    seen: list[str] = []
    acquire = store.inner.acquire

    async def spy(name: str, holder: str, ttl: float, **options: object) -> object:
        seen.append(holder)
        return await acquire(name, holder, ttl, **options)  # type: ignore[arg-type]

    store.inner.acquire = spy  # type: ignore[method-assign, assignment]
    async with LockAdapter(store) as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        for _ in range(5):
            store.suffer("acquire", reply_lost)
            with suppress(OutcomeUnknownError):
                await lock.acquire()
        await lock.acquire()
    assert len(seen) >= 6
    assert len(set(seen)) == 6


async def test_the_undo_frees_no_lease_that_was_taken_later(world: World, clock: MovableClock) -> None:
    store = world.troubled(ordered=False)
    async with LockAdapter(store) as client:
        store.suffer("acquire", reply_lost)
        gate = Gate()
        store.suffer("release", gate)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        with pytest.raises(OutcomeUnknownError):
            await lock.acquire()
        await gate.arrived.wait()
        handle = await lock.acquire_nowait()
        gate.open.set()
        await asyncio.sleep(0.02)
        assert await lock.owned()
        assert handle.valid
        await give_up(client, clock)


async def test_closing_finishes_the_undo(world: World) -> None:
    store = world.troubled()
    gate = Gate()
    async with world.client() as other:
        async with LockAdapter(store) as client:
            store.suffer("acquire", reply_lost)
            store.suffer("release", gate)
            with pytest.raises(OutcomeUnknownError):
                await Lock("cart", backend=client, lease_duration=LONG).acquire()
            asyncio.get_running_loop().call_later(0.05, gate.open.set)
        await Lock("cart", backend=other).acquire_nowait()


async def test_closing_waits_a_bounded_time_for_an_undo(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grelmicro.coordination.adapters.DRAIN_LIMIT", 0.05)
    assert DRAIN_LIMIT < 30
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", reply_lost)
        store.break_down(silence, "release")
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire()
        await eventually(lambda: store.calls["release"], "the undo was sent")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "closing before 1 releases were confirmed, such as of lock:cart: the leases end by themselves"
    ]
    assert not client._background, "nothing goes on after it is closed"


async def test_an_acquire_cut_off_by_closing_is_undone(real_world: World) -> None:
    """Closing finds undos that begin while it waits for others."""
    store = real_world.troubled()
    async with real_world.client() as other:
        client = LockAdapter(store)
        await client.__aenter__()
        first, second = Gate(), Gate(after=True)
        store.suffer("acquire", reply_lost, second)
        store.suffer("release", first, late(request=0.05))
        with pytest.raises(OutcomeUnknownError):
            await Lock("a", backend=client, lease_duration=LONG).acquire()
        cut_off = asyncio.create_task(Lock("b", backend=client, lease_duration=LONG).acquire())
        await second.arrived.wait()
        closing = asyncio.create_task(client.__aexit__(None, None, None))
        await asyncio.sleep(0.01)
        cut_off.cancel()
        await asyncio.sleep(0.01)
        first.open.set()
        await closing
        await Lock("a", backend=other).acquire_nowait()
        await Lock("b", backend=other).acquire_nowait()
        assert cut_off.cancelled()


async def test_an_unknown_release_is_repeated(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        store.suffer("release", request_lost, request_lost)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()
        with pytest.raises(OutcomeUnknownError) as caught:
            await lock.release()
        assert "repeated in the background" in str(caught.value)
        await eventually(lambda: store.calls["release"] == 2, "it is repeated")
        await clock.advance(1)
        await eventually(lambda: not client._background, "it is answered")
        await Lock("cart", backend=other).acquire_nowait()
        assert not handle.released
        await handle.release()
        assert handle.released, "one of the requests gave it back while it was held: that is no loss"


async def test_a_release_that_was_carried_out_unheard_is_a_release(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("release", reply_lost)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()
        with pytest.raises(OutcomeUnknownError):
            await lock.release()
        await lock.release()
        assert handle.released
        assert not handle.lost


async def test_a_release_that_was_begun_in_time_may_be_confirmed_later(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.break_down(reply_lost, "release")
        handle = await Lock("cart", backend=client, lease_duration=LONG).acquire()
        with pytest.raises(OutcomeUnknownError):
            await handle.release()
        await clock.advance(2 * LONG)
        store.heal()
        await handle.release()
        assert handle.released


async def test_after_an_unknown_release_its_task_can_acquire_again(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("release", reply_lost)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        await lock.acquire()
        with pytest.raises(OutcomeUnknownError):
            await lock.release()
        async with asyncio.timeout(5):
            again = await lock.acquire()
        assert again.valid


async def test_an_unknown_renewal_keeps_the_deadline_and_is_no_undo(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=60)
        handle = await lock.acquire()
        before = handle.expires_in
        await clock.advance(10)
        store.suffer("renew", reply_lost)
        with pytest.raises(OutcomeUnknownError):
            await handle.extend()
        assert handle.expires_in == pytest.approx(before - 10)
        assert handle.valid
        assert store.calls["release"] == 0
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        await handle.extend()
        assert handle.expires_in == pytest.approx(before)


async def test_a_cancelled_release_completes_and_can_be_repeated(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        for after in (False, True):
            lock = Lock("cart", backend=client, lease_duration=LONG)
            handle = await lock.acquire()
            gate = Gate(after=after)
            store.suffer("release", gate)
            releasing = asyncio.create_task(handle.release())
            await gate.arrived.wait()
            releasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await releasing
            await handle.release()
            assert handle.released
            await (await Lock("cart", backend=other).acquire(timeout=2)).release()
            await eventually(lambda: not client._background, "the repetition has ended")


async def test_what_cannot_be_freed_now_refuses_without_being_asked_again_and_again(
    world: World, clock: MovableClock
) -> None:
    """A store that reads, but does not write, holds what an earlier acquire of this process took."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", reply_lost)
        store.break_down(request_lost, "release")
        with pytest.raises(OutcomeUnknownError):
            await client.acquire("lock:cart", "void", LONG)
        store.calls.clear()
        assert (await client.acquire("lock:cart", "next", LONG)).granted_to("void")
        assert store.calls["acquire"] <= 5
        store.heal()
        await pass_by(clock, client, 5)
        await eventually(lambda: not client._background, "it is undone")
        assert (await client.acquire("lock:cart", "last", LONG)).granted_to("last")


async def test_nothing_is_known_as_void_once_the_backend_is_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grelmicro.coordination.adapters.DRAIN_LIMIT", 0.05)
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", reply_lost)
        store.break_down(silence, "release")
        with pytest.raises(OutcomeUnknownError):
            await client.acquire("lock:cart", "void", LONG)
    assert not client._void
