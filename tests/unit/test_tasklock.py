"""A task lock never waits, stays held for its minimum hold, and frees itself at the end of its lease."""

import asyncio
import logging

import pytest

from grelmicro.coordination import (
    Lock,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    OutcomeUnknownError,
    TaskLock,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import SettingsValidationError
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Gate, reply_lost, request_lost
from tests.helpers.worlds import World, eventually


async def test_left_early_it_stays_held_for_its_minimum(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        theirs = TaskLock("report", backend=other)
        async with TaskLock("report", backend=client, min_hold_duration=10, lease_duration=60) as handle:
            await clock.advance(3)
        assert handle.released
        await clock.advance(6.9)
        with pytest.raises(WouldBlockError) as caught:
            await theirs.__aenter__()
        assert caught.value.retry_after == pytest.approx(0.1, abs=0.01)
        await clock.advance(0.2)
        async with theirs:
            pass


async def test_left_after_its_minimum_it_is_free_at_once(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        async with TaskLock("report", backend=client, min_hold_duration=10, lease_duration=60):
            await clock.advance(11)
        async with TaskLock("report", backend=other):
            pass


async def test_an_error_in_its_body_keeps_the_minimum_too(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:

        async def work() -> None:
            async with TaskLock("report", backend=client, min_hold_duration=10):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await work()
        assert await TaskLock("report", backend=other).locked()
        await clock.advance(10.1)
        assert not await TaskLock("report", backend=other).locked()


async def test_it_frees_itself_at_the_end_of_its_lease(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        await TaskLock("report", backend=client, lease_duration=5).__aenter__()
        await clock.advance(5.1)
        async with TaskLock("report", backend=other):
            pass


async def test_one_shared_by_two_tasks_is_busy_for_the_second(world: World, clock: MovableClock) -> None:
    """It is not reentrant for one task; for another one it is simply held."""
    async with world.client() as client:
        lock = TaskLock("report", backend=client, min_hold_duration=1)

        async def second() -> None:
            async with lock:
                pytest.fail("it is held by another task")

        async with lock:
            with pytest.raises(LockReentrantError):
                await lock.__aenter__()
            with pytest.raises(WouldBlockError):
                await asyncio.create_task(second())
        with pytest.raises(WouldBlockError):
            await lock.__aenter__()
        await clock.advance(1.1)
        async with lock:
            pass


async def test_tasks_that_share_one_end_their_own_blocks(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        locks = [TaskLock(name, backend=client, min_hold_duration=0.001) for name in ("a", "b")]

        async def work(lock: TaskLock) -> int:
            async with lock as handle:
                await asyncio.sleep(0.01)
            return handle.fencing_token

        for _ in range(3):
            await asyncio.gather(*(work(lock) for lock in locks))
            await clock.advance(1)


async def test_refreshing_lasts_the_whole_lease_again(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = TaskLock("report", backend=client, lease_duration=10)
        async with lock as handle:
            for _ in range(3):
                await clock.advance(9)
                assert await lock.refresh() is handle
            with pytest.raises(WouldBlockError):
                await TaskLock("report", backend=other).__aenter__()
        with pytest.raises(LockNotOwnedError):
            await lock.refresh()


async def test_refreshing_after_the_end_takes_nothing_again(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = TaskLock("report", backend=client, lease_duration=10)
        await lock.__aenter__()
        await clock.advance(10.1)
        async with TaskLock("report", backend=other, lease_duration=10):
            with pytest.raises(LockNotOwnedError, match="its lease ran out"):
                await lock.refresh()


async def test_running_out_is_a_warning(world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture) -> None:
    async with world.client() as client, world.client() as other:
        async with TaskLock("report", backend=client, lease_duration=10):
            await clock.advance(11)
            theirs = TaskLock("report", backend=other)
            await theirs.__aenter__()
        assert await theirs.locked(), "who took it over keeps it"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "lost tasklock:report: it ran out before its work ended, and another worker may have repeated it: "
        "use a longer lease_duration, refresh() or auto_renew=True"
    ]


async def test_a_renewed_one_that_ran_out_is_an_error(world: World, clock: MovableClock) -> None:
    async with world.client() as client:

        async def work() -> None:
            async with TaskLock("report", backend=client, lease_duration=10, auto_renew=True) as handle:
                handle.lose("a test said so")

        with pytest.raises(LockLostError, match="a test said so"):
            await work()


async def test_a_minimum_that_cannot_be_confirmed_is_repeated(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:

        async def work() -> None:
            async with TaskLock("report", backend=client, min_hold_duration=10, lease_duration=3600):
                store.suffer("renew", request_lost, request_lost)

        with pytest.raises(OutcomeUnknownError):
            await work()
        await eventually(lambda: store.calls["renew"] == 2, "it is repeated")
        await clock.advance(0.05)
        await eventually(lambda: not client._background, "it is confirmed")
        await clock.advance(9.8)
        assert await TaskLock("report", backend=other).locked()
        await clock.advance(0.2)
        async with TaskLock("report", backend=other):
            pass


async def test_a_cancelled_exit_still_shortens_it(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        gate = Gate()
        store.suffer("renew", gate)

        async def work() -> None:
            async with TaskLock("report", backend=client, min_hold_duration=10, lease_duration=3600):
                pass

        task = asyncio.create_task(work())
        await gate.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: not client._background, "it is confirmed")
        await clock.advance(10.1)
        async with TaskLock("report", backend=other):
            pass


async def test_an_unknown_acquire_is_undone(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        store.suffer("acquire", reply_lost)
        with pytest.raises(OutcomeUnknownError):
            await TaskLock("report", backend=client, lease_duration=3600).__aenter__()
        await eventually(lambda: not client._background, "it is undone")
        async with TaskLock("report", backend=other):
            pass


async def test_threads_use_it(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        lock = TaskLock("report", backend=client, min_hold_duration=10)

        def work() -> None:
            with lock.from_thread as handle:
                assert lock.from_thread.locked()
                lock.from_thread.refresh()
                with pytest.raises(LockReentrantError):
                    lock.from_thread.__enter__()
            assert handle.expires_in == 0

        await asyncio.to_thread(work)
        assert await lock.locked()
        await clock.advance(10.1)
        async with TaskLock("report", backend=other):
            pass


async def test_locks_and_task_locks_of_one_name_are_different_things(world: World) -> None:
    async with world.client() as client, Lock("a", backend=client), TaskLock("a", backend=client):
        pass


def test_its_minimum_is_at_most_its_lease() -> None:
    with pytest.raises(SettingsValidationError, match="min_hold_duration should be at most lease_duration"):
        TaskLock("report", min_hold_duration=61)
    TaskLock("report", min_hold_duration=60)
