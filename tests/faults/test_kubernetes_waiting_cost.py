"""What it costs to wait on Kubernetes: requests while nothing happens, of one process and of many."""

import asyncio
import json
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from grelmicro.backends.hints import TEST_INTERVAL
from grelmicro.backends.kubernetes.names import hints_name
from grelmicro.backends.kubernetes.observation import CAPACITY
from grelmicro.backends.kubernetes.store import KubernetesStore
from grelmicro.coordination import LeaderElection, Lock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.coordination.wait import SAFETY_POLL
from grelmicro.testing import MovableClock
from tests.helpers.gateway import Gateway
from tests.helpers.kubernetes_waiters import (
    LEASE,
    PROMPT,
    hand_over,
    lock_on,
    pass_by,
    store_of,
    trusts,
    until_quiet,
    until_relied,
    waiting_for,
)
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import ADMIN, Namespace

pytestmark = pytest.mark.usefixtures("nothing_left")

ECHO = hints_name("grelmicro")


async def test_who_does_not_wait_asks_for_nothing(
    waiting_backend: LockAdapter, gateway: Gateway, kubernetes_namespace: Namespace
) -> None:
    """A cron job that tries once, say: one read, one write, and one when it is done."""
    async with lock_on(waiting_backend):
        pass
    assert gateway.calls == Counter(get=1, create=1, update=1)
    assert [lease["metadata"]["name"] for lease in kubernetes_namespace.leases()] == ["grelmicro.lock.cart"]


@pytest.mark.parametrize("lease", [60.0, LEASE], ids=["renewed", "kept"])
async def test_an_idle_waiter_asks_rarely(kubernetes_namespace: Namespace, gateway: Gateway, lease: float) -> None:
    clock = MovableClock()
    async with (
        Gateway(kubernetes_namespace.api.address, kubernetes_namespace.api.certificate) as other,
        LockAdapter(store_of(kubernetes_namespace, other, clock=clock)) as holding_backend,
        LockAdapter(store_of(kubernetes_namespace, gateway, clock=clock)) as waiting_backend,
    ):
        lock = Lock("cart", backend=holding_backend, lease_duration=lease, auto_renew=lease == 60.0)
        async with lock:
            waiting = waiting_for(waiting_backend)
            await until_relied(waiting_backend, gateway)
            before = gateway.calls.copy()
            await pass_by(clock, gateway, other, seconds=600)
            spent = gateway.calls - before
            assert not waiting.done()
            assert trusts(waiting_backend)
            assert spent.total() <= 0.2 * 600, spent
            assert spent["get"] >= 600 / SAFETY_POLL - 1, "it never relies on the watch alone"
        await (await asyncio.wait_for(waiting, 30.0)).release()


async def test_a_standing_candidate_asks_rarely(kubernetes_namespace: Namespace, gateway: Gateway) -> None:
    clock = MovableClock()
    async with (
        Gateway(kubernetes_namespace.api.address, kubernetes_namespace.api.certificate) as other,
        LeaderElectionAdapter(store_of(kubernetes_namespace, other, clock=clock)) as first,
        LeaderElectionAdapter(store_of(kubernetes_namespace, gateway, clock=clock)) as second,
    ):
        leader, candidate = (LeaderElection("job", backend=backend, retry_jitter=0.0) for backend in (first, second))
        leading = asyncio.create_task(leader())
        await eventually(leader.is_leader, "it leads")
        standing = asyncio.create_task(candidate())
        await eventually(lambda: gateway.watches, "it watches")
        await pass_by(clock, gateway, other, seconds=10)
        before, renewals = gateway.calls.copy(), other.calls.copy()
        await pass_by(clock, gateway, other, seconds=300)
        spent = gateway.calls - before
        assert leader.is_leader()
        assert spent.total() <= 0.2 * 300, spent
        assert "update" not in spent, "the leader's renewals show that the watch works"
        assert set(other.calls - renewals) == {"update"}, "a renewal is one request"
        begun = monotonic()
        leading.cancel()
        await eventually(candidate.is_leader, "it is handed over")
        assert monotonic() - begun < PROMPT
        standing.cancel()
        await asyncio.wait([leading, standing])


@pytest.mark.slow
async def test_many_replicas_test_their_watches_together(
    kubernetes_namespace: Namespace, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    clock, replicas, seconds = MovableClock(), 50, 120
    held = await lock_on(holding_backend).acquire()
    async with AsyncExitStack() as stack:
        backends, waiting = [], []
        for _ in range(replicas):  # they do not all begin in the same instant
            backend = LockAdapter(store_of(kubernetes_namespace, gateway, clock=clock))
            backends.append(await stack.enter_async_context(backend))
            waiting.append(waiting_for(backend))
            await clock.advance(TEST_INTERVAL / replicas)
        await eventually(lambda: all(trusts(backend) for backend in backends), "all rely on their watches", 30.0)
        await until_quiet(gateway)
        assert gateway.calls["update"] + gateway.calls["create"] <= 2 * replicas
        assert gateway.calls["watch"] == replicas
        size = len(json.dumps(kubernetes_namespace.lease(ECHO)))
        before = gateway.calls.copy()
        await pass_by(clock, gateway, seconds=seconds)
        spent = gateway.calls - before
        assert spent["update"] <= replicas, "they do not each write at each test"
        assert spent.total() <= 0.2 * seconds * replicas, spent
        assert all(trusts(backend) for backend in backends)
        assert len(json.dumps(kubernetes_namespace.lease(ECHO))) == size, "it does not grow"
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    await held.release()


async def test_the_lease_for_tests_looks_sensible_to_people(
    kubernetes_namespace: Namespace, waiting_backend: LockAdapter, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    held = await lock_on(holding_backend).acquire()
    waiting = waiting_for(waiting_backend)
    await until_relied(waiting_backend, gateway)
    assert [lease.name async for lease in holding_backend.store.scan()] == ["lock:cart"], "it is no record"
    api = kubernetes_namespace.api
    path = f"/apis/coordination.k8s.io/v1/namespaces/{kubernetes_namespace.name}/leases"
    table = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io", "Authorization": f"Bearer {api.token(ADMIN)}"}
    request = urllib.request.Request(gateway.address + path, headers=table)
    with await asyncio.to_thread(urllib.request.urlopen, request) as answer:
        shown = json.load(answer)
    assert [column["name"] for column in shown["columnDefinitions"]] == ["Name", "Holder", "Age"]
    holders = {row["cells"][0]: row["cells"][1] for row in shown["rows"]}
    assert holders[ECHO] == ""
    assert set(holders) == {ECHO, "grelmicro.lock.cart"}
    await hand_over(held, waiting)


async def test_a_crowded_namespace_costs_a_waiter_nothing(
    kubernetes_namespace: Namespace, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    store, names = holding_backend.store, [f"lock:other:{number}" for number in range(CAPACITY + 200)]
    parts = [names[begin : begin + 50] for begin in range(0, len(names), 50)]
    for part in parts:
        await asyncio.gather(*(store.acquire(name, "somebody", LEASE) for name in part))
    held = await lock_on(holding_backend).acquire()
    async with LockAdapter(store_of(kubernetes_namespace, gateway)) as waiting_backend:
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        assert gateway.calls["list"] == 1
        assert gateway.bytes < 20_000
        assert isinstance(waiting_backend.store, KubernetesStore)
        for part in parts:
            await asyncio.gather(*(store.acquire(name, "somebody", LEASE) for name in part))
        await until_quiet(gateway)
        assert len(waiting_backend.store._get_open().table._objects.seen.items()) <= CAPACITY, "it saw more than that"
        await hand_over(held, waiting)
