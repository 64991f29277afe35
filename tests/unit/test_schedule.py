"""A scheduled fire is claimed once, by one of all who ask, whatever becomes of their requests."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from grelmicro.coordination import ScheduleBackend
from grelmicro.coordination.adapters import ScheduleAdapter
from grelmicro.errors import CoordinationBackendError, OutcomeUnknownError
from grelmicro.leases.record import EDIT_LEASE, edit
from grelmicro.testing import MovableClock
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.stores import Fault, Gate, late, refused, reply_lost, request_lost
from tests.helpers.timeline import Timeline
from tests.helpers.worlds import World, eventually

MOST_SUSPENSIONS = 60


async def test_a_due_time_is_claimed_once(world: World) -> None:
    async with ScheduleAdapter(world.store()) as schedule:
        assert isinstance(schedule, ScheduleBackend)
        assert await schedule.last_fired("report") is None
        assert await schedule.claim("report", 100.5)
        assert not await schedule.claim("report", 100.5)
        assert await schedule.last_fired("report") == 100.5


async def test_an_older_one_is_over_and_a_later_one_is_new(world: World) -> None:
    async with ScheduleAdapter(world.store()) as schedule:
        assert await schedule.claim("report", 100.0)
        assert not await schedule.claim("report", 99.0)
        assert await schedule.claim("report", 1.7e9 + 1e-6)
        assert await schedule.last_fired("report") == 1.7e9 + 1e-6


async def test_names_are_apart(world: World) -> None:
    async with ScheduleAdapter(world.store()) as schedule:
        assert await schedule.claim("one", 100.0)
        assert await schedule.last_fired("other") is None
        assert await schedule.claim("other", 50.0)
        assert await schedule.last_fired("one") == 100.0


@pytest.mark.parametrize("workers", [1, 4])
async def test_of_many_who_claim_at_once_one_gets_it(real_world: World, workers: int) -> None:
    async with AsyncExitStack() as stack:
        schedules = [await stack.enter_async_context(ScheduleAdapter(real_world.store())) for _ in range(workers)]
        for due in (100.0, 160.0, 220.0):
            claims = [schedules[number % workers].claim("report", due) for number in range(20)]
            assert sorted(await asyncio.gather(*claims)) == [False] * 19 + [True]
        assert await schedules[0].last_fired("report") == 220.0


async def test_who_dies_while_claiming_delays_the_others_by_its_short_lease(world: World, clock: MovableClock) -> None:
    time = Timeline(world, clock)
    async with ScheduleAdapter(time.connect()) as schedule, world.store() as store:
        await store.acquire("schedule:report", "edit:of the dead", EDIT_LEASE)
        claims = [asyncio.create_task(schedule.claim("report", 100.0)) for _ in range(5)]
        await time.let_pass(EDIT_LEASE - 0.5)
        assert not any(claim.done() for claim in claims)
        await time.let_pass(1.0)
        await asyncio.wait(claims, timeout=5)
        assert sorted(claim.result() for claim in claims) == [False] * 4 + [True]


@pytest.mark.parametrize("faults", [[reply_lost], [request_lost], [refused, reply_lost], [reply_lost, request_lost]])
async def test_a_lost_answer_to_the_claim_is_found_out(world: World, clock: MovableClock, faults: list[Fault]) -> None:
    """Whether it took effect or not, this caller has it, and nobody else."""
    time = Timeline(world, clock)
    store = time.connect()
    async with ScheduleAdapter(store) as schedule, ScheduleAdapter(time.connect()) as other:
        store.suffer("release", *faults)
        claim = asyncio.create_task(schedule.claim("report", 100.0))
        await time.let_pass(2.0)
        assert await claim
        assert not await other.claim("report", 100.0)
        assert await other.last_fired("report") == 100.0


async def test_a_lost_question_claims_nothing_and_blocks_nobody(world: World, clock: MovableClock) -> None:
    time = Timeline(world, clock)
    store = time.connect()
    async with ScheduleAdapter(store) as schedule, ScheduleAdapter(time.connect()) as other:
        store.suffer("acquire", reply_lost)
        with pytest.raises(
            OutcomeUnknownError, match="^acquiring 'schedule:report', which is undone in the background"
        ):
            await schedule.claim("report", 100.0)
        claim = asyncio.create_task(other.claim("report", 100.0))
        await time.let_pass(1.0)
        assert await asyncio.wait_for(claim, 5)


async def test_a_store_that_stays_silent_is_told(world: World, clock: MovableClock) -> None:
    time = Timeline(world, clock)
    store = time.connect()
    async with ScheduleAdapter(store) as schedule:
        store.break_down(request_lost, "release", "read")
        claim = asyncio.create_task(schedule.claim("report", 100.0))
        await time.let_pass(EDIT_LEASE + 0.5)
        with pytest.raises(
            OutcomeUnknownError, match="^changing 'schedule:report': the store gave no answer for 5 s: "
        ):
            await claim
        store.heal()
        await time.let_pass(3.0)


async def test_a_store_that_is_down_claims_nothing(world: World, clock: MovableClock) -> None:
    time = Timeline(world, clock)
    store = time.connect()
    async with ScheduleAdapter(store) as schedule:
        store.break_down(refused)
        with pytest.raises(CoordinationBackendError):
            await schedule.claim("report", 100.0)
        with pytest.raises(CoordinationBackendError):
            await schedule.last_fired("report")
        store.heal()
        assert await schedule.claim("report", 100.0)


async def test_a_refused_fire_is_refused_also_when_the_store_fails_after_that(
    world: World, clock: MovableClock
) -> None:
    time = Timeline(world, clock)
    store = time.connect()
    async with ScheduleAdapter(store) as schedule:
        assert await schedule.claim("report", 100.0)
        store.suffer("release", reply_lost)
        assert not await schedule.claim("report", 100.0)
        await time.let_pass(1.0)
        assert await schedule.claim("report", 160.0)


async def test_who_stood_still_while_claiming_claims_anew(world: World, clock: MovableClock) -> None:
    """Its short lease has ended by then; the fire is neither lost nor taken twice."""
    for others_claim in (False, True):
        time = Timeline(world, clock)
        store = time.connect()
        due = 100.0 + others_claim
        async with ScheduleAdapter(store) as schedule, ScheduleAdapter(time.connect()) as other:
            gate = Gate()
            store.suffer("release", gate)
            claim = asyncio.create_task(schedule.claim("report", due))
            await eventually(gate.arrived.is_set, "it has the record")
            clock._now += EDIT_LEASE + 1.0
            if others_claim:
                assert await other.claim("report", due)
            gate.open.set()
            await time.settle()
            assert await claim is not others_claim
            assert not await other.claim("report", due)


async def test_a_change_that_fails_leaves_the_record_free(world: World) -> None:
    def fail(data: object) -> None:
        raise ValueError("of the change")

    async with ScheduleAdapter(world.store()) as schedule:
        with pytest.raises(ValueError, match="of the change"):
            await edit(schedule, "schedule:report", fail)
        assert await schedule.claim("report", 100.0)


@pytest.mark.parametrize("contended", [False, True], ids=["alone", "contended"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_a_claim_that_is_cancelled_anywhere_blocks_nobody(
    matrix_world: World, when: When, contended: bool
) -> None:
    """It has claimed the fire, or it has not; never twice, and the next one can be claimed at once."""
    store = matrix_world.troubled()
    store.break_down(late(request=0.001, reply=0.001))
    async with ScheduleAdapter(store) as schedule, ScheduleAdapter(matrix_world.store()) as other:
        for at in range(1, MOST_SUSPENSIONS):
            due = 100.0 * at

            async def claim(due: float = due, at: int = at) -> bool:
                task = asyncio.current_task()
                assert task is not None
                suspended = Suspended(schedule.claim("report", due), at, when, task.cancel)
                claimed = await suspended
                assert suspended.suspensions < at
                return claimed

            held = await other.acquire("schedule:report", "edit:of another", EDIT_LEASE) if contended else None
            cancelled = asyncio.create_task(claim())
            if held is not None:
                await asyncio.sleep(0.01)
                await other.release(held)
            await asyncio.wait({cancelled})
            async with asyncio.timeout(3.0):  # less than an edit's lease
                again = await other.claim("report", due)
                assert await other.claim("report", due + 50.0)
            if not cancelled.cancelled():
                assert (cancelled.result(), again) == (True, False)
                break
        assert at > 3
