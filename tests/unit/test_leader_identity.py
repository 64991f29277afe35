"""Whoever leads is one instance: neither a namesake nor a fork of it counts as the same."""

import asyncio
import logging
from uuid import UUID

import pytest

from grelmicro import lifecycle
from grelmicro.coordination import LeaderElection
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet
from tests.helpers.stores import request_lost
from tests.helpers.worlds import World, eventually


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_of_ten_that_start_at_once_one_leads(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(world, clock) as fleet:
        for _ in range(10):
            fleet.worker()
        await eventually(lambda: fleet.leaders, "one leads")
        leader = fleet.leaders
        for _ in range(60):
            await fleet.let_pass(1.0)
            assert fleet.leaders == leader
        await eventually(lambda: all(worker.election.record for worker in fleet.workers), "each has asked")
        assert {worker.election.record.fence for worker in fleet.workers if worker.election.record} == {
            leader[0].election.guard().fence
        }
    assert warnings(caplog) == []  # it is no trouble that others were faster


async def test_two_with_one_worker_name_are_two(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(world, clock) as fleet:
        twins = [fleet.worker(worker="web-1"), fleet.worker(worker="web-1")]
        await eventually(lambda: fleet.leaders, "one leads")
        await fleet.let_pass(60.0)
        assert len(fleet.leaders) == 1
        assert warnings(caplog) == [
            "another instance stands for leader:job under the worker name 'web-1': give each its own"
        ]
        (leader,) = fleet.leaders
        await leader.stop()
        twins.remove(leader)
        await eventually(lambda: fleet.leaders == twins, "the other one leads")


async def test_one_that_is_started_again_after_a_crash_is_no_twin(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet(world, clock) as fleet:
        dead = await fleet.leading(worker="web-1")
        await fleet.let_pass(3.0)
        dead.store.break_down(request_lost)
        stop = asyncio.create_task(dead.stop())
        await fleet.let_pass(1.0)
        again = fleet.worker(worker="web-1")
        await fleet.let_pass(16.0)
        await stop
        await eventually(again.election.is_leader, "it leads")
    assert not any("another instance" in line for line in warnings(caplog))


async def test_the_worker_name_is_the_readable_part_of_the_holder(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading(worker=UUID(int=7))
        assert leader.election.worker == "00000000-0000-0000-0000-000000000007"
        assert leader.election.guard().worker == leader.election.worker
        holder, _, own = (await fleet.record()).holder.rpartition(":")
        assert holder == leader.election.worker
        assert len(own) > 32
    names = {LeaderElection("job").worker for _ in range(50)}
    assert len(names) == 50
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in names)


async def test_each_term_has_a_holder_of_its_own(world: World, clock: MovableClock) -> None:
    """A late request of an earlier term, sent by a worker that leads again, does nothing to the present one."""
    async with Fleet(world, clock) as fleet:
        leader = await fleet.leading()
        first = leader.election.guard().holder
        await leader.stop()
        leader.start()
        await eventually(leader.election.is_leader, "it leads again")
        assert leader.election.guard().holder != first


async def test_what_a_fork_inherits_is_the_parents(
    world: World, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as one process can tell; with real forks see the tests with processes."""
    async with Fleet(world, clock) as fleet:
        leader = (await fleet.leading()).election
        worker = leader.worker
        present = lifecycle.generation
        monkeypatch.setattr(lifecycle, "generation", lifecycle.Generation())
        try:
            assert not leader.is_leader()
            assert not leader.is_running()
            assert leader.record is None
            assert leader.worker != worker
        finally:
            monkeypatch.setattr(lifecycle, "generation", present)
        assert len(fleet.workers) == 1
