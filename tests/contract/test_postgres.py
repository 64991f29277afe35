"""The PostgreSQL store keeps the contract: directly, through a pooler, and on an application's own pool."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import cache
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.leases import LeaseStore
from tests.contract.passing import PassingContract
from tests.contract.raising import RaisingContract
from tests.servers.fixtures import Outside, StartPgbouncer
from tests.servers.postgres import PostgresServer, fresh_database

Database = Callable[[PostgresServer | Outside], str]
"""The URL of a database on a server."""


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    """A new database on each server, for all tests here: each test uses names of its own."""
    with ExitStack() as stack:
        yield cache(lambda server: stack.enter_context(fresh_database(server.url)))


class InRealTime(PassingContract, RaisingContract):
    """On the server's clock."""

    async def let_pass(self, store: LeaseStore, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TestPostgres(InRealTime):
    """On each version that is found; the second store is another one on the same database."""

    @pytest.fixture
    def url(self, every_postgres: PostgresServer | Outside, database: Database) -> str:
        return database(every_postgres)

    @pytest.fixture
    async def store(self, url: str) -> AsyncIterator[PostgresStore]:
        async with PostgresStore(url) as store:
            yield store

    @pytest.fixture
    async def other(self, store: PostgresStore, url: str) -> AsyncIterator[PostgresStore]:
        async with PostgresStore(url) as other:
            yield other


class TestPostgresBehindAPooler(InRealTime):
    """Through pgbouncer in transaction mode, whose two sessions are used in turn; hints come from the server itself."""

    @pytest.fixture
    async def stores(
        self, postgres_server: PostgresServer | Outside, database: Database, start_pgbouncer: StartPgbouncer
    ) -> AsyncIterator[list[PostgresStore]]:
        if isinstance(postgres_server, Outside):
            pytest.skip("the server of POSTGRES_URL may not be reachable for a pooler")
        pooler = start_pgbouncer(postgres_server, default_pool_size=2, server_round_robin=1)
        direct = database(postgres_server)
        url = urlunsplit(urlsplit(direct)._replace(netloc=f"postgres@127.0.0.1:{pooler.port}"))
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(PostgresStore(url, listen_url=direct)) for _ in range(2)]

    @pytest.fixture
    def store(self, stores: list[PostgresStore]) -> PostgresStore:
        return stores[0]

    @pytest.fixture
    def other(self, stores: list[PostgresStore]) -> PostgresStore:
        return stores[1]


class TestPostgresOnAPool(InRealTime):
    """On a pool of an application, which lends one connection at a time."""

    @pytest.fixture
    def url(self, postgres_server: PostgresServer | Outside, database: Database) -> str:
        return database(postgres_server)

    @pytest.fixture
    async def store(self, url: str) -> AsyncIterator[PostgresStore]:
        async with (
            asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
            PostgresStore(pool=pool, listen_url=url) as store,
        ):
            yield store

    @pytest.fixture
    async def other(self, store: PostgresStore, url: str) -> AsyncIterator[PostgresStore]:
        async with PostgresStore(url) as other:
            yield other
