"""Elections and locks while the API server has lost its own store, and while both are killed and started again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from grelmicro.coordination import Coordination, LeaderElection, LockLostError
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartKubernetes
from tests.servers.kubernetes import KubernetesServer
from tests.servers.server import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("kubernetes"),
    pytest.mark.usefixtures("nothing_left"),
]

LEASE, DEADLINE = 3.0, 2.0
"""Seconds of a lease, and those after which a leader gives up that cannot renew it."""

RETURN = 25.0
"""Seconds within which somebody leads once the server answers again; the machine may be busy."""


class Crew:
    """Three candidates, each over connections of its own, and what their work did."""

    def __init__(self, server: KubernetesServer) -> None:
        self.server = server
        self.elections: list[LeaderElection] = []
        self.running = 0
        self.fences: list[int] = []
        self.ended_at: list[float] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Crew":
        for _ in range(3):
            coordination = await self._stack.enter_async_context(Coordination.from_url(self.server.url))
            election = coordination.leaderelection(
                "job", lease_duration=LEASE, renew_deadline=DEADLINE, retry_interval=0.3, backend_timeout=0.9
            )
            self.elections.append(election)
            for work in (election(), self._lead(election)):
                task = asyncio.create_task(work)
                self._stack.push_async_callback(asyncio.wait, {task})
                self._stack.callback(task.cancel)
        await self.led_anew(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def leaders(self) -> int:
        """How many say that they lead."""
        return sum(election.is_leader() for election in self.elections)

    async def led_anew(self, terms: int) -> None:
        """Wait until somebody leads, in another term than the first `terms`."""
        await eventually(lambda: len(self.fences) > terms and self.running, "somebody leads", RETURN)

    def check(self) -> None:
        """No two ever worked at once, and each term has a higher fence."""
        assert self.leaders <= 1
        assert self.running <= 1
        assert self.fences == sorted(set(self.fences))

    async def _lead(self, election: LeaderElection) -> None:
        async def work() -> None:
            self.running += 1
            self.fences.append(election.guard().fence)
            self.check()
            try:
                while True:
                    await asyncio.sleep(0.01)
                    self.check()
            finally:
                self.running -= 1
                self.ended_at.append(monotonic())

        await election.lead(work, repeat=True)


@pytest.fixture
async def crew(start_kubernetes: StartKubernetes) -> AsyncIterator[Crew]:
    async with Crew(start_kubernetes()) as crew:
        yield crew


async def paused(server: Server, seconds: float) -> float:
    """Stop it for a while; when that began."""
    begun = monotonic()
    await asyncio.to_thread(server.pause)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(server.resume)
    return begun


async def test_an_api_server_without_its_store_lets_no_two_lead(crew: Crew) -> None:
    await paused(crew.server.etcd, DEADLINE / 4)
    await asyncio.sleep(0.5)
    assert (len(crew.fences), crew.leaders) == (1, 1), "a short pause ends no term"

    locks = Coordination.from_url(crew.server.url)
    async with locks:
        holding = asyncio.create_task(hold(locks))
        await eventually(lambda: holding.done() or holding.get_name() == "held", "it is held")
        begun = await paused(crew.server.etcd, LEASE + 1.5)
        assert crew.ended_at[-1] < begun + LEASE, "its work ended before another could lead"
        await crew.led_anew(1)
        assert await asyncio.wait_for(holding, RETURN) < begun + LEASE
        async with locks.lock("cart", lease_duration=LEASE):  # it is free again
            crew.check()
    await asyncio.sleep(1.0)  # what was asked before arrives
    crew.check()


async def test_a_store_of_an_api_server_that_is_killed_is_waited_for(crew: Crew) -> None:
    terms = len(crew.fences)
    await asyncio.to_thread(crew.server.etcd.kill)
    await asyncio.sleep(LEASE + 0.5)
    assert crew.leaders == crew.running == 0
    await asyncio.to_thread(crew.server.etcd.start)
    await crew.led_anew(terms)
    terms = len(crew.fences)
    await asyncio.to_thread(crew.server.kill)
    await asyncio.to_thread(crew.server.etcd.kill)
    await asyncio.to_thread(crew.server.start)
    await crew.led_anew(terms - 1)
    await asyncio.sleep(1.0)
    crew.check()


async def hold(locks: Coordination) -> float:
    """Hold a lock until it is lost; when the work under it was cancelled."""
    ended_at = 0.0
    with pytest.raises(LockLostError):
        async with locks.lock("cart", lease_duration=LEASE, auto_renew=True):
            task = asyncio.current_task()
            assert task is not None
            task.set_name("held")
            try:
                await asyncio.Event().wait()
            finally:
                ended_at = monotonic()
    return ended_at
