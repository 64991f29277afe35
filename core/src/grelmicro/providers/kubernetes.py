"""The provider of the Kubernetes store, and the names of its Leases."""

from grelmicro.backends.kubernetes import KubernetesProvider, lease_name

__all__ = ["KubernetesProvider", "lease_name"]
