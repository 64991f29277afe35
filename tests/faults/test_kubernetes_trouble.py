"""Elections on a Kubernetes API server that is slow, too busy, or refuses who asks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient, Configuration, CoordinationV1Api
from kubernetes_asyncio.config import load_kube_config

from grelmicro.backends.kubernetes import access
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.coordination import Coordination, HealthCheck, HealthReport, LeaderElection
from grelmicro.testing import MovableClock
from tests.helpers.kubernetes_fleet import KubernetesFleet, SlowGateway, lease_of, warnings_of
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import GUEST, Namespace
from tests.servers.leases_api import LeasesApi

pytestmark = pytest.mark.usefixtures("nothing_left")


# Slow and busy


@pytest.mark.parametrize(
    ("seconds", "before"),
    [(6.0, True), (9.0, False), (11.0, True)],
    ids=["6 s late", "answered 9 s late", "11 s late"],
)
async def test_slow_writes_do_not_end_a_term(
    fleet: KubernetesFleet, slow_gateway: SlowGateway, kubernetes_namespace: Namespace, seconds: float, before: bool
) -> None:
    """Each fifth is given up and made anew; it is carried out all the same, before or after its successor."""
    leader = await fleet.leading()
    fence = leader.election.guard().fence
    slow_gateway.every, slow_gateway.seconds, slow_gateway.before = 5, seconds, before
    await fleet.let_pass(60.0, step=0.5)
    assert slow_gateway.held >= 3
    assert leader.election.guard().fence == fence
    assert lease_of(kubernetes_namespace)["spec"]["leaseTransitions"] == fence


@pytest.mark.parametrize("before", [True, False], ids=["late requests", "late answers"])
async def test_a_server_that_is_slow_for_too_long_demotes_in_time(
    fleet: KubernetesFleet, slow_gateway: SlowGateway, clock: MovableClock, before: bool
) -> None:
    """What arrives late takes nothing from the next term."""
    leader = await fleet.leading()
    fence = leader.election.guard().fence
    await fleet.let_pass(1.0)
    lost = asyncio.create_task(leader.election.wait_lose_leader())
    slow_gateway.every, slow_gateway.seconds, slow_gateway.before = 1, 11.0, before
    began = clock.now()
    while not lost.done():
        await fleet.let_pass(0.5)
        assert clock.now() - began < 10.0
    assert clock.now() - began > 8.0, "it gave up too early"
    slow_gateway.every = 0
    await fleet.let_pass(16.0)
    second = leader.election.guard().fence
    assert second > fence
    await fleet.let_pass(30.0)
    assert leader.election.guard().fence == second


async def test_a_client_that_the_application_uses_up_delays_no_renewal(
    kubernetes_namespace: Namespace, clock: MovableClock
) -> None:
    """It has two connections, which are in use for hours, and hundreds of calls that wait for one."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = 2
    await load_kube_config(str(kubernetes_namespace.kubeconfig()), client_configuration=configuration)
    async with ApiClient(configuration) as client:
        api = CoordinationV1Api(client)

        async def watch() -> Any:
            return await api.list_namespaced_lease(
                kubernetes_namespace.name, watch=True, timeout_seconds=600, _preload_content=False
            )

        calls = [asyncio.create_task(watch()) for _ in range(300)]
        try:
            await eventually(lambda: sum(call.done() for call in calls) == 2, "both connections are in use")
            cluster = Cluster.of_client(client, kubernetes_namespace.name)
            async with KubernetesFleet(cluster, clock) as fleet:
                leader = await fleet.leading()
                fence = leader.election.guard().fence
                await fleet.let_pass(30.0, step=1.0)
                assert leader.election.guard().fence == fence
                assert leader.store.calls["renew"] >= 13
            assert sum(call.done() for call in calls) == 2
        finally:
            for call in calls:
                call.cancel()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers:
                if not isinstance(answer, BaseException):
                    answer.close()


async def test_a_server_that_asks_for_patience_costs_no_term(tmp_path: Path) -> None:
    """It refuses for most of the time that a leader has, and says each time when to come again."""
    async with LeasesApi(tmp_path) as api, Coordination.from_url(api.url) as coordination:
        leader = coordination.leaderelection(
            "job", lease_duration=6.0, renew_deadline=4.0, retry_interval=0.2, backend_timeout=2.5
        )
        async with running(leader):
            await leader.wait_for_leader()
            fence = leader.guard().fence
            before = api.count()["PUT"]
            api.answer(429, "PUT", times=1000, retry_after=1)
            await eventually(lambda: leader.last_confirmation_age() > 3.0, "it has not been renewed for long")
            assert leader.guard().fence == fence
            assert api.count()["PUT"] - before <= 6, "it asks no sooner than it is told to"
            api.heal()
            await eventually(lambda: leader.last_confirmation_age() < 1.0, "it is renewed in time")
            assert leader.guard().fence == fence


