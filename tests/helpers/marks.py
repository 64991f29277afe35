"""The marker `server`, which every test on a real server has: the quick tests are those without it."""

import pytest

from tests.servers.found import Binary

FIXTURES = frozenset(
    {
        "kubernetes_server",
        "postgres_server",
        "redis_server",
        "shared_servers",
        "start_kubernetes",
        "start_pgbouncer",
        "start_postgres",
        "start_redis",
    }
)
"""The fixtures that start servers."""

KINDS = frozenset({"redis", "postgres", "kubernetes"})
"""What a parameter says of a fixture that starts one when the test runs."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test that uses a server."""
    if isinstance(item, pytest.Function) and (uses_server(item) or is_asked_for_server(item)):
        item.add_marker("server")


def uses_server(item: pytest.Function) -> bool:
    """Whether one of its fixtures starts one."""
    return not FIXTURES.isdisjoint(item.fixturenames)


def is_asked_for_server(item: pytest.Function) -> bool:
    """Whether one of its parameters names one."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, Binary) or (isinstance(value, str) and value in KINDS) for value in parameters)
