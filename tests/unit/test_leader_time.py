"""A leader gives up before its lease ends, whatever becomes of its requests, and not sooner than it must."""

import asyncio
from random import Random

import pytest

from grelmicro.coordination import LeaderElectionConfig
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet, Worker
from tests.helpers.stores import Gate, reply_lost, request_lost, silence
from tests.helpers.timeline import stalled_until, takes
from tests.helpers.worlds import World, eventually


def slept(clock: MovableClock, seconds: float) -> None:
    """The clock went on, and nothing else did."""
    clock._now += seconds


async def first_loss(fleet: Fleet, worker: Worker) -> tuple[float, float]:
    """When `worker` stopped leading for the first time, and for how long the store kept its lease from then on."""
    await worker.election.wait_for_leader()
    await worker.election.wait_lose_leader()
    assert not worker.election.is_leader()
    return fleet.clock.now(), worker.store.live_until - fleet.clock.now()


async def test_two_hundred_leaders_give_up_before_their_leases_end(world: World, clock: MovableClock) -> None:
    """Replies take up to 60 % of the lease; at some moment, nothing comes through any more."""
    random = Random(7)
    losses = []
    async with Fleet(world, clock) as fleet:
        for number in range(200 if world.kind == "memory" else 25):
            worker = fleet.worker(f"role {number}", start=False, backend_timeout=10.0)
            worker.store.break_down(takes(clock, reply=random.uniform(0.0, 9.0)), "acquire")
            worker.store.break_down(takes(clock, request=random.uniform(0, 4.5), reply=random.uniform(0, 4.5)), "renew")
            losses.append(asyncio.create_task(first_loss(fleet, worker)))
            worker.start()
        for _ in range(40):
            await fleet.let_pass(0.25 + random.random())
            for worker in random.sample(fleet.workers, 10):
                worker.store.break_down(silence, "renew", "acquire")
        for worker in fleet.workers:
            worker.store.break_down(silence, "renew", "acquire")
        await fleet.let_pass(12.0)
        margins = [margin for _, margin in await asyncio.gather(*losses)]
    assert min(margins) > 4.5  # the lease lasts 15 s, and 10 s after a request was sent its leader gives up


