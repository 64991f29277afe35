"""Fixtures of every test: real servers."""

from tests.servers.fixtures import (
    every_postgres,
    every_postgres_url,
    every_redis,
    namespace,
    postgres_server,
    postgres_url,
    redis_server,
    redis_url,
    server_home,
    shared_servers,
    start_pgbouncer,
    start_postgres,
    start_redis,
)

__all__ = [
    "every_postgres",
    "every_postgres_url",
    "every_redis",
    "namespace",
    "postgres_server",
    "postgres_url",
    "redis_server",
    "redis_url",
    "server_home",
    "shared_servers",
    "start_pgbouncer",
    "start_postgres",
    "start_redis",
]
