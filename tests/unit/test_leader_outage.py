"""No outage and no missing backend ends an election, and the log tells of each once in a while."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.coordination.adapters import LeaderElectionAdapter
from grelmicro.errors import BackendUnavailableError
from grelmicro.events import Event, listen
from grelmicro.leases.outage import Outage
from grelmicro.providers.memory import MemoryProvider
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet
from tests.helpers.stores import Apply, Fault, refused, request_lost, silence
from tests.helpers.timeline import CountedStore, pause
from tests.helpers.worlds import World, eventually


async def broken_client(apply: Apply) -> object:
    raise RuntimeError("a bug in the client library")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of the election's trouble, without the times."""
    return [
        re.sub(r"\d+\.\d s", "N s", record.getMessage())
        for record in caplog.records
        if "has trouble" in record.getMessage() or "works again" in record.getMessage()
    ]


@pytest.mark.parametrize("fault", [refused, request_lost, silence, broken_client])
async def test_a_candidate_outlasts_an_outage(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    caplog.set_level(logging.INFO)
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False, error_interval=60.0)
        worker.store.break_down(fault, "acquire")
        worker.start()
        await fleet.let_pass(310.0)
        assert worker.election.is_running()
        assert not worker.election.is_leader()
        assert worker.store.calls["acquire"] > 40
        worker.store.heal()
        await fleet.let_pass(8.0)
        assert worker.election.is_leader()
    begun, *lines, over = told(caplog)
    assert " (election 'job') has trouble since N s: " in begun
    assert 4 <= len(lines) <= 5
    assert all(" (election 'job') still has trouble after N s: " in line for line in lines)
    assert over.endswith("Store works again after N s")
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2, "at its begin and its end"