# Rights and credentials


async def test_a_token_that_is_replaced_costs_no_term(
    tmp_path: Path, clock: MovableClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "AGAIN", 0.0)  # seconds of real time, which hardly passes here
    async with LeasesApi(tmp_path) as api:
        async with KubernetesFleet(Cluster.at("default", api.kubeconfig), clock) as fleet:
            leader = await fleet.leading()
            fence = leader.election.guard().fence
            for _ in range(2):
                api.rotate()
                await fleet.let_pass(5.0)
                api.answer(401, "PUT")
                await fleet.let_pass(5.0)
            assert warnings_of(caplog) == [], "it read the token again at once"
            api.rotate(write=False)
            await fleet.let_pass_unchecked(5.0)
            assert len(warnings_of(caplog)) == 1
            api.write_token()
            await fleet.let_pass(3.0)
            assert leader.election.last_confirmation_age() < 2.5
            assert leader.election.guard().fence == fence
        assert api.token not in caplog.text


VERBS = ("get", "create", "update", "list", "watch")


@pytest.mark.parametrize("verb", ["get", "create", "update"])
async def test_a_right_that_is_missing_is_named_and_makes_an_instance_unready(
    kubernetes_namespace: Namespace, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(kubernetes_namespace.allow, *(other for other in VERBS if other != verb))
    async with Coordination.from_url(kubernetes_namespace.url_of(GUEST)) as coordination:
        leader = quick(coordination)
        async with running(leader), HealthCheck(coordination, leaders=[leader], interval=0.3) as health:
            await until(health, lambda report: report.store.status == "failing" and not report.good)
            await eventually(lambda: not leader.is_leader() and role_is_told(caplog, verb), "it is told")
            assert [verb for verb in VERBS if role_is_told(caplog, verb)] == [verb]
            assert any(
                f"does not let guest {verb} leases.coordination.k8s.io in namespace {kubernetes_namespace.name}" in line
                for line in warnings_of(caplog)
            )
            await asyncio.to_thread(kubernetes_namespace.allow, *VERBS)
            await leader.wait_for_leader()
            await until(health, lambda report: report.good)
    assert sum("apply this Role" in line.message for line in caplog.records) == 1


@pytest.mark.parametrize("verbs", [("list",), ("watch",), ("list", "watch")])
async def test_without_the_right_to_watch_it_leads_and_is_ready(
    kubernetes_namespace: Namespace, verbs: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(kubernetes_namespace.allow, *(verb for verb in VERBS if verb not in verbs))
    async with Coordination.from_url(kubernetes_namespace.url_of(GUEST)) as coordination:
        first, second = quick(coordination), quick(coordination)
        async with running(first), HealthCheck(coordination, leaders=[first, second], interval=0.3) as health:
            await first.wait_for_leader()
            async with running(second):
                await eventually(lambda: role_is_told(caplog, verbs[0]), "it is told once")
                await until(health, lambda report: report.good)
                assert not second.is_leader()
    assert sum("apply this Role" in line.message for line in caplog.records) == 1


def quick(coordination: Coordination) -> LeaderElection:
    """One that sees soon what happens."""
    return coordination.leaderelection(
        "job", lease_duration=3.0, renew_deadline=2.0, retry_interval=0.2, backend_timeout=1.0
    )


@asynccontextmanager
async def running(leader: LeaderElection) -> AsyncIterator[None]:
    """It takes part."""
    service = asyncio.create_task(leader())
    try:
        yield
    finally:
        service.cancel()
        await asyncio.wait({service})


async def until(health: HealthCheck, condition: Callable[[HealthReport], bool]) -> None:
    """Wait until a report fulfils the condition."""
    async with asyncio.timeout(20.0):
        while not condition(await health.report()):
            await asyncio.sleep(0.02)


def role_is_told(caplog: pytest.LogCaptureFixture, verb: str) -> bool:
    """Whether it was logged what is needed for that."""
    return any(
        f"guest may not {verb} leases" in line.message and "kind: Role" in line.message for line in caplog.records
    )
