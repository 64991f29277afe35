"""Fixtures: what the programs of the documentation find besides."""

import pytest

from tests.servers.kubernetes import Namespace


@pytest.fixture
def kubeconfig(kubernetes_namespace: Namespace) -> str:
    """The kubeconfig of a user who may do everything in a new namespace."""
    return str(kubernetes_namespace.kubeconfig())
