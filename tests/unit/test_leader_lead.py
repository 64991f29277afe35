"""`lead` and `run_in_term` run work for one term: never without it, never beyond it, and never twice at once."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.errors import LeadershipLostError, NotLeaderError, OutOfContextError, TaskError
from grelmicro.task import Tasks
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet, Worker
from tests.helpers.stores import Apply, refused
from tests.helpers.timeline import pause
from tests.helpers.worlds import World


class Work:
    """Work that takes `needed` seconds to react to a cancellation, and notes when it begins and ends."""

    def __init__(self, clock: MovableClock, *, needed: float = 0.0, deaf: bool = False) -> None:
        self.clock = clock
        self.needed = needed
        self.deaf = deaf
        self.began: list[float] = []
        self.ended: list[float] = []

    async def __call__(self) -> str:
        self.began.append(self.clock.now())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await pause(self.clock, self.needed)
            if self.deaf:
                return "finished all the same"
            raise
        finally:
            self.ended.append(self.clock.now())
        return ""

    @property
    def runs(self) -> int:
        """How many run now."""
        return len(self.began) - len(self.ended)


async def lose(fleet: Fleet, worker: Worker) -> None:
    """End the term of `worker` by an outage, and let the store work again."""
    worker.store.break_down(refused)
    await fleet.let_pass(10.1)
    assert not worker.election.is_leader()
    worker.store.heal()


async def test_its_result_is_returned(world: World, clock: MovableClock) -> None:
    async def add(one: int, other: int) -> int:
        return one + other

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        assert await leader.election.lead(add, 2, 3) == 5
        assert await leader.election.lead(add, 2, 3, repeat=True) == 5
        assert await leader.election.run_in_term(add, 2, 3) == 5


async def test_it_waits_for_leadership(world: World, clock: MovableClock) -> None:
    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        other = fleet.worker()
        leading = asyncio.create_task(other.election.lead(work))
        await fleet.let_pass(30.0)
        assert not work.began
        stop = asyncio.create_task(leader.stop())
        await fleet.let_pass(11.0)
        await stop
        assert work.runs == 1
        leading.cancel()
        await asyncio.wait({leading})


async def test_a_loss_cancels_it_and_none_is_returned(world: World, clock: MovableClock) -> None:
    work = Work(clock, needed=2.0)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(work))
        await lose(fleet, leader)
        assert not leading.done()
        await fleet.let_pass(2.0)
        assert leading.done()
        assert await leading is None
        await fleet.let_pass(10.0)
        assert len(work.began) == 1


async def test_a_loss_cancels_it_at_the_deadline_itself(world: World, clock: MovableClock) -> None:
    """Not at the end of the lease, and not when the next request has failed."""
    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        began = clock.now()
        leading = asyncio.create_task(leader.election.lead(work))
        await lose(fleet, leader)
        assert await leading is None
        assert work.ended == [began + 10.0]


async def test_a_client_that_hangs_does_not_delay_the_end_of_the_work(world: World, clock: MovableClock) -> None:
    work = Work(clock)

    async def hang(apply: Apply) -> object:
        try:
            return await asyncio.Event().wait()
        finally:
            await pause(clock, 30.0)

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        began = clock.now()
        leading = asyncio.create_task(leader.election.lead(work))
        lost = asyncio.create_task(leader.election.wait_lose_leader())
        leader.store.break_down(hang, "renew")
        await fleet.let_pass(10.25)
        assert lost.done()
        assert await leading is None
        assert work.ended == [began + 10.0]


async def test_with_repeat_it_runs_again_in_the_next_term(world: World, clock: MovableClock) -> None:
    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(work, repeat=True))
        for terms in range(1, 4):
            await fleet.let_pass(3.0)
            assert (len(work.began), work.runs) == (terms, 1)
            await lose(fleet, leader)
            assert work.runs == 0
        leading.cancel()
        await asyncio.wait({leading})


async def test_its_errors_are_raised(world: World, clock: MovableClock) -> None:
    async def fail() -> None:
        raise ValueError("of the work")

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        with pytest.raises(ValueError, match="of the work"):
            await leader.election.lead(fail, repeat=True)
        with pytest.raises(ValueError, match="of the work"):
            await leader.election.run_in_term(fail)
        assert leader.election.is_leader()


async def test_an_error_in_reaction_to_a_loss_is_raised(world: World, clock: MovableClock) -> None:
    async def fail_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("of the cleaning up")

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(fail_late, repeat=True))
        await lose(fleet, leader)
        with pytest.raises(ValueError, match="of the cleaning up"):
            await leading


async def test_a_cancellation_returns_after_the_work_has_ended(world: World, clock: MovableClock) -> None:
    work = Work(clock, needed=3.0)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(work))
        await fleet.settle()
        leading.cancel()
        await fleet.let_pass(2.75)
        assert (work.runs, leading.done()) == (1, False)
        await fleet.let_pass(0.5)
        assert (work.runs, leading.cancelled()) == (0, True)
        assert leader.election.is_leader()


async def test_a_cancellation_during_a_loss_is_kept(world: World, clock: MovableClock) -> None:
    work = Work(clock, needed=3.0)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(work, repeat=True))
        await lose(fleet, leader)
        leading.cancel()
        await fleet.settle()
        assert leading.cancelled()  # the work was cancelled twice, and ends at the second time
        assert work.runs == 0
        await fleet.let_pass(5.0)
        assert len(work.began) == 1


async def test_an_error_of_cancelled_work_is_told(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("of the cleaning up")

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(fail_late))
        await fleet.settle()
        leading.cancel()
        with suppress(asyncio.CancelledError):
            await leading
        assert leading.cancelled()
    assert "of the cleaning up" in caplog.text


async def test_work_that_ignores_the_cancellation_is_waited_for(world: World, clock: MovableClock) -> None:
    """Another run of it would overlap with the first one."""
    work = Work(clock, needed=20.0, deaf=True)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(work, repeat=True))
        await lose(fleet, leader)
        await fleet.let_pass(19.0)
        assert leader.election.is_leader()
        assert (len(work.began), work.runs) == (1, 1)
        await fleet.let_pass(2.0)
        assert (len(work.began), work.runs) == (2, 1)
        leading.cancel()
        await fleet.let_pass(21.0)
        assert leading.done()


async def test_several_run_side_by_side_and_end_together(world: World, clock: MovableClock) -> None:
    works = [Work(clock, needed=number) for number in range(3)]
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = [asyncio.create_task(leader.election.lead(work)) for work in works]
        await fleet.settle()
        assert [work.runs for work in works] == [1, 1, 1]
        await lose(fleet, leader)
        await fleet.let_pass(2.5)
        assert await asyncio.gather(*leading) == [None, None, None]


async def test_the_end_of_one_ends_no_other(world: World, clock: MovableClock) -> None:
    async def quick() -> int:
        return 1

    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        leading = asyncio.create_task(leader.election.lead(work))
        assert await leader.election.lead(quick) == 1
        await fleet.let_pass(30.0)
        assert work.runs == 1
        leading.cancel()
        await asyncio.wait({leading})


async def test_run_in_term_runs_nothing_without_leadership(world: World, clock: MovableClock) -> None:
    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        await fleet.leading()
        other = fleet.worker()
        await fleet.settle()
        with pytest.raises(NotLeaderError, match="^this worker does not lead 'job': send the work to the leader, or"):
            await other.election.run_in_term(work)
        with pytest.raises(NotLeaderError):
            other.election.guard()
        assert not work.began


async def test_run_in_term_tells_a_loss(world: World, clock: MovableClock) -> None:
    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        running = asyncio.create_task(leader.election.run_in_term(work))
        await lose(fleet, leader)
        with pytest.raises(LeadershipLostError, match="^leadership of 'job' was lost while its work was running: "):
            await running


async def test_a_new_term_is_a_loss_and_then_a_gain(world: World, clock: MovableClock) -> None:
    """Also when the old one ended and the new one began before anybody who waits could look."""
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        fence = leader.election.guard().fence
        lost = asyncio.create_task(leader.election.wait_lose_leader())
        await fleet.settle()
        clock._now += 20.0  # the process stood still
        await fleet.settle()
        await fleet.let_pass(0.25)
        assert leader.election.guard().fence > fence
        assert lost.done()


async def test_a_new_term_ends_the_work_of_the_one_before(world: World, clock: MovableClock) -> None:
    work = Work(clock)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        fence = leader.election.guard().fence
        leading = asyncio.create_task(leader.election.lead(work, repeat=True))
        await fleet.settle()
        clock._now += 20.0  # the process stood still
        await fleet.let_pass(0.25)
        assert leader.election.guard().fence > fence
        assert (len(work.began), work.runs) == (2, 1)
        leading.cancel()
        await asyncio.wait({leading})


async def test_wait_lose_leader_returns_at_once_when_not_leading(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        await asyncio.wait_for(worker.election.wait_lose_leader(), 1)


async def test_whoever_waits_to_lead_can_be_cancelled(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        waiting = [asyncio.create_task(worker.election.lead(Work(clock))) for _ in range(3)]
        waiting.append(asyncio.create_task(worker.election.wait_for_leader()))
        await fleet.settle()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert worker.election._standing.changed.idle


async def test_what_cannot_be_called_is_refused_before_anybody_leads() -> None:
    wrong: Any = 5
    election = LeaderElection("feed")
    with pytest.raises(TaskError, match=r"lead\(\) takes a coroutine function, not int: pass it without calling it"):
        await asyncio.wait_for(election.lead(wrong), 10)
    with pytest.raises(TaskError, match=r"run_in_term\(\) takes a coroutine function, not int"):
        await election.run_in_term(wrong)


async def test_a_plain_function_is_refused(world: World, clock: MovableClock) -> None:
    def plain() -> Any:
        return 5

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        for call in (leader.election.lead, leader.election.run_in_term):
            with pytest.raises(TaskError, match=r"plain returned int: write it with `async def`"):
                await call(plain)
        assert leader.election.is_leader()


def test_another_event_loop_than_that_of_the_election_is_refused() -> None:
    election = LeaderElection("feed")

    async def work() -> None: ...

    async def on_another_loop() -> None:
        waits = (election.wait_for_leader, election.wait_lose_leader)
        for call in (*waits, partial(election.lead, work), partial(election.run_in_term, work)):
            with pytest.raises(OutOfContextError, match="election 'feed' runs on another event loop than this code"):
                await asyncio.wait_for(call(), 10)

    with Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[election])]):
        asyncio.run(on_another_loop())
