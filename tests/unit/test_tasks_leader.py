"""A task of the leader runs on the worker that leads, as long as it leads, and needs no lock."""

import asyncio
import threading
from functools import partial

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.errors import NotLeaderError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.crews import Crew, Hand
from tests.helpers.stores import refused
from tests.helpers.timeline import pause
from tests.helpers.worlds import World, eventually


async def leading(crew: Crew, hand: Hand) -> None:
    """Wait until `hand` leads."""
    assert hand.leader is not None
    await eventually(hand.leader.is_leader, "it leads")
    await crew.settle()


async def test_only_the_leader_runs_it(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        first = await crew.hand(2.0, leader=True)
        await leading(crew, first)
        second = await crew.hand(2.0, leader=True)
        await crew.let_pass(20.0)
        assert len(first.runs) in (11, 12)
        assert not second.runs
        assert second.outcomes == {"skipped": 11}


async def test_whoever_begins_to_lead_fires_at_once(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        first = await crew.hand(60.0, leader=True)
        await leading(crew, first)
        await crew.let_pass(10.0)
        second = await crew.hand(60.0, leader=True)
        await crew.let_pass(10.0)
        await crew.stop(first)
        stopped = clock.now()
        await eventually(lambda: second.runs, "it ran")
        assert second.runs == [pytest.approx(stopped, abs=0.5)]
        await crew.let_pass(60.5)
        assert second.runs[1:] == [second.runs[0] + 60.0]


async def test_no_lock_backend_is_needed(nothing_left: None) -> None:
    ran: list[str] = []
    leader = LeaderElection("job")
    tasks = Tasks(tasks=[leader])

    @tasks.every(seconds=60, leader=leader)
    async def job() -> None:
        ran.append("job")

    async with Grelmicro(uses=[Coordination(election=MemoryProvider()), tasks]):
        await eventually(lambda: ran, "it ran")
    assert ran == ["job"]


async def test_a_lost_term_cancels_the_run_and_is_counted(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    cut: list[float] = []

    async def work() -> None:
        try:
            await pause(clock, 100.0)
        finally:
            cut.append(clock.now())

    async with Crew(world, clock) as crew:
        hand = await crew.hand(200.0, work, leader=True)
        await leading(crew, hand)
        await crew.let_pass(0.5)
        assert hand.runs
        sent = clock.now()
        hand.store.break_down(refused)
        await crew.let_pass(12.0)
        assert len(cut) == 1
        assert cut[0] <= sent + 10.0
        assert hand.task.outcomes["lost"] == 1
        assert hand.task.outcomes["error"] == 0
    assert "task job lost leadership while it ran" in caplog.text


async def test_with_a_lock_too_both_must_hold(world: World, clock: MovableClock) -> None:
    """The lock keeps the interval when leadership changes hands in between."""
    async with Crew(world, clock) as crew:
        first = await crew.hand(20.0, leader=True, lock={})
        await leading(crew, first)
        second = await crew.hand(20.0, leader=True, lock={})
        await crew.let_pass(5.0)
        started = first.runs[0]
        await crew.stop(first)
        await eventually(lambda: second.leader is not None and second.leader.is_leader(), "it leads")
        await crew.let_pass(10.0)
        assert not second.runs
        await crew.let_pass(26.5)
        assert second.runs == pytest.approx([started + 20.5, started + 40.0], abs=1.6)


async def test_a_body_that_finds_that_it_does_not_lead_is_skipped(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        election = LeaderElection("another")

        async def work() -> None:
            election.guard()

        hand = await crew.hand(2.0, work)
        await crew.let_pass(1.0)
        assert hand.outcomes == {"skipped": 1}
        with pytest.raises(NotLeaderError):
            election.guard()


async def test_a_thread_keeps_the_term_until_it_ends(real_world: World) -> None:
    """It cannot be stopped, so nobody else may lead as long as it runs and the lease lasts."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    hand = await started_thread(real_world, begun, go_on, ended)
    follower = LeaderElection("job", backend=hand.election_backend)
    async with hand.election_backend:
        await eventually(begun.is_set, "it runs")
        service = asyncio.create_task(follower())
        stop = asyncio.create_task(hand.stop())
        await asyncio.sleep(0.2)
        assert hand.leader is not None
        assert not follower.is_leader()
        assert not stop.done()
        go_on.set()
        await asyncio.wait_for(stop, 10)
        assert ended.is_set()
        await asyncio.wait_for(follower.wait_for_leader(), 10)
        assert hand.task.outcomes["error"] == 1  # it was cut off: nobody waited for it any more
        service.cancel()
        await asyncio.wait({service})


async def started_thread(world: World, begun: threading.Event, go_on: threading.Event, ended: threading.Event) -> Hand:
    """A worker that leads and whose task runs in a thread; its patience at the end is over at once."""
    hand = Hand(world.troubled(), world.clock, None)  # type: ignore[arg-type]
    hand.tasks = Tasks(shutdown_timeout=0.0)
    hand.leader = LeaderElection("job", backend=hand.election_backend)
    hand.tasks.add_task(hand.leader)

    @hand.tasks.every(seconds=60, name="job", leader=hand.leader)
    def job() -> None:
        begun.set()
        assert go_on.wait(10)
        ended.set()

    await hand.start()
    return hand


async def test_a_gate_that_opens_and_closes_is_followed(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(1.0, partial(pause, clock, 0.1), leader=True)
        await leading(crew, hand)
        for _ in range(3):
            hand.store.break_down(refused)
            await crew.let_pass(20.0)
            ran = len(hand.runs)
            await crew.let_pass(5.0)
            assert len(hand.runs) == ran
            hand.store.heal()
            await crew.let_pass(20.0)
            assert len(hand.runs) >= ran + 10
        task = hand.task
        assert isinstance(task, IntervalTask)
        assert sum(task.outcomes.values()) == pytest.approx(135, abs=6)


UNATTENDED = (
    "the leader of 'job' is waited for, and nothing runs that election in this process: add it to the Tasks of an open "
    "app, or run it in a task of its own"
)


@pytest.mark.parametrize("seconds", [0.01, 60.0])
async def test_an_election_that_was_never_started_is_told_once(
    nothing_left: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """As with `Tasks` that no app uses."""
    monkeypatch.setattr("grelmicro.coordination.leaderelection.UNATTENDED_S", 0.05)
    leader, other = LeaderElection("job"), LeaderElection("other")
    tasks = Tasks()
    tasks.every(seconds=seconds, name="forgotten", leader=leader)(lambda: None)
    tasks.every(seconds=seconds, name="standing", leader=other)(lambda: None)
    async with tasks:
        service = asyncio.create_task(other())
        waiting = [asyncio.create_task(each.wait_for_leader()) for each in (leader, leader, other)]
        await eventually(lambda: caplog.messages, "it is told")
        await asyncio.sleep(0.2)
        for task in (service, *waiting):
            task.cancel()
        await asyncio.wait({service, *waiting})
    assert [text for text in caplog.messages if "is waited for" in text] == [UNATTENDED]


async def test_an_election_that_is_started_in_time_is_not_waited_for_in_vain(
    nothing_left: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grelmicro.coordination.leaderelection.UNATTENDED_S", 0.5)
    leader = LeaderElection("job")
    waiting = asyncio.create_task(leader.wait_for_leader())
    await asyncio.sleep(0.05)
    async with Grelmicro(uses=[Coordination(MemoryProvider()), Tasks(tasks=[leader])]):
        await asyncio.wait_for(waiting, 5)
    assert "is waited for" not in caplog.text


def test_a_task_whose_leader_is_on_another_event_loop_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ahead, leader = LeaderElection("job"), LeaderElection("job")

    async def on_another_loop() -> None:
        tasks = Tasks()
        tasks.every(seconds=60, leader=leader, name="job")(lambda: pytest.fail("it does not lead"))
        async with tasks:
            await eventually(lambda: "task job ended while the others run on" in caplog.text, "it is told")

    with Grelmicro(uses=[Coordination(MemoryProvider()), Tasks(tasks=[ahead, leader])]):
        asyncio.run(on_another_loop())
    assert "election 'job' runs on another event loop than this code" in caplog.text


async def test_due_fires_while_nobody_can_lead_are_trouble_of_the_store(world: World, clock: MovableClock) -> None:
    async with Crew(world, clock) as crew:
        hand = await crew.hand(5.0, leader=True)
        await leading(crew, hand)
        hand.store.break_down(refused)
        await crew.let_pass(25.5)
        before = dict(hand.outcomes)
        await crew.let_pass(20.0)
        assert hand.outcomes["coordination_error"] - before.get("coordination_error", 0) == 4
        assert hand.outcomes.get("skipped", 0) == before.get("skipped", 0)
