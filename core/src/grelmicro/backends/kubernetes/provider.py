"""The provider of a Kubernetes namespace, and its backends."""

import os
from typing import Self

from grelmicro.backends.kubernetes.cluster import ENV_PREFIX, Cluster
from grelmicro.backends.kubernetes.library import ApiClient
from grelmicro.backends.kubernetes.store import KubernetesStore
from grelmicro.backends.kubernetes.url import parse
from grelmicro.clock import Clock
from grelmicro.config import Duration
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider, shared_store
from grelmicro.errors import OutOfContextError
from grelmicro.leases import LeaseStore


class KubernetesProvider(Provider):
    """The Lease objects of one Kubernetes namespace for locks, elections and schedules.

    Where the API server is, and who asks, is looked up at opening: in the kubeconfig that is given, or the context;
    else in the service account of the pod that this process runs in; else in the kubeconfig of `KUBECONFIG` or
    `~/.kube/config`. Credentials that change are read again.

    Args:
        namespace: the Kubernetes namespace; or `KUBE_NAMESPACE`, or that of the service account or the context, or
            `default`.
        kubeconfig: the path of a kubeconfig; several are separated as in `KUBECONFIG`.
        context: the name of a context in the kubeconfig, instead of its current one.
        prefix: separates applications that share a Kubernetes namespace; the names of their Leases begin with it.
        request_timeout: seconds after which a request counts as unanswered, at most 60; or `KUBE_REQUEST_TIMEOUT`, or
            5.
        env_prefix: what the names of these variables begin with, but for `KUBECONFIG`.
        clock: the time of this process, by which leases are observed.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    store: KubernetesStore

    def __init__(
        self,
        namespace: str | None = None,
        *,
        kubeconfig: str | os.PathLike[str] | None = None,
        context: str | None = None,
        prefix: str = "grelmicro",
        request_timeout: Duration | None = None,
        env_prefix: str = ENV_PREFIX,
        clock: Clock | None = None,
    ) -> None:
        self.env_prefix = env_prefix
        cluster = Cluster.at(namespace, kubeconfig, context, request_timeout, env_prefix=env_prefix)
        self._use(cluster, prefix, clock)

    @classmethod
    def from_url(cls, url: str, *, prefix: str = "grelmicro") -> Self:
        """The provider of `kubernetes://namespace`, with the options `context`, `kubeconfig` and `prefix`.

        Raises:
            SettingsValidationError: it has another form, or an option that is not known.
        """
        address = parse(url)
        return cls(
            address.namespace,
            kubeconfig=address.kubeconfig,
            context=address.context,
            prefix=address.prefix or prefix,
        )

    @classmethod
    def from_client(
        cls,
        api_client: object,
        namespace: str | None = None,
        *,
        own: bool = False,
        prefix: str = "grelmicro",
        request_timeout: Duration | None = None,
        clock: Clock | None = None,
    ) -> Self:
        """The provider of the cluster that a `kubernetes_asyncio.client.ApiClient` uses.

        Its configuration, credentials and headers are used, on connections of its own: whatever the application does
        with the client cannot cost it a lease. Credentials are asked for at each request, so those that the client
        refreshes are used.

        Args:
            api_client: of the cluster.
            namespace: see `KubernetesProvider`, as for the rest.
            own: close the client together with the provider; else it stays the caller's.
            prefix: see there.
            request_timeout: see there.
            clock: see there.

        Raises:
            SettingsValidationError: it is another client, or a setting breaks a rule.
        """
        provider = cls.__new__(cls)
        provider.env_prefix = ENV_PREFIX
        provider._use(Cluster.of_client(api_client, namespace, request_timeout, own=own), prefix, clock)
        return provider

    @property
    def client(self) -> ApiClient:
        """The `kubernetes_asyncio.client.ApiClient` that `from_client` was given.

        Raises:
            OutOfContextError: it was given none: its own connections are for leases alone.
        """
        client = self.store.cluster.client
        if client is None:
            raise OutOfContextError(
                "KubernetesProvider has no client: its connections are for leases alone; make an ApiClient and give it "
                "to KubernetesProvider.from_client()"
            )
        return client

    def _use(self, cluster: Cluster, prefix: str, clock: Clock | None) -> None:
        super().__init__(KubernetesStore(cluster, prefix=prefix, clock=clock), url=cluster.safe_url)


class KubernetesAdapter(LeaseAdapter):
    """An adapter on the Leases of a Kubernetes namespace.

    The arguments are those of `KubernetesProvider`, or a provider whose store it shares.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        provider: KubernetesProvider | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
        context: str | None = None,
        prefix: str = "grelmicro",
        request_timeout: Duration | None = None,
        clock: Clock | None = None,
    ) -> None:
        if provider is None:
            cluster = Cluster.at(namespace, kubeconfig, context, request_timeout)
            store: LeaseStore = KubernetesStore(cluster, prefix=prefix, clock=clock)
        else:
            given = (namespace, kubeconfig, context, prefix, request_timeout, clock)
            alone = given == (None, None, None, "grelmicro", None, None)
            store = shared_store(provider, KubernetesProvider, type(self).__name__, alone=alone)
        super().__init__(store)
        self.provider = provider


class KubernetesLockAdapter(KubernetesAdapter, LockAdapter):
    """Locks in a Kubernetes namespace; the arguments are those of `KubernetesProvider`."""


class KubernetesLeaderElectionAdapter(KubernetesAdapter, LeaderElectionAdapter):
    """Elections in a Kubernetes namespace; the arguments are those of `KubernetesProvider`."""


class KubernetesScheduleAdapter(KubernetesAdapter, ScheduleAdapter):
    """Schedules in a Kubernetes namespace; the arguments are those of `KubernetesProvider`."""
