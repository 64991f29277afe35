"""Stopped at any moment, an election leaves no lease, no task and no unusable connection behind."""

import asyncio

import pytest

from grelmicro.coordination import LeaderElection
from grelmicro.coordination.adapters import LeaderElectionAdapter
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.matrix import further
from tests.helpers.stores import SOON, Gate, TroubledStore, late
from tests.helpers.worlds import World, eventually

LONG = 3600.0
"""A lease that does not end by itself within a test."""

MOST_SUSPENSIONS = 80
"""More than the scenario needs: what suspends more often runs in circles."""


class Stopped(LeaderElection):
    """An election that is stopped when its service suspends for the time number `at`."""

    at = 0
    when: When = staticmethod(at_once)
    everything = False
    """Whether the service is cancelled with its caller, as at the end of `asyncio.run`."""
    caller: asyncio.Task[None]
    suspended: Suspended[None]

    async def _serve(self) -> None:
        self.suspended = Suspended(super()._serve(), self.at, type(self).when, self.stop)
        await self.suspended

    def stop(self) -> None:
        self.caller.cancel()
        if self.everything and (service := self._standing.service) is not None:
            service.cancel()


async def play(world: World, at: int, when: When, *, everything: bool, slow: bool) -> bool:
    """Stand, lead, renew and step down, and stop it (or stop it again) at suspension `at`; whether it came that far."""
    store = world.troubled()
    if slow:
        store.break_down(late(request=SOON, reply=SOON))
    election = Stopped(
        "job", backend=LeaderElectionAdapter(store), lease_duration=LONG, renew_deadline=LONG / 2, retry_interval=0.002
    )
    election.at, election.everything = at, everything
    Stopped.when = staticmethod(when)
    async with LeaderElectionAdapter(world.store()) as other:
        before = await other.acquire("leader:job", "before", LONG)
        election.caller = asyncio.create_task(election())
        for _ in range(3):
            await asyncio.sleep(0.002)
        await other.release(before)
        while not election.caller.done() and store.calls["renew"] < 2:
            await asyncio.sleep(0.001)
        if not election.caller.done():
            election.stop()
        await asyncio.wait({election.caller})
        assert election.caller.cancelled()
        assert not election.is_leader()
        assert election.suspended.suspensions < MOST_SUSPENSIONS

        async with asyncio.timeout(5):
            while not (lease := await other.acquire("leader:job", "after", LONG)).granted_to("after"):
                await asyncio.sleep(0.001)
        await other.release(lease)
        await eventually(lambda: not election.is_running(), "its service has ended")
        assert not store.is_open
    return election.suspended.suspensions >= at


async def play_all(world: World, when: When, *, everything: bool, slow: bool) -> None:
    """Play again and again, and cancel it at one suspension after the other."""
    at = 1
    while await play(world, at, when, everything=everything, slow=slow):
        at += 1
    assert at > 3


@pytest.mark.parametrize("everything", [False, True], ids=["caller", "all tasks"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_it_leaves_no_lease(matrix_world: World, when: When, everything: bool) -> None:
    # A store in memory answers before anything can come between; the others are slow anyway.
    await play_all(matrix_world, when, everything=everything, slow=matrix_world.kind == "memory")


@pytest.mark.parametrize("matrix_world", further("memory", "sqlite"), indirect=True)
@pytest.mark.parametrize("everything", [False, True], ids=["caller", "all tasks"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_the_pace_of_connections_changes_nothing(matrix_world: World, when: When, everything: bool) -> None:
    await play_all(matrix_world, when, everything=everything, slow=matrix_world.kind != "memory")


async def stopped_with_a_release_in_flight(store: TroubledStore) -> tuple["asyncio.Task[None]", Gate]:
    """An election that led and was stopped, while the store is about to carry out its release."""
    stop = asyncio.Event()
    election = LeaderElection("job", backend=LeaderElectionAdapter(store), lease_duration=LONG, renew_deadline=LONG / 2)
    running = asyncio.create_task(election(stop=stop))
    await eventually(election.is_leader, "it leads")
    gate = Gate()
    store.suffer("release", gate)
    stop.set()
    await gate.arrived.wait()
    return running, gate


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled_after_it_was_stopped_it_lasts_until_the_lease_is_given_back(world: World, times: int) -> None:
    """As in a lifespan, which ends while an election hands over: next, the process ends."""
    store = world.troubled()
    async with LeaderElectionAdapter(world.store()) as other:
        running, gate = await stopped_with_a_release_in_flight(store)
        lasted = []
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0.01)
            lasted.append(not running.done())
        gate.open.set()
        await asyncio.wait({running})
        assert all(lasted)
        assert running.cancelled()
        assert not store.is_open
        record = await other.read("leader:job")
        assert record is not None
        assert not record.live
