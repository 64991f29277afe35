"""The store took a lease away before its local deadline: each form of lock tells so at the end of its block."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from grelmicro.coordination import Lock, LockHandle, LockLostError, LockNotOwnedError, MultiLock, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.task import IntervalTask
from grelmicro.testing import MovableClock
from tests.helpers.worlds import World, eventually

LONG = 3600.0


async def take(client: LockAdapter, name: str) -> None:
    """Free a record that somebody holds."""
    record = await client.store.read(name)
    assert record is not None
    assert await client.store.release(record)


def take_from_thread(client: LockAdapter, name: str) -> None:
    asyncio.run_coroutine_threadsafe(take(client, name), client.get_loop()).result(10)


async def block(client: LockAdapter, renew: bool) -> None:
    async with Lock("cart", backend=client, lease_duration=LONG, auto_renew=renew):
        await take(client, "lock:cart")


async def handle(client: LockAdapter, renew: bool) -> None:
    lock = Lock("cart", backend=client, lease_duration=LONG, auto_renew=renew)
    async with await lock.acquire(timeout=5):
        await take(client, "lock:cart")


async def several(client: LockAdapter, renew: bool) -> None:
    names = ("cart", "order")
    async with MultiLock(*(Lock(name, backend=client, lease_duration=LONG, auto_renew=renew) for name in names)):
        await take(client, "lock:cart")


async def thread(client: LockAdapter, renew: bool) -> None:
    def work() -> None:
        with Lock("cart", backend=client, lease_duration=LONG, auto_renew=renew).from_thread:
            take_from_thread(client, "lock:cart")

    await asyncio.to_thread(work)


async def thread_handle(client: LockAdapter, renew: bool) -> None:
    def work() -> None:
        lock = Lock("cart", backend=client, lease_duration=LONG, auto_renew=renew)
        with lock.from_thread.acquire(timeout=5):
            take_from_thread(client, "lock:cart")

    await asyncio.to_thread(work)


async def several_in_a_thread(client: LockAdapter, renew: bool) -> None:
    def work() -> None:
        locks = [Lock(name, backend=client, lease_duration=LONG, auto_renew=renew) for name in ("cart", "order")]
        with MultiLock(*locks).from_thread:
            take_from_thread(client, "lock:cart")

    await asyncio.to_thread(work)


Form = Callable[[LockAdapter, bool], Coroutine[Any, Any, None]]

FORMS: list[Form] = [
    block,
    handle,
    several,
    thread,
    thread_handle,
    several_in_a_thread,
]


@pytest.mark.parametrize("renew", [False, True], ids=["plain", "renewed"])
@pytest.mark.parametrize("form", FORMS)
async def test_each_form_of_lock_is_lost(world: World, form: Form, renew: bool) -> None:
    async with world.client() as client:
        with pytest.raises(LockLostError, match="it expired or was taken over"):
            await form(client, renew)
        await Lock("cart", backend=client).acquire_nowait()


async def test_a_release_outside_a_block_is_refused(world: World) -> None:
    async with world.client() as client:
        held = await Lock("cart", backend=client, lease_duration=LONG).acquire()
        await take(client, "lock:cart")
        with pytest.raises(LockNotOwnedError) as caught:
            await held.release()
        assert type(caught.value) is LockNotOwnedError
        assert held.lost


@pytest.mark.parametrize("in_thread", [False, True], ids=["task", "thread"])
@pytest.mark.parametrize("minimum", [0.001, LONG], ids=["over", "not over"])
@pytest.mark.parametrize("renew", [False, True], ids=["plain", "renewed"])
async def test_a_task_lock_is_lost(
    world: World,
    clock: MovableClock,
    caplog: pytest.LogCaptureFixture,
    renew: bool,
    minimum: float,
    in_thread: bool,
) -> None:
    """Before or after its minimum hold: a warning without renewal, and an error with it."""
    handles: list[LockHandle] = []
    async with world.client() as client:
        lock = TaskLock("report", backend=client, min_hold_duration=minimum, lease_duration=LONG, auto_renew=renew)

        def work() -> None:
            with lock.from_thread as held:
                handles.append(held._handle)
                asyncio.run_coroutine_threadsafe(clock.advance(1), client.get_loop()).result(10)
                take_from_thread(client, "tasklock:report")

        async def hold() -> None:
            if in_thread:
                return await asyncio.to_thread(work)
            async with lock as held:
                handles.append(held)
                await clock.advance(1)
                await take(client, "tasklock:report")

        if renew:
            with pytest.raises(LockLostError, match="it expired or was taken over"):
                await hold()
        else:
            await hold()
        assert handles[0].lost
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == ["lost tasklock:report: it expired or was taken over"]


@pytest.mark.parametrize("minimum", [0.001, LONG], ids=["over", "not over"])
@pytest.mark.parametrize("renew", [False, True], ids=["plain", "renewed"])
async def test_a_task_counts_it_as_lost(world: World, clock: MovableClock, renew: bool, minimum: float) -> None:
    async with world.client() as client:
        lock = TaskLock("job", backend=client, min_hold_duration=minimum, lease_duration=LONG, auto_renew=renew)

        async def job() -> None:
            await clock.advance(1)
            await take(client, "tasklock:job")

        task = IntervalTask("job", job, LONG, lock=lock)
        running = asyncio.create_task(task())
        await eventually(lambda: task.last_fire, "it ran")
        running.cancel()
        await asyncio.wait({running})
        assert {outcome for outcome, times in task.outcomes.items() if times} == {"lost"}
