"""What the backends promise over any store: leases with typed errors, and schedules that fire once."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from grelmicro.coordination import LeaderElectionBackend, LockBackend, ScheduleBackend
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError, OutOfContextError
from grelmicro.leases import Lease
from grelmicro.leases.record import EDIT_LEASE
from grelmicro.testing import MovableClock
from tests.helpers.stores import Apply, refused, reply_lost, request_lost
from tests.helpers.worlds import KINDS, World, a_world

DUE = 1_750_000_060.0


@pytest.fixture(params=(*KINDS, "kubernetes"))
def world(request: pytest.FixtureRequest, tmp_path: Path, clock: MovableClock, nothing_left: None) -> World:
    """Leases on each kind of store under a clock that the test moves: of the servers, on the one without a clock."""
    return a_world(request, tmp_path, clock)


@pytest.fixture
async def schedule(world: World) -> AsyncIterator[ScheduleAdapter]:
    async with ScheduleAdapter(world.store()) as adapter:
        yield adapter


@asynccontextmanager
async def processes(world: World, number: int) -> AsyncIterator[list[ScheduleAdapter]]:
    """Several processes that share schedules."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScheduleAdapter(world.store())) for _ in range(number)]


# Leases


async def test_each_adapter_is_the_backend_that_it_is_named_after(world: World) -> None:
    assert isinstance(LockAdapter(world.store()), LockBackend)
    assert isinstance(LeaderElectionAdapter(world.store()), LeaderElectionBackend)
    assert isinstance(ScheduleAdapter(world.store()), ScheduleBackend)
    assert not isinstance(ScheduleAdapter(world.store()), LockBackend)


async def test_an_adapter_passes_a_whole_life_of_a_lease_on_to_its_store(world: World) -> None:
    async with LeaseAdapter(world.store()) as backend:
        lease = await backend.acquire("lock:a", "a", 60.0, data={"k": "v"})
        assert lease.granted_to("a")
        assert (await backend.acquire("lock:a", "b", 60.0)).granted_to("a")
        assert await backend.renew(lease, 90.0) is not None
        assert [each.name for each in await backend.renew_many([(lease, 90.0), (Lease("lock:b", "a", 1), 90.0)])] == [
            "lock:a"
        ]
        async with backend.watch("lock:a") as waiter:
            assert await backend.release(lease, data={"k": "w"}) is True
            assert await asyncio.wait_for(waiter.wait(1_000.0), 5.0)
        record = await backend.read("lock:a")
        assert record is not None
        assert (record.live, dict(record.data)) == (False, {"k": "w"})


async def test_a_closed_adapter_refuses_everything(world: World) -> None:
    backend = LeaseAdapter(world.store())
    lease = Lease("lock:a", "a", 1)
    for use in (
        backend.acquire("lock:a", "a", 60.0),
        backend.renew(lease, 60.0),
        backend.renew_many([(lease, 60.0)]),
        backend.release(lease),
        backend.read("lock:a"),
        ScheduleAdapter(world.store()).claim("s", DUE),
        ScheduleAdapter(world.store()).last_fired("s"),
    ):
        with pytest.raises(OutOfContextError, match="is not open"):
            await use


async def test_a_store_that_failed_and_one_that_was_not_heard_are_told_apart(world: World) -> None:
    store = world.troubled()
    async with LeaseAdapter(store) as backend:
        lease = await backend.acquire("lock:a", "a", 60.0)
        for fault, wanted in ((refused, BackendUnavailableError), (request_lost, OutcomeUnknownError)):
            store.suffer("acquire", fault)
            store.suffer("renew", fault)
            store.suffer("renew_many", fault)
            store.suffer("read", fault)
            for use in (
                backend.acquire("lock:b", "b", 60.0),
                backend.renew(lease, 60.0),
                backend.renew_many([(lease, 60.0)]),
                backend.read("lock:a"),
            ):
                with pytest.raises(wanted) as failure:
                    await use
                assert type(failure.value) is wanted
                assert "a:" not in str(failure.value)


