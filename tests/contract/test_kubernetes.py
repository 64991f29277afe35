"""The Kubernetes store keeps the contract on a real API server, with a watch and without."""

from collections.abc import AsyncIterator

import pytest

from grelmicro.backends.kubernetes import KubernetesStore
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.leases import LeaseStore
from grelmicro.testing import MovableClock
from tests.contract.passing import PassingContract
from tests.contract.raising import RaisingContract
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import ADMIN, GUEST, Namespace


class OnAMovedClock(PassingContract, RaisingContract):
    """Leases end by what this process sees on its own clock, which the tests move."""

    exact = True
    user = ADMIN
    watches = True

    @pytest.fixture
    def clock(self) -> MovableClock:
        return MovableClock()

    @pytest.fixture
    async def store(self, kubernetes_namespace: Namespace, clock: MovableClock) -> AsyncIterator[KubernetesStore]:
        async with self.opened(kubernetes_namespace, clock) as store, store.watch("watched") as waiter:
            if self.watches:
                await store.release(await store.acquire("watched", "anybody", 1.0))
                await eventually(lambda: waiter.pushes, "it is told of changes")
            yield store

    @pytest.fixture
    async def other(
        self, store: KubernetesStore, kubernetes_namespace: Namespace, clock: MovableClock
    ) -> AsyncIterator[KubernetesStore]:
        async with self.opened(kubernetes_namespace, clock) as other:
            yield other

    def opened(self, namespace: Namespace, clock: MovableClock) -> KubernetesStore:
        cluster = Cluster.at(namespace.name, kubeconfig=namespace.kubeconfig(self.user))
        return KubernetesStore(cluster, clock=clock)

    async def let_pass(self, store: LeaseStore, seconds: float) -> None:
        assert isinstance(store.clock, MovableClock)
        await store.clock.advance(seconds)


class TestKubernetes(OnAMovedClock):
    """Woken by a watch, which begins when somebody waits."""


class TestKubernetesUnwatched(OnAMovedClock):
    """A user who may not watch: waiters poll."""

    user = GUEST
    watches = False

    @pytest.fixture
    def kubernetes_namespace(self, kubernetes_namespace: Namespace) -> Namespace:
        kubernetes_namespace.allow("get", "create", "update", "list")
        return kubernetes_namespace
