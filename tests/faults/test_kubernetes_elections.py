"""Elections in a Kubernetes namespace: from one leader to the next, whatever the time of day, and what that costs."""

import asyncio
import logging
import signal
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from grelmicro.testing import MovableClock
from tests.helpers.elections import Worker
from tests.helpers.kubernetes_fleet import JOB, KubernetesFleet, SlowGateway, lease_of, warnings_of
from tests.helpers.sites import Site
from tests.helpers.stores import request_lost
from tests.helpers.timeline import pause
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import Namespace

pytestmark = pytest.mark.usefixtures("nothing_left")


# Time


async def test_a_lease_lasts_as_long_as_it_says_not_as_a_candidate_thinks(fleet: KubernetesFleet) -> None:
    leader = await fleet.leading(lease_duration=30.0, renew_deadline=20.0)
    other = fleet.worker(lease_duration=3.0, renew_deadline=2.0, retry_interval=0.5, backend_timeout=1.0)
    await fleet.watching(other)
    await fleet.let_pass(7.0)
    leader.store.break_down(request_lost)
    await fleet.let_pass(10.0)
    assert fleet.leaders == [leader]
    await fleet.let_pass(18.5)
    assert not fleet.leaders
    await fleet.let_pass(2.0)
    assert fleet.leaders == [other]


async def test_clocks_that_differ_by_minutes_change_nothing(fleet: KubernetesFleet, clock: MovableClock) -> None:
    """A leader is killed every half minute. Another one leads when its lease has ended, or a second later."""
    machines = (-600.0, 0.0, 600.0)
    fences: list[int] = []
    for ahead in machines:
        fleet.worker_of_machine(ahead)
    await eventually(lambda: fleet.leaders, "one leads")
    dead: list[Worker] = []
    for number in range(6):
        (leader,) = fleet.leaders
        fences.append(leader.election.guard().fence)
        for worker in fleet.workers:
            if worker is not leader and worker not in dead:
                await fleet.watching(worker)
        await fleet.let_pass(7.0 + number / 3, step=1.0)
        leader.store.break_down(request_lost)  # nothing of what it does reaches the server any more
        dead.append(leader)
        killed_at = clock.now()
        await fleet.let_pass(12.0, step=1.0)
        while not (led := [worker for worker in fleet.leaders if worker is not leader]):
            await fleet.let_pass(0.5, step=0.5)
            assert clock.now() <= killed_at + 16.5
        assert len(led) == 1
        assert clock.now() > killed_at + 12.5
        fleet.worker_of_machine(machines[number % 3])
        await fleet.let_pass(5.0, step=1.0)
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("ago", [3600.0, -3600.0], ids=["an hour old", "of the next hour"])
async def test_an_old_record_lasts_for_one_lease_from_when_it_is_seen(
    fleet: KubernetesFleet, clock: MovableClock, kubernetes_namespace: Namespace, ago: float
) -> None:
    """Its times are of a clock that nobody knows."""
    leader = await fleet.leading()
    leader.store.break_down(request_lost)
    lease = lease_of(kubernetes_namespace)
    fence = lease["spec"]["leaseTransitions"]
    lease["spec"]["renewTime"] = time_of(clock.wall() - ago)
    kubernetes_namespace.replace(lease)
    clock.shift_wall(86_400.0)
    others = [fleet.worker(), fleet.worker()]
    for other in others:
        await fleet.watching(other)
    await fleet.let_pass(14.5, step=0.5)
    assert not [other for other in others if other.election.is_leader()]
    await fleet.let_pass(1.5)
    (led,) = fleet.leaders
    assert led.election.guard().fence == fence + 1


