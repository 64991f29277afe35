"""When a renewed lease is lost the guarded work is cancelled, and nothing else is."""

import asyncio
import logging
import time
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest

from grelmicro.coordination import Lock, LockHandle, LockLostError, LockNotOwnedError, TaskLock, WouldBlockError
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Apply, Fault, refused, request_lost, silence
from tests.helpers.worlds import World, eventually, pass_by


def take_away(clock: MovableClock, client: LockAdapter, handle: LockHandle) -> None:
    """Let its lease be lost soon, and the next renewal notice."""

    async def lose() -> None:
        await client.release(handle.lease)
        await pass_by(clock, client, 4)

    background.append(asyncio.create_task(lose()))


background: list[asyncio.Task[None]] = []


async def lost_block(clock: MovableClock, client: LockAdapter, lock: Lock) -> None:
    """Be in a block of `lock` while its lease is taken away."""
    async with lock as handle:
        take_away(clock, client, handle)
        await asyncio.sleep(30)


async def test_a_loss_ends_the_block(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        with pytest.raises(LockLostError, match="it expired or was taken over"):
            await asyncio.wait_for(lost_block(clock, client, lock), 20)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_a_loss_stays_inside_the_timeouts_around_it(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        async with asyncio.timeout(20), asyncio.timeout(30):
            with pytest.raises(LockLostError):
                await lost_block(clock, client, lock)
            await asyncio.sleep(0)


async def test_a_loss_passes_through_the_timeouts_inside_it(world: World, clock: MovableClock) -> None:
    async with world.client() as client:

        async def work() -> None:
            async with Lock("cart", backend=client, lease_duration=9, auto_renew=True) as handle:
                take_away(clock, client, handle)
                async with asyncio.timeout(30), asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(30))
                    await asyncio.sleep(30)

        with pytest.raises(LockLostError):
            await work()


async def test_a_timeout_that_ends_with_the_loss_is_a_timeout(world: World) -> None:
    """Someone else's cancellation is never taken for one's own."""
    async with world.client() as client:
        loop = asyncio.get_running_loop()

        async def work() -> None:
            async with asyncio.timeout(None) as scope:
                async with Lock("cart", backend=client, auto_renew=True) as handle:
                    # Both come in one turn of the event loop: the scope ends in the turn after it was told to.
                    loop.call_soon(scope.reschedule, 0.0)
                    loop.call_soon(loop.call_soon, handle.lose, "a test said so")
                    await asyncio.sleep(30)

        with pytest.raises(TimeoutError) as caught:
            await work()
        cut_off = caught.value.__cause__
        assert cut_off is not None
        assert ["a test said so" in note for note in cut_off.__notes__] == [True]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_a_cancellation_from_outside_together_with_a_loss_goes_on(world: World) -> None:
    async with world.client() as client:
        handles: list[LockHandle] = []

        async def work() -> None:
            async with Lock("cart", backend=client, lease_duration=9, auto_renew=True) as handle:
                handles.append(handle)
                await asyncio.sleep(30)

        task = asyncio.create_task(work())
        await eventually(lambda: handles, "it holds it")
        task.cancel("from outside")
        handles[0].lose("a test said so")
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert ["a test said so" in note for note in caught.value.__notes__] == [True]
        assert task.cancelling() == 1


async def test_a_loss_inside_an_anyio_scope_is_not_the_scopes(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=9, auto_renew=True)
        with anyio.move_on_after(20) as scope:
            with pytest.raises(LockLostError):
                await lost_block(clock, client, lock)
            await anyio.lowlevel.checkpoint()
        assert not scope.cancelled_caught


async def test_a_body_that_swallows_the_cancellation_learns_it_at_the_end(world: World, clock: MovableClock) -> None:
    async with world.client() as client:

        async def work() -> None:
            async with Lock("cart", backend=client, lease_duration=9, auto_renew=True) as handle:
                take_away(clock, client, handle)
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(30)
                await asyncio.sleep(0)

        task = asyncio.create_task(work())
        with pytest.raises(LockLostError):
            await task
        assert task.cancelling() == 0


async def test_a_body_that_answers_the_cancellation_with_an_error_keeps_it(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        failure = ZeroDivisionError()

        async def work() -> None:
            async with Lock("cart", backend=client, lease_duration=9, auto_renew=True) as handle:
                take_away(clock, client, handle)
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    raise failure from None

        task = asyncio.create_task(work())
        with pytest.raises(ZeroDivisionError) as caught:
            await task
        assert caught.value is failure
        assert ["it expired or was taken over" in note for note in failure.__notes__] == [True]
        assert task.cancelling() == 0


async def test_a_task_lock_that_is_renewed_ends_its_block_too(world: World, clock: MovableClock) -> None:
    async with world.client() as client:

        async def work() -> None:
            async with TaskLock("report", backend=client, lease_duration=9, auto_renew=True) as handle:
                await pass_by(clock, client, 30)
                take_away(clock, client, handle)
                await asyncio.sleep(30)

        with pytest.raises(LockLostError):
            await work()


@pytest.mark.parametrize("fault", [refused, request_lost, silence], ids=["refused", "lost", "silent"])
async def test_errors_past_the_deadline_are_a_loss_before_the_lease_ends_in_the_store(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        handle = await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire()
        waiting = asyncio.create_task(handle.wait_lost())
        store.break_down(fault, "renew_many")
        await pass_by(clock, client, 8.5)
        assert handle.valid
        await clock.advance(0.45)
        assert handle.lost
        await asyncio.wait_for(waiting, 5)
        with pytest.raises(WouldBlockError):
            await Lock("cart", backend=other).acquire_nowait()
        store.heal()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([text for text in warnings if text.startswith("lost lock:cart")]) == 1
    assert len(warnings) <= 3, "an outage is told once, not at each try"


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
async def test_a_blocked_loop_is_told_and_the_loss_noticed(
    matrix_world: World, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    async with matrix_world.client() as client:

        async def work() -> None:
            async with Lock("cart", backend=client, lease_duration=0.3, auto_renew=True) as handle:
                if not at_once:
                    await asyncio.sleep(0.05)
                time.sleep(0.5)  # noqa: ASYNC251
                assert not handle.valid, "it is lost from the first moment on"
                await asyncio.sleep(30)

        with pytest.raises(LockLostError, match="it was not renewed in time"):
            await work()
    assert "the event loop was blocked: leases are looked after" in caplog.text


@pytest.mark.parametrize("automatic", [False, True], ids=["extended", "renewed"])
async def test_an_answer_after_the_deadline_does_not_take_the_loss_back(
    world: World, clock: MovableClock, automatic: bool
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        handle = await Lock("cart", backend=client, lease_duration=9, auto_renew=automatic).acquire()
        waiting = asyncio.create_task(handle.wait_lost())

        async def frozen(apply: Apply) -> object:
            """The process stands still over the deadline; when it goes on, the answer is there already."""
            answer = await apply()
            passing = clock.shift(6.0)
            passing.send(None)  # before anything else runs
            passing.close()
            assert handle.lost
            return answer

        store.suffer("renew_many" if automatic else "renew", frozen)
        await clock.advance(3)
        if automatic:
            await eventually(lambda: store.calls["renew_many"] == 1, "it is renewed")
        else:
            with pytest.raises(LockNotOwnedError, match="run out"):
                await handle.extend()
        await asyncio.wait_for(waiting, 5)
        await eventually(lambda: store.calls["release"] > 0, "what was renewed too late is given back")
        assert handle.lost
        assert len(client.renewer) == 0
        await Lock("cart", backend=other).acquire(timeout=5)


async def test_a_closed_backend_ends_what_it_renewed(world: World) -> None:
    client = world.client()
    await client.__aenter__()
    held: list[LockHandle] = []

    async def work() -> None:
        async with Lock("cart", backend=client, auto_renew=True) as handle:
            held.append(handle)
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await eventually(lambda: held, "it is held")
    await client.__aexit__(None, None, None)
    with pytest.raises(LockLostError, match="its backend was closed"):
        await task
    assert client.renewer._timer is None
