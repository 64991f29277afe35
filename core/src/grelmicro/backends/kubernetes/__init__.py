"""Leases on the API server of a Kubernetes cluster."""

from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.provider import (
    KubernetesLeaderElectionAdapter,
    KubernetesLockAdapter,
    KubernetesProvider,
    KubernetesScheduleAdapter,
)
from grelmicro.backends.kubernetes.store import KubernetesStore

__all__ = [
    "Cluster",
    "KubernetesLeaderElectionAdapter",
    "KubernetesLockAdapter",
    "KubernetesProvider",
    "KubernetesScheduleAdapter",
    "KubernetesStore",
    "lease_name",
]
