"""This worker leads, or another one does."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, NotLeaderError
from grelmicro.errors import OutOfContextError
from grelmicro.task import Tasks
from grelmicro.testing import MovableClock, leads, leads_elsewhere, on_memory
from tests.helpers.worlds import eventually


@pytest.fixture
def leader() -> LeaderElection:
    """The election of the app."""
    return LeaderElection("feed")


@pytest.fixture(params=["runs", "does not run"])
async def micro(request: pytest.FixtureRequest, leader: LeaderElection, nothing_left: None) -> AsyncIterator[Grelmicro]:
    """An open app, of which the election runs or not."""
    tasks = Tasks(tasks=[leader] if request.param == "runs" else [])
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), tasks])
    async with micro:
        yield micro


async def test_it_leads_in_the_block(micro: Grelmicro, leader: LeaderElection) -> None:
    ran = leader.is_running()
    async with leads(micro, leader) as record:
        assert leader.is_leader()
        assert leader.guard() == record
    assert leader.is_running() is ran
    assert leader.is_leader() is ran


async def test_another_one_leads_in_the_block(micro: Grelmicro, leader: LeaderElection) -> None:
    async with leads_elsewhere(micro, leader, metadata={"url": "http://other"}) as record:
        assert dict(record.metadata) == {"url": "http://other"}
        assert record.lease_duration == 60.0
        assert not leader.is_leader()
        with pytest.raises(NotLeaderError):
            leader.guard()
        if leader.is_running():
            assert leader.record is not None
            assert leader.record.holder == record.holder
            assert dict(leader.record.metadata) == {"url": "http://other"}
    async with leads(micro, leader) as mine:
        assert mine.fence == record.fence + 1


async def test_it_can_lose_a_term_and_win_another(micro: Grelmicro, leader: LeaderElection) -> None:
    async with leads(micro, leader) as first:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return "done"

        working = asyncio.create_task(leader.lead(work))
        await begun.wait()
        async with leads_elsewhere(micro, leader) as other:
            assert other.fence == first.fence + 1
            assert not leader.is_leader()
            await asyncio.wait_for(ended.wait(), 10)
            assert await working is None
        async with asyncio.timeout(10):
            await leader.wait_for_leader()
        assert leader.guard().fence == other.fence + 1


async def test_both_work_in_threads(micro: Grelmicro, leader: LeaderElection) -> None:
    def steps() -> None:
        with leads(micro, leader) as record:
            assert leader.is_leader()
            with leads_elsewhere(micro, leader) as other:
                assert not leader.is_leader()
                assert other.fence > record.fence
                refused = pytest.raises(NotLeaderError, match="did not come to lead 'feed' within 0.01 s")
                with refused, leads(micro, leader, timeout=0.01):
                    pass
            with leads(micro, leader) as again:
                assert again.fence == other.fence + 1

    await asyncio.to_thread(steps)


async def test_whoever_else_led_is_deposed(micro: Grelmicro, leader: LeaderElection) -> None:
    async with leads_elsewhere(micro, leader) as first, leads_elsewhere(micro, leader) as second:
        assert second.fence == first.fence + 1
        assert not leader.is_leader()
    async with leads(micro, leader) as mine:
        assert mine.fence == second.fence + 1


async def test_who_does_not_come_to_lead_leaves_nothing(micro: Grelmicro, leader: LeaderElection) -> None:
    ran = leader.is_running()
    async with leads_elsewhere(micro, leader):
        with pytest.raises(NotLeaderError, match="another one does"):
            async with leads(micro, leader, timeout=0.01):
                pass
        assert leader.is_running() is ran


async def test_a_cancelled_test_leaves_nothing(micro: Grelmicro, leader: LeaderElection) -> None:
    ran = leader.is_running()
    inside = asyncio.Event()

    async def steps() -> None:
        async with leads(micro, leader), leads_elsewhere(micro, leader):
            inside.set()
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().call_soon(task.cancel)  # once more, while the blocks end

    task = asyncio.create_task(steps())
    await inside.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert leader.is_running() is ran
    async with leads(micro, leader, timeout=10):
        assert leader.is_leader()


async def test_the_app_has_to_be_open(leader: LeaderElection) -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    for block in (leads(micro, leader), leads_elsewhere(micro, leader)):
        with pytest.raises(OutOfContextError):
            async with block:
                pass
        with pytest.raises(OutOfContextError), block:
            pass
    async with micro:
        for block in (leads(micro, leader), leads_elsewhere(micro, leader)):
            with pytest.raises(OutOfContextError, match="would wait for itself"), block:
                pass


async def test_of_two_apps_on_one_loop_the_given_one_counts(leader: LeaderElection, nothing_left: None) -> None:
    micro, other = (Grelmicro(uses=[Coordination.from_url("memory://")]) for _ in range(2))
    async with micro, other:
        async with leads(micro, leader):
            record = await micro.coordination.election_backend.read("leader:feed")
            assert record is not None
            assert record.live
        assert await other.coordination.election_backend.read("leader:feed") is None


async def test_the_other_leader_dies_when_its_lease_ends(leader: LeaderElection, nothing_left: None) -> None:
    clock = MovableClock()
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    with on_memory(micro, clock=clock):
        async with micro, leads_elsewhere(micro, leader, lease_duration=15):
            await clock.advance(14)
            assert not leader.is_leader()
            await clock.advance(2)
            assert leader.is_leader()


async def test_leadership_changes_while_the_clock_stands_still(leader: LeaderElection, nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    with on_memory(micro, clock=MovableClock()):
        async with micro:
            for _ in range(2):
                async with leads(micro, leader), leads_elsewhere(micro, leader):
                    assert not leader.is_leader()


async def test_work_that_does_not_end_is_told(leader: LeaderElection, nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    going_on = asyncio.Event()

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            await going_on.wait()
        return "done"

    async with micro, leads(micro, leader):
        working = asyncio.create_task(leader.lead(stubborn))
        await eventually(lambda: leader._standing._bodies, "it works")
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError, match="work that does not end when it is cancelled"):
            async with leads_elsewhere(micro, leader, timeout=0.05):
                pass
        going_on.set()
        assert await working is None
