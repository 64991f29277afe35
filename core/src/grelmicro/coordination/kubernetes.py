"""The backends of the Kubernetes store."""

from grelmicro.backends.kubernetes import (
    KubernetesLeaderElectionAdapter,
    KubernetesLockAdapter,
    KubernetesScheduleAdapter,
)

__all__ = ["KubernetesLeaderElectionAdapter", "KubernetesLockAdapter", "KubernetesScheduleAdapter"]
