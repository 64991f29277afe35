"""One Lease for elections of this package and for the electors that most programs of a cluster use."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient, Configuration, CoordinationV1Api
from kubernetes_asyncio.config import load_kube_config

from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.testing import MovableClock
from tests.helpers.client_go import Elector
from tests.helpers.elections import Worker
from tests.helpers.kubernetes_fleet import JOB, KubernetesFleet, lease_of
from tests.helpers.stores import request_lost
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import Namespace, Object

pytestmark = pytest.mark.usefixtures("nothing_left")

SOON = 2.5
"""Seconds within which a free lease is taken by who polls every two seconds."""


class Mixed(KubernetesFleet):
    """Workers of both kinds."""

    def __init__(self, namespace: Namespace, clock: MovableClock) -> None:
        super().__init__(Cluster.at(namespace.name, namespace.kubeconfig()), clock)
        self.namespace = namespace
        self.electors: list[Elector] = []
        self.counts: list[int] = []
        """The transitions that were seen, whenever they changed."""
        self._running: list[asyncio.Task[None]] = []

    def elector(self, **settings: Any) -> Elector:
        """A new elector of the other kind."""
        elector = Elector(self.namespace, JOB, self.clock, f"go-{len(self.electors)}", **settings)
        self.electors.append(elector)
        self._running.append(asyncio.create_task(elector.run()))
        return elector

    def stop(self, elector: Elector) -> None:
        """It does nothing more."""
        self._running[self.electors.index(elector)].cancel()

    def hand_over(self, elector: Elector) -> None:
        """It stops, and gives the lease back."""
        self.stop(elector)
        assert elector.release()

    async def check(self) -> None:
        """At most one leads, and what was counted never falls."""
        await super().check()
        assert len(self.leaders) + sum(elector.leads for elector in self.electors) <= 1
        lease = self.namespace.lease(JOB)
        count = 0 if lease is None else lease["spec"]["leaseTransitions"]
        if not self.counts or count != self.counts[-1]:
            assert not self.counts or count > self.counts[-1], "it fell"
            self.counts.append(count)

    async def until_led_by(self, who: Worker | Elector, seconds: float) -> float:
        """Let time pass until it leads, at most `seconds`; when that was."""
        begun = self.clock.now()
        while not (who.leads if isinstance(who, Elector) else who.election.is_leader()):
            assert self.clock.now() <= begun + seconds, "it does not lead"
            await self.let_pass(0.5, step=0.5)
        return self.clock.now() - begun

    async def end(self) -> None:
        """End the electors."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@pytest.fixture
async def mixed(kubernetes_namespace: Namespace, clock: MovableClock) -> AsyncIterator[Mixed]:
    async with Mixed(kubernetes_namespace, clock) as mixed:
        yield mixed
        await mixed.end()


every_elector = pytest.mark.parametrize("kind", [{"ahead": 600.0}, {"ahead": -600.0, "old": True}], ids=["new", "old"])
"""Their machines' time of day is ten minutes ahead, or behind."""


@every_elector
async def test_a_lease_goes_from_one_kind_to_the_other_and_back(mixed: Mixed, kind: dict[str, Any]) -> None:
    """Whoever stops gives it back, and the other kind takes it at once; what others wrote to it stays."""
    theirs = mixed.elector(**kind)
    await mixed.until_led_by(theirs, 0.0)
    foreign = lease_of(mixed.namespace)
    foreign["metadata"] |= {"labels": {"team": "payments"}, "annotations": {"note": "ours"}}
    uid = mixed.namespace.replace(foreign)["metadata"]["uid"]
    for _ in range(2):
        ours = mixed.worker()
        await mixed.let_pass(20.0, step=1.0)
        assert theirs.leads
        mixed.hand_over(theirs)
        await mixed.until_led_by(ours, SOON)
        theirs = mixed.elector(**kind)
        await mixed.let_pass(20.0, step=1.0)
        assert ours.election.is_leader()
        await ours.stop()
        await mixed.until_led_by(theirs, SOON)
    assert len(mixed.counts) == 5
    metadata = lease_of(mixed.namespace)["metadata"]
    assert metadata["uid"] == uid
    assert metadata["labels"]["team"] == "payments"
    assert metadata["annotations"]["note"] == "ours"


@every_elector
async def test_we_take_over_from_one_of_theirs_that_died(mixed: Mixed, kind: dict[str, Any]) -> None:
    """When it comes back, it does not disturb us."""
    theirs = mixed.elector(**kind)
    ours = mixed.worker()
    await mixed.let_pass(11.0, step=1.0)
    assert theirs.leads
    theirs.cut_off = True
    took = await mixed.until_led_by(ours, 18.0)
    assert took >= 13.0
    assert not theirs.leads
    theirs.cut_off = False
    assert not theirs.attempt()
    for _ in range(10):
        await mixed.let_pass(2.0, step=1.0)
        assert not theirs.attempt()
    assert ours.election.is_leader()


