"""Elections whose requests really go to an API server, in a time that the test moves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.store import KubernetesStore
from grelmicro.clock import Timer
from grelmicro.leases import LeaseStore
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet, Worker
from tests.helpers.gateway import Gateway
from tests.helpers.timeline import STEP, pause
from tests.helpers.worlds import PATIENCE, World, eventually
from tests.servers.kubernetes import Namespace, Object

JOB = lease_name("grelmicro", "leader:job")
"""The Lease object of the role that a fleet stands for by default."""

BREATH = 0.002
"""Real seconds in which what nobody counts goes on, such as a watch."""


class SetClock:
    """The clock of another machine: leases are counted alike there, and its time of day is another one."""

    def __init__(self, clock: MovableClock, ahead: float) -> None:
        self._clock = clock
        self._ahead = ahead

    def now(self) -> float:
        """Seconds on the clock of leases."""
        return self._clock.now()

    def wall(self) -> float:
        """Seconds since 1970, as this machine believes."""
        return self._clock.wall() + self._ahead

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Call back when the clock has been moved by `delay`."""
        return self._clock.call_later(delay, callback)


class ClusterWorld(World):
    """Leases on the API server of a cluster."""

    def __init__(self, cluster: Cluster, clock: MovableClock) -> None:
        super().__init__("kubernetes", Path(), clock)
        self.cluster = cluster
        self.ahead = 0.0
        """By how many seconds the time of day of the next client's machine is ahead."""
        self.opened: list[KubernetesStore] = []

    def store(self) -> LeaseStore:
        assert isinstance(self.clock, MovableClock)
        store = KubernetesStore(self.cluster, clock=SetClock(self.clock, self.ahead))
        self.opened.append(store)
        return store


class KubernetesFleet(Fleet):
    """Workers of a service that use one Kubernetes namespace.

    Args:
        cluster: the API server and the namespace.
        gateway: through which all of it goes, if there is one; the time does not move while requests are there.
    """

    def __init__(self, cluster: Cluster, clock: MovableClock, gateway: Gateway | None = None) -> None:
        self._world = ClusterWorld(cluster, clock)
        self._gateway = gateway
        super().__init__(self._world, clock)

    def worker_of_machine(self, ahead: float) -> Worker:
        """A new worker on a machine whose time of day is ahead by so many seconds."""
        self._world.ahead = ahead
        return self.worker()

    def calls_of_the_test(self) -> int:
        """How many requests the fleet itself made so far, to see what the Lease says."""
        return self._own.calls["read"]

    async def watching(self, worker: Worker) -> None:
        """Wait until a worker is told of what happens, and relies on it."""
        store = self._world.opened[self.stores.index(worker.store)]
        await eventually(lambda: store._opened is not None and store._opened.hints.trusted, "it relies on its watch")

    async def let_pass_unchecked(self, seconds: float) -> None:
        """Let time pass in which a leader cannot know yet that somebody took its lease away."""
        for _ in range(round(seconds / STEP)):
            await self.clock.advance(STEP)
            await self.settle()

    async def settle(self) -> None:
        """Let everybody go on until all wait for the clock, for each other, or for a request that is held up."""
        until = monotonic() + PATIENCE
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if not self._is_busy():
                return
            assert monotonic() < until, "a request is not answered"
            await asyncio.sleep(BREATH)

    def _is_busy(self) -> bool:
        slow = self._gateway.slow if isinstance(self._gateway, SlowGateway) else 0
        testing = any(store._opened is not None and not store._opened.hints._echo.idle for store in self._world.opened)
        return testing or sum(store.busy for store in self.stores) > slow


class SlowGateway(Gateway):
    """It holds up some of the writes: for a while by `clock`, on their way to the server or on the way back."""

    def __init__(self, namespace: Namespace, clock: MovableClock) -> None:
        super().__init__(namespace.api.address, namespace.api.certificate)
        self.every = 0
        """Of so many PUTs the last one is held up; 0: none."""
        self.seconds = 0.0
        self.before = False
        """Whether it is held up before it is carried out. It is carried out even if its client has gone meanwhile."""
        self.held = 0
        """How many were, so far."""
        self.writes = 0
        self._clock = clock
        self._waiting: set[web.BaseRequest] = set()
        self._late: set[asyncio.Task[web.StreamResponse]] = set()

    @property
    def slow(self) -> int:
        """How many are held up now, whose clients still wait."""
        return len(self._waiting)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.writes += request.method == "PUT"
        if request.method != "PUT" or not self.every or self.writes % self.every:
            return await super()._answer(request)
        self.held += 1
        await request.read()
        task = asyncio.ensure_future(self._answer_late(request))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting.discard(request)

    async def _answer_late(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = None if self.before else await super()._answer(request)
        self._waiting.add(request)
        await pause(self._clock, self.seconds)
        self._waiting.discard(request)
        return answer or await super()._answer(request)


def lease_of(namespace: Namespace, name: str = JOB) -> Object:
    """A Lease that exists."""
    lease = namespace.lease(name)
    assert lease is not None
    return lease


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse."""
    return [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]


@pytest.fixture
async def slow_gateway(kubernetes_namespace: Namespace, clock: MovableClock) -> AsyncIterator[SlowGateway]:
    """The way to the API server of `fleet`."""
    async with SlowGateway(kubernetes_namespace, clock) as gateway:
        yield gateway


@pytest.fixture
async def fleet(
    kubernetes_namespace: Namespace, slow_gateway: SlowGateway, clock: MovableClock
) -> AsyncIterator[KubernetesFleet]:
    """Workers with the default timing: a lease of 15 s, of which a leader that cannot renew gives up after 10."""
    kubeconfig = kubernetes_namespace.kubeconfig(address=slow_gateway.address)
    # How long a request may take is left to the election, whose time the test moves.
    cluster = Cluster.at(kubernetes_namespace.name, kubeconfig, request_timeout=60.0)
    async with KubernetesFleet(cluster, clock, slow_gateway) as fleet:
        yield fleet