# Schedules


@pytest.mark.parametrize("number", [1, 4])
async def test_of_many_claims_for_one_due_time_one_succeeds(world: World, number: int) -> None:
    async with processes(world, number) as adapters:
        for due in (DUE, DUE + 60.0):
            claims = await asyncio.gather(*(adapters[turn % number].claim("report", due) for turn in range(20)))
            assert claims.count(True) == 1
            assert {await adapter.last_fired("report") for adapter in adapters} == {due}


async def test_a_due_time_is_claimed_once_and_no_earlier_one_after_it(schedule: ScheduleAdapter) -> None:
    assert await schedule.last_fired("report") is None
    assert await schedule.claim("report", DUE) is True
    assert await schedule.claim("report", DUE) is False
    assert await schedule.claim("report", DUE - 60.0) is False
    assert await schedule.claim("report", DUE + 0.000_1) is True
    assert await schedule.claim("other", DUE) is True
    assert await schedule.last_fired("report") == DUE + 0.000_1


async def test_claims_of_different_due_times_never_go_back(world: World) -> None:
    async with processes(world, 2) as adapters:
        dues = [DUE + 60.0 * turn for turn in range(10)]
        claims = await asyncio.gather(*(adapters[turn % 2].claim("report", due) for turn, due in enumerate(dues)))
        assert claims[dues.index(max(dues))] is True
        assert await adapters[0].last_fired("report") == max(dues)


async def test_an_editor_that_died_delays_the_next_by_its_lease(world: World, clock: MovableClock) -> None:
    async with LeaseAdapter(world.store()) as died, ScheduleAdapter(world.store()) as schedule:
        await died.acquire("schedule:report", "edit:died", EDIT_LEASE)
        await schedule.last_fired("report")  # who has not seen a lease cannot tell that it has ended, on Kubernetes
        claim = asyncio.create_task(schedule.claim("report", DUE))
        await clock.advance(EDIT_LEASE)
        await asyncio.sleep(0.05)
        assert not claim.done()
        await clock.advance(0.002)
        assert await asyncio.wait_for(claim, 5.0) is True


async def test_an_editor_that_was_overtaken_does_not_claim(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with ScheduleAdapter(store) as slow, ScheduleAdapter(world.store()) as quick:

        async def paused(apply: Apply) -> object:
            await quick.last_fired("report")  # as above
            await clock.advance(EDIT_LEASE + 0.001)
            assert await quick.claim("report", DUE) is True
            return await apply()

        store.suffer("release", paused)
        assert await slow.claim("report", DUE) is False
        assert await quick.last_fired("report") == DUE


async def test_a_claim_that_was_stored_unheard_is_a_claim(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with ScheduleAdapter(store) as schedule:
        store.suffer("release", reply_lost)
        assert await moving(clock, schedule.claim("report", DUE)) is True
        store.suffer("release", request_lost)
        assert await moving(clock, schedule.claim("report", DUE + 60.0)) is True
        assert await schedule.claim("report", DUE + 60.0) is False


async def test_a_claim_of_unknown_outcome_says_so(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with ScheduleAdapter(store) as schedule:
        store.break_down(request_lost, "release", "read")
        with pytest.raises(OutcomeUnknownError, match=r"the store gave no answer for 5 s: check the store"):
            await moving(clock, schedule.claim("report", DUE))
        store.heal()
        # Whether that claim or this one succeeds in the end, it is one.
        await moving(clock, schedule.claim("report", DUE))
        assert await moving(clock, schedule.claim("report", DUE)) is False
        assert await schedule.last_fired("report") == DUE
        await clock.advance(EDIT_LEASE * 2)  # what is repeated in the background has ended by then


async def moving(clock: MovableClock, claim: Coroutine[object, object, bool]) -> bool:
    """Await a claim while time goes on."""
    task: asyncio.Task[bool] = asyncio.ensure_future(claim)
    while not task.done():
        await clock.advance(0.1)
        await asyncio.sleep(0.001)
    return await task
