"""Fixtures: servers that tests share, with something of its own for each test, and servers for one test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import pytest

from tests.helpers.matrix import further
from tests.servers import found, postgres, redis
from tests.servers.found import Binary
from tests.servers.home import Home
from tests.servers.kubernetes import Api, KubernetesServer, Namespace
from tests.servers.pgbouncer import Pgbouncer
from tests.servers.postgres import PostgresServer, Setting, fresh_database
from tests.servers.redis import Config, RedisServer
from tests.servers.server import Server
from tests.servers.together import shared_api

S = TypeVar("S", bound=Server)


@dataclass(frozen=True)
class Outside:
    """A server that an environment variable names. Nothing of it is flushed."""

    url: str

    def flush(self) -> None:
        """It may hold what is not ours."""


@dataclass
class Shared:
    """The servers of one test process, each started when it is first asked for."""

    home: Home
    stack: ExitStack
    redis_servers: dict[Binary, RedisServer] = field(default_factory=dict)
    postgres_servers: dict[Binary, PostgresServer] = field(default_factory=dict)

    def redis(self, binary: Binary) -> RedisServer:
        """The shared server of one version."""
        if binary not in self.redis_servers:
            self.redis_servers[binary] = started(self.stack, RedisServer(self.home, binary, redis.FAST))
        return self.redis_servers[binary]

    def postgres(self, binary: Binary) -> PostgresServer:
        """The shared server of one version."""
        if binary not in self.postgres_servers:
            settings: dict[str, Setting] = {**postgres.FAST, "max_connections": 200}
            self.postgres_servers[binary] = started(self.stack, PostgresServer(self.home, binary, settings))
        return self.postgres_servers[binary]


def started(stack: ExitStack, server: S) -> S:
    """The server, which runs until the stack is closed."""
    stack.callback(server.kill)
    server.start()
    return server


@pytest.fixture(scope="session")
def server_home() -> Iterator[Home]:
    """Where this process's servers live."""
    with Home() as home:
        yield home


@pytest.fixture(scope="session")
def shared_servers(server_home: Home) -> Iterator[Shared]:
    """The servers that the tests of this process share."""
    with ExitStack() as stack:
        yield Shared(server_home, stack)


def first(binaries: tuple[Binary, ...], kind: str) -> Binary:
    """The version to prefer."""
    return binaries[0] if binaries else found.missing(kind)


# Redis


@pytest.fixture(scope="session")
def redis_server(shared_servers: Shared) -> RedisServer | Outside:
    """The shared Redis server: REDIS_URL, or the first version found. Use `namespace`; do not configure it."""
    outside = os.environ.get("REDIS_URL")
    return Outside(outside) if outside else shared_servers.redis(first(found.redis_binaries(), "redis"))


@pytest.fixture
def redis_url(redis_server: RedisServer | Outside) -> str:
    """The shared Redis server, emptied for this test (but for the server that REDIS_URL names: use `namespace`)."""
    redis_server.flush()
    return redis_server.url


def each(binaries: tuple[Binary, ...], variable: str) -> list[Any]:
    """The versions to run a test on, all but the newest of each kind in `make test-all` only.

    None stands for the one of the environment, or for the missing one.
    """
    if os.environ.get(variable) or not binaries:
        return [None]
    newest = {binary.kind: binary for binary in sorted(binaries, key=lambda binary: binary.number)}
    return [*newest.values(), *further(*(binary for binary in binaries if binary not in newest.values()))]


@pytest.fixture(params=each(found.redis_binaries(), "REDIS_URL"), ids=lambda binary: str(binary or "redis"))
def every_redis(request: pytest.FixtureRequest, shared_servers: Shared) -> RedisServer | Outside:
    """The shared server of every version of Redis and Valkey, emptied for this test; only REDIS_URL if that is set."""
    binary: Binary | None = request.param
    server = shared_servers.redis(binary) if binary else request.getfixturevalue("redis_server")
    assert isinstance(server, RedisServer | Outside)
    server.flush()
    return server


class StartRedis(Protocol):
    """Starts a private Redis server that keeps every write; settings as in redis.conf, with underscores."""

    def __call__(self, binary: Binary | None = None, /, **config: Config) -> RedisServer: ...


@pytest.fixture
def start_redis(server_home: Home) -> Iterator[StartRedis]:
    """Start Redis servers for this test alone."""
    with ExitStack() as stack:

        def start(binary: Binary | None = None, /, **config: Config) -> RedisServer:
            chosen = binary or first(found.redis_binaries(), "redis")
            return started(stack, RedisServer(server_home, chosen, {**redis.DURABLE, **config}))

        yield start


# PostgreSQL


