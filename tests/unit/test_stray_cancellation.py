"""A loop of this package outlives that something it awaits is cancelled elsewhere: it was not cancelled itself."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from grelmicro.coordination import Coordination, HealthCheck, LeaderElection, Lock, OutcomeUnknownError, TaskLock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.lifecycle import AwaitedCancelledError, distinguish_cancellation
from grelmicro.task import IntervalTask
from grelmicro.testing import MovableClock
from tests.helpers.stores import Apply
from tests.helpers.worlds import World, eventually, pass_by

LONG = 3600.0
TROUBLE = (asyncio.CancelledError, AwaitedCancelledError)


async def cancelled_elsewhere(apply: Apply | None = None) -> object:
    """Await something that other code cancels."""
    shared = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(shared.cancel)
    return await shared


async def test_a_stray_cancellation_is_an_error() -> None:
    with pytest.raises(AwaitedCancelledError, match="cancelled elsewhere") as caught, distinguish_cancellation():
        await cancelled_elsewhere()
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def cancel_me() -> None:
    """Cancel the running task, and suspend it."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("earlier", [0, 2], ids=["the first one", "after some that were swallowed"])
@pytest.mark.parametrize(("work", "error"), [(cancel_me, TROUBLE[0]), (cancelled_elsewhere, TROUBLE[1])])
async def test_only_its_own_cancellation_cancels_a_task(
    work: Callable[[], Awaitable[object]], error: type[BaseException], earlier: int
) -> None:
    async def run() -> None:
        for _ in range(earlier):
            with pytest.raises(asyncio.CancelledError):
                await cancel_me()
        with distinguish_cancellation():
            await work()

    task = asyncio.create_task(run())
    await asyncio.wait({task})
    with pytest.raises(error):
        task.result()


async def test_a_lease_is_renewed_on(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        handle = await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire()
        store.suffer("renew_many", cancelled_elsewhere)
        await pass_by(clock, client, 30)
        assert handle.valid
        await handle.release()


@pytest.mark.parametrize("operation", ["acquire", "renew", "release", "read"])
async def test_a_request_that_is_cancelled_elsewhere_is_unknown(
    world: World, clock: MovableClock, operation: str
) -> None:
    """A caller that nothing cancels gets an error, and no cancellation."""
    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        store.suffer(operation, cancelled_elsewhere)
        with pytest.raises(OutcomeUnknownError) as caught:
            async with lock as handle:
                await handle.extend()
                await lock.locked()
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        await eventually(lambda: not client._background, "what is undone or repeated has ended")
        await lock.acquire_nowait()
        await lock.release()


async def test_an_undo_goes_on(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        store.suffer("acquire", cancelled_elsewhere)
        store.suffer("release", cancelled_elsewhere, cancelled_elsewhere)
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire()
        await eventually(lambda: store.calls["release"] == 1, "the undo was tried")
        while client._background:
            await pass_by(clock, client, 1)
        assert store.calls["release"] >= 3
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_health_check_looks_on(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    coordination = Coordination(store)
    async with coordination, HealthCheck(coordination, clock=clock) as check:
        await eventually(lambda: check._looked_at is not None, "it looked")
        await clock.advance(3)  # until this process is published
        store.suffer("acquire", cancelled_elsewhere)
        await clock.advance(2)
        await eventually(lambda: check._error == "OutcomeUnknownError", "it failed once")
        await clock.advance(1)
        await eventually(lambda: not check._error, "it looked again")


@pytest.mark.parametrize("operation", ["acquire", "renew"])
async def test_an_election_goes_on(world: World, clock: MovableClock, operation: str) -> None:
    store = world.troubled()
    backend = LeaderElectionAdapter(store)
    leader = LeaderElection("job", backend=backend, retry_jitter=0.0)
    async with backend:
        store.suffer(operation, *[cancelled_elsewhere] * 2)
        service = asyncio.create_task(leader())
        await eventually(lambda: store.calls["acquire"], "it takes part")
        for _ in range(30):
            await clock.advance(1)
            await asyncio.sleep(0.01)
        assert store.calls[operation] > 2
        assert leader.is_leader()
        service.cancel()
        await asyncio.wait({service})


async def test_a_task_whose_lock_is_cancelled_elsewhere_fires_again(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    ran: list[float] = []

    async def work() -> None:
        ran.append(clock.now())

    async with LockAdapter(store) as client:
        lock = TaskLock("job", backend=client, lease_duration=LONG, min_hold_duration=0.001)
        task = IntervalTask("job", work, 10.0, lock=lock)
        task.clock = clock
        store.suffer("acquire", cancelled_elsewhere)
        store.suffer("renew", cancelled_elsewhere)
        runner = asyncio.create_task(task())
        await eventually(lambda: task.outcomes["coordination_error"] == 1, "it could not tell whose turn it is")
        for number in (1, 2, 3):
            await clock.advance(10.0)
            await eventually(partial(lambda runs: task.outcomes["success"] == runs, number), "it ran")
        assert len(ran) == 3
        runner.cancel()
        await asyncio.wait({runner})