@pytest.mark.parametrize("fault", [refused, request_lost, silence, broken_client])
async def test_a_leader_outlasts_an_outage(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    async with Fleet(world, clock) as fleet:
        worker = await fleet.leading(error_interval=600.0)
        fence = worker.election.guard().fence
        worker.store.break_down(fault, "watch", "acquire", "renew")
        await fleet.let_pass(310.0)
        assert worker.election.is_running()
        worker.store.heal()
        await fleet.let_pass(8.0)
        assert worker.election.guard().fence > fence
    lines = told(caplog)
    assert len(lines) == 2
    assert lines[1].endswith("Store works again after N s")


async def test_a_leader_whose_lease_was_taken_away_learns_it_and_stands_again(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(world, clock) as fleet:
        worker = await fleet.leading(retry_interval=2.0)
        fence = worker.election.guard().fence
        lease = await worker.store.inner.read("leader:job")
        assert lease is not None
        assert await worker.store.inner.release(lease)  # by an operator
        await clock.advance(3.0)  # until then it leads, for all that it can know
        await fleet.settle()
        await eventually(lambda: worker.election.is_leader(), "it leads again")
        assert worker.election.guard().fence == fence + 1, "long before the deadline of the first term"
    assert "lost leader:job" in caplog.text


async def test_a_subscription_that_fails_is_tried_again(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        worker.store.break_down(refused, "watch")
        worker.start()
        await fleet.let_pass(60.0)
        assert not worker.election.is_leader()
        worker.store.heal()
        await fleet.let_pass(2.5)
        assert worker.election.is_leader()


async def test_a_store_that_never_begins_a_subscription_is_polled(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        worker = fleet.worker(start=False)
        worker.store.break_down(silence, "watch")
        worker.start()
        await fleet.let_pass(60.0)
        assert not worker.election.is_leader()
        await leader.stop()
        await fleet.let_pass(5.0)
        assert worker.election.is_leader()


async def test_a_store_that_cannot_be_opened_is_tried_again(world: World, clock: MovableClock) -> None:
    class Shut(CountedStore):
        shut = True

        async def open(self) -> None:
            if self.shut:
                raise BackendUnavailableError("the store does not open")
            await super().open()

    store = Shut(world.store())
    election = LeaderElection("job", backend=LeaderElectionAdapter(store))
    service = asyncio.create_task(election())
    await pause_in_steps(clock, 20.0)
    store.shut = False
    await pause_in_steps(clock, 2.5)
    await eventually(election.is_leader, "it leads")
    service.cancel()
    await asyncio.wait({service})


async def pause_in_steps(clock: MovableClock, seconds: float) -> None:
    """Let time pass, with a little real time in each step."""
    for _ in range(int(seconds * 2)):
        await clock.advance(0.5)
        await asyncio.sleep(0.001)


async def test_without_an_app_it_waits_for_one(nothing_left: None, caplog: pytest.LogCaptureFixture) -> None:
    election = LeaderElection("job", retry_interval=0.01)
    service = asyncio.create_task(election())
    await asyncio.sleep(0.1)
    assert election.is_running()
    [line] = told(caplog)
    assert line.startswith(
        "election 'job' has trouble since N s: LeaderElection 'job': no app is open: open one around"
    )
    async with Grelmicro(uses=[Coordination(MemoryProvider())]):
        await asyncio.wait_for(election.wait_for_leader(), 5)
        service.cancel()
        await asyncio.wait({service})
    assert told(caplog)[1:] == ["election 'job' works again after N s"]


async def test_a_backend_that_is_missing_ends_neither_the_election_nor_the_app(
    nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    election = LeaderElection("job", retry_interval=0.01)
    async with Grelmicro(uses=[Coordination(lock=MemoryProvider())]):
        service = asyncio.create_task(election())
        await asyncio.sleep(0.1)
        assert election.is_running()
        assert not election.is_leader()
        assert len(told(caplog)) == 1
        assert (
            "this Coordination has no election backend: give it one with Coordination(election=...)" in told(caplog)[0]
        )
        service.cancel()
        await asyncio.wait({service})


async def test_it_can_be_stopped_in_the_middle_of_an_outage(world: World, clock: MovableClock) -> None:
    for fault in (refused, silence):
        async with Fleet(world, clock) as fleet:
            worker = fleet.worker(start=False)
            worker.store.break_down(fault)
            worker.start()
            await fleet.let_pass(7.0)
            assert worker.service is not None
            worker.service.cancel()
            worker.store.heal()
            await fleet.let_pass(1.0)
            assert worker.service.done()


async def test_an_outage_while_it_stops_does_not_hold_it_up(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leader.store.suffer("release", silence)
        stop = asyncio.create_task(leader.stop())
        await fleet.let_pass(5.5)
        await asyncio.wait_for(stop, 5)


def test_an_outage_is_told_again_after_each_interval(caplog: pytest.LogCaptureFixture) -> None:
    """However often it is noted in between."""
    caplog.set_level(logging.INFO)
    outage = Outage("the thing", logging.getLogger("grelmicro"))
    for tenth in range(31):
        outage.note(ValueError("down"), tenth / 10, 0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "the thing has trouble since 0.0 s: down",
        *(f"the thing still has trouble after {since} s: down" for since in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)),
    ]
    caplog.clear()
    outage.over(3.25)
    outage.over(3.5)
    outage.note(TimeoutError(), 4.0, 0.5)
    assert [record.getMessage() for record in caplog.records] == [
        "the thing works again after 3.2 s",
        "the thing has trouble since 0.0 s: no answer in time: check the store",
    ]


async def test_settings_of_the_log_count_live(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False, error_interval=600.0)
        worker.store.break_down(refused)
        worker.start()
        await fleet.let_pass(60.0)
        assert len(told(caplog)) == 1
        await worker.election.reconfigure(worker.election.config.model_copy(update={"error_interval": 10.0}))
        await fleet.let_pass(61.0)
        assert 6 <= len(told(caplog)) <= 8


async def test_a_late_answer_is_awaited_without_a_lease_left_over(world: World, clock: MovableClock) -> None:
    """An acquire that took effect although it was given up is undone, and nobody waits for its lease to end."""

    async def in_vain(apply: Apply) -> object:
        await apply()
        await pause(clock, 3600.0)
        return None

    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        worker.store.suffer("acquire", in_vain)
        worker.start()
        await eventually(lambda: worker.store.live_until, "the lease is taken")
        other = fleet.worker()
        await fleet.let_pass(4.75)
        assert other.store.calls["acquire"] >= 1  # a file that tells late of the first lease lets it ask again
        assert not fleet.leaders
        await fleet.let_pass(1.0)
        await eventually(lambda: fleet.leaders, "one leads")


async def test_the_undo_of_a_lost_request_does_not_end_the_term_that_came_after_it(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False, ordered=False)
        worker.store.suffer("acquire", request_lost)
        worker.start()
        await fleet.let_pass(3.0)
        fence = worker.election.guard().fence
        await fleet.let_pass(30.0)
        assert worker.election.guard().fence == fence


@asynccontextmanager
async def heard(events: list[Event]) -> AsyncIterator[None]:
    """Note what happens in the block."""
    stop = listen(events.append)
    try:
        yield
    finally:
        stop()


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of lost terms."""
    return [
        record.getMessage().partition(": ")[2]
        for record in caplog.records
        if record.levelno == logging.WARNING and record.getMessage().startswith("lost leader:job, term ")
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "this process stood still, or its event loop was blocked"),
        (refused, "the store is down"),
        (silence, "no answer"),
    ],
)
async def test_a_term_that_ran_out_is_told_as_lost(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, fault: Fault | None, reason: str
) -> None:
    events: list[Event] = []
    async with heard(events), Fleet(world, clock) as fleet:
        worker = await fleet.leading()
        if fault is None:
            clock._now += 12.0  # within the lease
            await fleet.let_pass(0.25)
        else:
            worker.store.break_down(fault, "renew")
            await fleet.let_pass(10.5)
        [told] = losses(caplog)
        assert told.startswith("it was not confirmed in time: ")
        assert reason in told
        [lost] = [event for event in events if event.kind == "lost"]
        assert (lost.name, lost.detail) == ("leader:job", told)
        assert lost.seconds is not None
        assert lost.seconds >= 10.0
        await eventually(lambda: any(event.kind == "led" for event in events), "the term has ended")
        assert not [event for event in events if event.kind == "handed_over"]


async def test_a_term_that_is_given_up_is_no_loss(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    async with heard(events), Fleet(world, clock) as fleet:
        worker = await fleet.leading()
        await worker.stop()
    assert not losses(caplog)
    assert [event.kind for event in events] == ["acquired", "handed_over", "led"]


async def test_a_worker_is_cut_off_once_the_store_has_not_answered_for_a_lease(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        leader, other = await fleet.leading(), fleet.worker()
        await fleet.settle()
        other.store.break_down(refused)
        await fleet.let_pass(12.0)
        assert not other.election.is_cut_off()
        await fleet.let_pass(16.0)
        assert (other.election.is_cut_off(), leader.election.is_cut_off()) == (True, False)
        other.store.heal()
        await fleet.let_pass(3.0)
        assert not other.election.is_cut_off()


async def test_a_candidate_that_asks_less_often_than_its_own_lease_is_not_cut_off(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        await fleet.leading(lease_duration=60.0)
        other = fleet.worker(lease_duration=3.0)
        oldest = 0.0
        for _ in range(80):
            await fleet.let_pass(0.25)
            oldest = max(oldest, other.election.last_round_age())
            assert not other.election.is_cut_off()
        assert oldest > 3.0


async def test_a_worker_that_never_heard_of_the_store_is_cut_off_after_a_lease(
    world: World, clock: MovableClock
) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        worker.store.break_down(refused)
        worker.start()
        await fleet.let_pass(14.0)
        assert not worker.election.is_cut_off()
        await fleet.let_pass(4.0)
        assert worker.election.is_cut_off()


async def test_the_record_of_a_candidate_on_a_store_of_its_process_is_up_to_date(clock: MovableClock) -> None:
    adapter = MemoryProvider(clock=clock).leaderelection()
    async with adapter:
        first, second = (LeaderElection("job", backend=adapter, retry_jitter=0.0) for _ in range(2))
        services = [asyncio.create_task(each()) for each in (first, second)]
        await clock.advance(0.1)
        for _ in range(40):
            await clock.advance(0.5)
            assert first.record is not None
            assert second.record is not None
            assert (first.record.renewed_at - second.record.renewed_at).total_seconds() <= 2.0
            assert second.last_round_age() <= 2.0
        for service in services:
            service.cancel()
        await asyncio.wait(services)