def time_of(seconds: float) -> str:
    """A time as Lease objects have it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# From one to the next


async def test_a_lease_is_given_back_when_the_work_has_ended(
    fleet: KubernetesFleet, clock: MovableClock, kubernetes_namespace: Namespace
) -> None:
    """It takes four seconds to end."""
    first = await fleet.leading()
    second = fleet.worker()
    await fleet.watching(second)
    ended: list[float] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await pause(clock, 4.0)
            ended.append(clock.now())

    working = asyncio.create_task(first.election.lead(work))
    await fleet.settle()
    holder = lease_of(kubernetes_namespace)["spec"]["holderIdentity"]
    stopping = asyncio.create_task(first.stop())
    await fleet.let_pass(3.75)
    assert not fleet.leaders
    assert lease_of(kubernetes_namespace)["spec"]["holderIdentity"] == holder
    await fleet.let_pass(0.5)
    assert len(ended) == 1
    await eventually(lambda: fleet.leaders == [second], "the next one leads at once")
    await asyncio.wait({stopping, working})


async def test_each_change_of_leader_is_counted_and_all_that_others_wrote_stays(
    fleet: KubernetesFleet, kubernetes_namespace: Namespace
) -> None:
    foreign: dict[str, Any] = {
        "labels": {"team": "payments"},
        "annotations": {"argocd.argoproj.io/tracking-id": "shop"},
        "finalizers": ["example.com/keep"],
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": "shop", "uid": "0000-1"}],
    }
    uid = kubernetes_namespace.create({"metadata": {"name": JOB, **foreign}, "spec": {}})["metadata"]["uid"]
    counts: list[int] = []
    for _ in range(4):
        leader = await fleet.leading()
        await fleet.let_pass(5.0)
        counts.append(lease_of(kubernetes_namespace)["spec"]["leaseTransitions"])
        await leader.stop()
        counts.append(lease_of(kubernetes_namespace)["spec"]["leaseTransitions"])
    assert counts == [counts[0] + number // 2 for number in range(8)], "each term adds one, and its end nothing"
    metadata = lease_of(kubernetes_namespace)["metadata"]
    assert metadata["uid"] == uid
    for key, value in foreign.items():
        if isinstance(value, dict):
            assert value.items() <= metadata[key].items()
        else:
            assert metadata[key] == value


async def test_a_leader_that_comes_back_leaves_its_successor_alone(
    fleet: KubernetesFleet, kubernetes_namespace: Namespace
) -> None:
    """Neither a renewal nor a release of it does anything, however late it is."""
    first = await fleet.leading()
    term = first.election._standing.term
    assert term is not None
    second = fleet.worker()
    await fleet.watching(second)
    first.store.break_down(request_lost)
    await fleet.let_pass(16.0, step=0.5)
    assert fleet.leaders == [second]
    before = lease_of(kubernetes_namespace)
    first.store.heal()
    assert await first.store.renew(term.lease, 15.0) is None
    assert not await first.store.release(term.lease)
    await first.stop()
    assert lease_of(kubernetes_namespace) == before
    await fleet.let_pass(20.0, step=1.0)
    assert fleet.leaders == [second]


@pytest.mark.parametrize("was", ["nothing", "free", "abandoned"])
async def test_of_ten_that_start_at_once_one_leads(
    fleet: KubernetesFleet, kubernetes_namespace: Namespace, caplog: pytest.LogCaptureFixture, was: str
) -> None:
    """That others were faster is no trouble."""
    caplog.set_level(logging.INFO)
    if was != "nothing":
        holder = "somebody" if was == "abandoned" else ""
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "leaseTransitions": 7}
        kubernetes_namespace.create({"metadata": {"name": JOB}, "spec": spec})
    workers = [fleet.worker() for _ in range(10)]
    await eventually(lambda: all(worker.election.record for worker in workers), "each has asked")
    if was == "abandoned":
        await fleet.let_pass(15.5, step=0.5)
    await eventually(lambda: fleet.leaders, "one leads")
    (leader,) = fleet.leaders
    await fleet.let_pass(10.0, step=1.0)
    assert fleet.leaders == [leader]
    assert [line.getMessage() for line in caplog.records if line.name.startswith("grelmicro")] == [
        f"leading leader:job, term {leader.election.guard().fence}"
    ]


async def test_two_of_one_name_are_two(fleet: KubernetesFleet, caplog: pytest.LogCaptureFixture) -> None:
    twins = [fleet.worker(worker="web-1"), fleet.worker(worker="web-1")]
    await eventually(lambda: fleet.leaders, "one leads")
    await fleet.let_pass(40.0, step=0.5)
    (leader,) = fleet.leaders
    assert warnings_of(caplog) == [
        "another instance stands for leader:job under the worker name 'web-1': give each its own"
    ]
    await leader.stop()
    twins.remove(leader)
    await eventually(lambda: fleet.leaders == twins, "the other one leads")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_second_signal_ends_a_program_at_once(kubernetes_namespace: Namespace, tmp_path: Path, number: int) -> None:
    """Its work would take a minute to end. Another one leads when the lease has been given back, or has ended."""
    site = Site(tmp_path, kubernetes_namespace.url)
    with site.worker(3.0, 60.0) as first:
        site.wait_led(len)
        with site.worker(3.0) as second:
            first.send(number)
            time.sleep(0.2)
            at = first.send(number)
            assert first.wait(5.0) == -number
            _, successor = site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            assert successor.at < at + 3.0 + 2.0
    fences = site.fences()
    assert fences[0] < fences[1]


# What it costs


async def test_a_renewal_is_one_request(fleet: KubernetesFleet, slow_gateway: SlowGateway) -> None:
    leader = await fleet.leading()
    await fleet.watching(leader)  # which it began to do before it led
    watched = fleet.calls_of_the_test
    before, renewals, looks = slow_gateway.calls.copy(), leader.store.calls["renew"], watched()
    await fleet.let_pass(120.0, step=1.0)
    renewals = leader.store.calls["renew"] - renewals
    assert 55 <= renewals <= 62
    assert slow_gateway.calls - before == Counter(update=renewals, get=watched() - looks)


async def test_an_idle_standby_costs_little(fleet: KubernetesFleet, slow_gateway: SlowGateway) -> None:
    """Ten requests a minute beside the renewals of the leader: looks, and tests of its watch."""
    leader = await fleet.leading()
    standby = fleet.worker()
    for worker in (leader, standby):
        await fleet.watching(worker)
    watched = fleet.calls_of_the_test
    before, renewals, looks = slow_gateway.calls.copy(), leader.store.calls["renew"], watched()
    await fleet.let_pass(120.0, step=1.0)
    spent = (slow_gateway.calls - before).total() - (leader.store.calls["renew"] - renewals) - (watched() - looks)
    assert spent <= 2 * 10
    assert fleet.leaders == [leader]
