"""A cancellation that was not aimed at a leader's work, or at its election, ends neither."""

import asyncio
import logging

import pytest

from grelmicro.errors import TaskError
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet
from tests.helpers.stores import Apply
from tests.helpers.worlds import World, eventually


class Feed:
    """Work that awaits something that another one cancels, the first few times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.began = 0

    async def __call__(self) -> str:
        self.began += 1
        if self.began > self.times:
            return "read"
        inner = asyncio.create_task(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner
        raise AssertionError


async def cancelled(apply: Apply) -> object:
    """The client library awaits something of its own that was cancelled."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return await future


async def test_repeated_work_begins_anew_in_the_same_term(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    feed = Feed(3)
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        fence = leader.election.guard().fence
        leading = asyncio.create_task(leader.election.lead(feed, repeat=True))
        await fleet.let_pass(7.0)
        assert (feed.began, await leading) == (4, "read")
        assert leader.election.guard().fence == fence
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in failures] == [
        "the work of leader 'job' failed, and begins anew in 2 s"
    ] * 3
    assert all(record.exc_info is not None for record in failures)


async def test_work_that_is_not_repeated_fails(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        for run in (leader.election.lead, leader.election.run_in_term):
            with pytest.raises(TaskError, match="was cancelled by something that it awaits") as raised:
                await run(Feed(1))
            assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        assert leader.election.is_leader()


async def test_work_that_cancels_itself_fails_too(world: World, clock: MovableClock) -> None:
    async def end_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        with pytest.raises(TaskError, match="was cancelled"):
            await leader.election.lead(end_itself)


@pytest.mark.parametrize("operation", ["acquire", "renew", "watch"])
async def test_the_election_outlasts_one_in_its_store(world: World, clock: MovableClock, operation: str) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        if operation == "renew":
            worker.start()
            await fleet.settle()
            assert worker.election.is_leader()
        worker.store.break_down(cancelled, operation)
        if operation != "renew":
            worker.start()
        await fleet.let_pass(5.0)
        assert worker.election.is_running()
        worker.store.heal()
        await fleet.let_pass(3.0)
        await eventually(worker.election.is_leader, "it leads")
        assert operation != "renew" or worker.election.guard().transitions == 0, "it never stopped to lead"