async def test_the_deadline_counts_from_when_the_last_granted_request_was_sent(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leader.store.suffer("renew", takes(clock, reply=4.0))
        leader.store.break_down(silence, "renew", "acquire")
        await fleet.let_pass(6.0)  # sent at 2, answered at 6
        assert leader.election.last_confirmation_age() == pytest.approx(4.0)
        await fleet.let_pass(5.9)
        assert leader.election.is_leader()
        await fleet.let_pass(0.15)
        assert not leader.election.is_leader()


@pytest.mark.parametrize("delay", [6.0, 9.0, 11.0])
@pytest.mark.parametrize("jitter", [0.0, 0.1])
async def test_single_slow_calls_do_not_end_a_term(
    world: World, clock: MovableClock, delay: float, jitter: float
) -> None:
    """Every fifth renewal is not answered in time; the one sent instead of it is."""
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(retry_jitter=jitter)
        fence = leader.election.guard().fence
        for _ in range(10):
            for _ in range(4):
                leader.store.suffer("renew", takes(clock))
            leader.store.suffer("renew", takes(clock, reply=delay))
        await fleet.let_pass(130.0)
        assert leader.election.guard().fence == fence
        assert leader.store.calls["renew"] > 40


async def test_a_stall_longer_than_the_deadline_demotes_in_time_and_is_made_up(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        fence = leader.election.guard().fence
        await fleet.let_pass(1.9)
        lost = asyncio.create_task(first_loss(fleet, leader))
        started = clock.now()
        leader.store.break_down(stalled_until(clock, started + 11.0), "renew", "release", "acquire")
        await fleet.let_pass(11.0)
        lost_at, remaining = await lost
        assert lost_at - started < 9.0
        assert remaining > 4.5
        leader.store.heal()
        await fleet.let_pass(1.0)
        assert leader.election.guard().fence > fence


async def test_a_reply_after_the_deadline_does_not_revive_the_term(world: World, clock: MovableClock) -> None:
    """Whoever saw the term end would otherwise not learn that it went on."""
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(retry_interval=3.0, backend_timeout=10.0)
        fence = leader.election.guard().fence
        leader.store.suffer("renew", takes(clock, reply=7.5))
        lost = asyncio.create_task(leader.election.wait_lose_leader())
        await fleet.let_pass(10.1)
        assert lost.done()
        again = asyncio.create_task(leader.election.wait_for_leader())
        await fleet.let_pass(10.0)
        assert again.done()
        assert leader.election.guard().fence > fence


async def test_a_machine_that_slept_through_the_deadline_does_not_revive_the_term(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        fence = leader.election.guard().fence
        gate = Gate(after=True)
        leader.store.suffer("renew", gate)
        await fleet.let_pass(2.0)
        assert gate.arrived.is_set()
        slept(clock, 9.0)
        assert not leader.election.is_leader()
        gate.open.set()  # the answer is read before any timer is looked at
        await fleet.settle()
        assert leader.election.guard().fence > fence


async def test_a_request_that_is_not_answered_by_the_deadline_delays_no_successor(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(backend_timeout=9.0)
        other = fleet.worker()
        await fleet.settle()
        leader.store.break_down(silence, "renew", "acquire")
        await fleet.let_pass(9.5)
        assert fleet.leaders == [leader]
        await fleet.let_pass(1.0)
        await eventually(lambda: fleet.leaders == [other], "the other one leads")


async def test_a_candidate_waits_for_the_leaders_lease_not_for_its_own(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(lease_duration=30.0, renew_deadline=20.0)
        other = fleet.worker(lease_duration=3.0, renew_deadline=2.0, retry_interval=0.5, backend_timeout=1.0)
        leader.store.break_down(request_lost)
        await fleet.let_pass(29.5)
        assert not fleet.leaders
        await fleet.let_pass(1.0)
        assert fleet.leaders == [other]


async def test_is_leader_is_right_although_the_event_loop_stood_still(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = (await fleet.leading()).election
        slept(clock, 9.9)
        assert leader.is_leader()
        assert leader.is_leader_confirmed_within(10.0)
        assert not leader.is_leader_confirmed_within(9.0)
        slept(clock, 0.2)
        assert not leader.is_leader()
        assert not leader.is_leader_confirmed_within(1e9)
        assert leader.last_confirmation_age() == float("inf")


async def test_a_lease_that_is_shortened_is_believed_shorter_before_the_request_is_sent(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leader.store.suffer("renew", reply_lost)
        leader.store.break_down(silence, "renew", "acquire")
        await leader.election.reconfigure(
            LeaderElectionConfig(lease_duration=5.0, renew_deadline=4.0, retry_interval=1.0, backend_timeout=1.0)
        )
        lost = asyncio.create_task(first_loss(fleet, leader))
        await fleet.let_pass(2.5)
        assert leader.store.live_until <= clock.now() + 5.0
        await fleet.let_pass(5.0)
        assert (await lost)[1] > 0.0


async def test_new_settings_count_from_the_next_renewal_on(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        await leader.election.reconfigure(
            leader.election.config.model_copy(update={"lease_duration": 60.0, "renew_deadline": 40.0})
        )
        await fleet.let_pass(2.5)
        assert 55.0 < (await fleet.record()).remaining <= 60.0
        leader.store.break_down(silence, "renew")
        await fleet.let_pass(35.0)
        assert leader.election.is_leader()


async def test_a_retry_interval_near_the_deadline_still_leaves_time_for_a_second_try(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(retry_interval=9.8, retry_jitter=0.1, backend_timeout=2.0)
        fence = leader.election.guard().fence
        for _ in range(6):
            leader.store.suffer("renew", silence)
            leader.store.suffer("renew", takes(clock, reply=0.2))
        await fleet.let_pass(60.0)
        assert leader.election.guard().fence == fence
