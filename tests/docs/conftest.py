"""Fixtures: what the programs of the documentation find besides."""

from collections.abc import Iterator

import pytest

from tests.docs.examples import Warmed
from tests.servers.kubernetes import Namespace


@pytest.fixture
def kubeconfig(kubernetes_namespace: Namespace) -> str:
    """The kubeconfig of a user who may do everything in a new namespace."""
    return str(kubernetes_namespace.kubeconfig())


@pytest.fixture(scope="session")
def warmed() -> Iterator[Warmed]:
    """The process that runs the programs."""
    process = Warmed()
    yield process
    process.close()