@pytest.fixture(scope="session")
def postgres_server(shared_servers: Shared) -> PostgresServer | Outside:
    """The shared PostgreSQL server: POSTGRES_URL, or the first version found. Use `namespace` on it."""
    outside = os.environ.get("POSTGRES_URL")
    return Outside(outside) if outside else shared_servers.postgres(first(found.postgres_binaries(), "postgres"))


@pytest.fixture
def postgres_url(postgres_server: PostgresServer | Outside) -> Iterator[str]:
    """A new database on the shared PostgreSQL server, for this test alone."""
    with fresh_database(postgres_server.url) as url:
        yield url


@pytest.fixture(params=each(found.postgres_binaries(), "POSTGRES_URL"), ids=lambda binary: str(binary or "postgres"))
def every_postgres(request: pytest.FixtureRequest, shared_servers: Shared) -> PostgresServer | Outside:
    """The shared server of every version of PostgreSQL; only POSTGRES_URL if that is set. Use `namespace` on it."""
    binary: Binary | None = request.param
    server = shared_servers.postgres(binary) if binary else request.getfixturevalue("postgres_server")
    assert isinstance(server, PostgresServer | Outside)
    return server


@pytest.fixture
def every_postgres_url(every_postgres: PostgresServer | Outside) -> Iterator[str]:
    """A new database on every version of PostgreSQL, for this test alone."""
    with fresh_database(every_postgres.url) as url:
        yield url


class StartPostgres(Protocol):
    """Starts a private PostgreSQL server that keeps what was committed; settings as in postgresql.conf."""

    def __call__(self, binary: Binary | None = None, /, **settings: Setting) -> PostgresServer: ...


@pytest.fixture
def start_postgres(server_home: Home) -> Iterator[StartPostgres]:
    """Start PostgreSQL servers for this test alone."""
    with ExitStack() as stack:

        def start(binary: Binary | None = None, /, **settings: Setting) -> PostgresServer:
            chosen = binary or first(found.postgres_binaries(), "postgres")
            return started(stack, PostgresServer(server_home, chosen, settings))

        yield start


StartPgbouncer = Callable[..., Pgbouncer]


@pytest.fixture
def start_pgbouncer(server_home: Home) -> Iterator[StartPgbouncer]:
    """Start a pgbouncer before a server of this process: `start_pgbouncer(postgres, **settings)`."""
    with ExitStack() as stack:

        def start(server: PostgresServer, **settings: str | int) -> Pgbouncer:
            chosen = first(found.pgbouncer_binaries(), "pgbouncer")
            return started(stack, Pgbouncer(server_home, chosen, server, settings))

        yield start


# Kubernetes


@pytest.fixture(scope="session")
def kubernetes_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API server that all processes of this run share. Use `kubernetes_namespace` on it."""
    if not found.kubernetes_binaries():
        found.missing("kubernetes")
    folder = tmp_path_factory.getbasetemp()
    with shared_api(folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder) as api:
        yield api


@pytest.fixture
def kubernetes_namespace(kubernetes_server: Api) -> Namespace:
    """A new namespace on the shared API server, for this test alone."""
    return kubernetes_server.namespace()


@pytest.fixture(scope="session")
def spare_kubernetes(server_home: Home) -> Iterator[KubernetesServer]:
    """An API server of this process, for one test after the other. Use `start_kubernetes`."""
    with ExitStack() as stack:
        yield private_kubernetes(stack, server_home, {})


class StartKubernetes(Protocol):
    """Starts an API server with an etcd of its own; options as on its command line, with underscores."""

    def __call__(self, **options: str | int) -> KubernetesServer: ...


@pytest.fixture
def start_kubernetes(request: pytest.FixtureRequest, server_home: Home) -> Iterator[StartKubernetes]:
    """Start API servers for this test alone, to be paused and killed. Often a proxy before the shared one will do.

    As starting one takes many seconds, the first without options is the one of a former test of this process, with a
    new namespace. Mark such tests `xdist_group("kubernetes")`, so that one process has them all.
    """
    spare = ["spare_kubernetes"]
    with ExitStack() as stack:

        def start(**options: str | int) -> KubernetesServer:
            if options or not spare:
                return private_kubernetes(stack, server_home, options)
            server = request.getfixturevalue(spare.pop())
            assert isinstance(server, KubernetesServer)
            server.revive()
            server.place = server.api.namespace()
            return server

        yield start


def private_kubernetes(stack: ExitStack, home: Home, options: dict[str, str | int]) -> KubernetesServer:
    """A new API server, which runs until the stack is closed."""
    if not found.kubernetes_binaries():
        found.missing("kubernetes")
    server = KubernetesServer(home, found.kubernetes_binaries(), options)
    stack.callback(server.etcd.kill)
    return started(stack, server)


# All


@pytest.fixture
def namespace() -> str:
    """A name that no other test uses."""
    return f"test-{uuid4().hex[:12]}"