@every_elector
async def test_one_of_theirs_takes_over_from_us_when_we_died(mixed: Mixed, kind: dict[str, Any]) -> None:
    """When we come back, we do not disturb it, neither by a renewal nor by a release."""
    ours = await mixed.leading()
    term = ours.election._standing.term
    assert term is not None
    theirs = mixed.elector(**kind)
    await mixed.let_pass(11.0, step=1.0)
    ours.store.break_down(request_lost)
    took = await mixed.until_led_by(theirs, 18.0)
    assert took >= 13.0
    ours.store.heal()
    assert await ours.store.renew(term.lease, 15.0) is None
    assert not await ours.store.release(term.lease)
    await mixed.let_pass(20.0, step=1.0)
    await ours.stop()
    assert theirs.leads
    assert lease_of(mixed.namespace)["spec"]["holderIdentity"] == "go-0"


async def test_renewals_in_one_second_are_seen_by_who_compares_whole_seconds(mixed: Mixed) -> None:
    ours = await mixed.leading(lease_duration=1.0, renew_deadline=0.7, retry_interval=0.3, backend_timeout=0.5)
    theirs = mixed.elector(lease=1, retry=0.1)
    fence = ours.election.guard().fence
    await mixed.let_pass(8.0, step=0.1)
    assert ours.election.guard().fence == fence
    assert not theirs.leads


async def test_each_waits_for_as_long_as_the_lease_of_the_other_says(mixed: Mixed) -> None:
    theirs = mixed.elector(lease=30)
    ours = mixed.worker(lease_duration=3.0, renew_deadline=2.0, retry_interval=0.5, backend_timeout=1.0)
    await mixed.let_pass(9.0, step=1.0)
    theirs.cut_off = True
    assert await mixed.until_led_by(ours, 33.0) >= 27.0
    await ours.stop()
    ours = await mixed.leading(lease_duration=30.0, renew_deadline=20.0)
    again = mixed.elector(lease=3, retry=0.5)
    await mixed.let_pass(9.0, step=1.0)
    ours.store.break_down(request_lost)
    assert await mixed.until_led_by(again, 33.0) >= 27.0


async def test_of_both_kinds_that_start_at_once_one_leads(mixed: Mixed) -> None:
    workers: list[Worker] = []
    for _ in range(3):
        workers.append(mixed.worker())
        mixed.elector()
    await eventually(lambda: all(worker.election.record for worker in workers), "each has asked")
    for _ in range(10):
        await mixed.let_pass(1.0, step=1.0)
        assert len(mixed.leaders) + sum(elector.leads for elector in mixed.electors) == 1


async def test_the_library_of_kubernetes_understands_what_we_write(mixed: Mixed) -> None:
    """It is strict about times and numbers."""
    configuration = Configuration()
    await load_kube_config(str(mixed.namespace.kubeconfig()), client_configuration=configuration)
    async with ApiClient(configuration) as client:
        api = CoordinationV1Api(client)
        ours = await mixed.leading()
        held = await api.read_namespaced_lease(JOB, mixed.namespace.name)
        assert (held.spec.holder_identity.split(":")[0], held.spec.lease_duration_seconds) == (
            ours.election.worker,
            15,
        )
        assert held.spec.renew_time.timestamp() == pytest.approx(mixed.clock.wall(), abs=1.0)
        await ours.stop()
        free = await api.read_namespaced_lease(JOB, mixed.namespace.name)
    assert (free.spec.holder_identity, free.spec.lease_duration_seconds) == ("", 1)
    assert free.spec.lease_transitions == held.spec.lease_transitions
    assert spec_of(mixed.namespace).keys() & {"acquireTime", "renewTime"} == set()


def test_the_imitation_says_what_it_should(kubernetes_namespace: Namespace, clock: MovableClock) -> None:
    """It imitates what others rely on, so a fault of it would hide one of ours."""
    elector = Elector(kubernetes_namespace, JOB, clock)
    assert elector.attempt()
    first = spec_of(kubernetes_namespace)
    assert first["holderIdentity"] == "go"
    assert (first["leaseDurationSeconds"], first["leaseTransitions"]) == (15, 0)
    assert first["acquireTime"] == first["renewTime"]
    clock._now += 2.5
    assert elector.attempt()
    second = spec_of(kubernetes_namespace)
    assert second["acquireTime"] == first["acquireTime"]
    assert second["renewTime"] > first["renewTime"]
    other = Elector(kubernetes_namespace, JOB, clock, "other")
    assert not other.attempt()
    clock._now += 15.1
    assert other.attempt()
    assert spec_of(kubernetes_namespace)["leaseTransitions"] == 1
    assert not elector.attempt()
    assert other.release()
    free = spec_of(kubernetes_namespace)
    assert (free["holderIdentity"], free["leaseDurationSeconds"], free["leaseTransitions"]) == ("", 1, 1)
    assert elector.attempt()


def spec_of(namespace: Namespace) -> Object:
    spec: Object = lease_of(namespace)["spec"]
    return spec
