"""Fixtures of every test: real servers; and what is done once for all tests."""

from tests.helpers.foreground import pytest_configure
from tests.helpers.groups import pytest_collection_modifyitems
from tests.helpers.heap import pytest_collection, pytest_runtest_teardown, pytest_sessionfinish
from tests.helpers.left_open import no_app_left_open
from tests.helpers.marks import pytest_itemcollected
from tests.servers.fixtures import (
    every_postgres,
    every_postgres_url,
    every_redis,
    kubernetes_namespace,
    kubernetes_server,
    namespace,
    postgres_server,
    postgres_url,
    redis_server,
    redis_url,
    server_home,
    shared_servers,
    spare_kubernetes,
    start_kubernetes,
    start_pgbouncer,
    start_postgres,
    start_redis,
)
from tests.servers.found import pytest_runtest_makereport

__all__ = [
    "every_postgres",
    "every_postgres_url",
    "every_redis",
    "kubernetes_namespace",
    "kubernetes_server",
    "namespace",
    "no_app_left_open",
    "postgres_server",
    "postgres_url",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_itemcollected",
    "pytest_runtest_makereport",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "redis_server",
    "redis_url",
    "server_home",
    "shared_servers",
    "spare_kubernetes",
    "start_kubernetes",
    "start_pgbouncer",
    "start_postgres",
    "start_redis",
]
