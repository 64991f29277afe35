"""The PostgreSQL store keeps the contract: directly, through a pooler, and on an application's own pool."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.leases import LeaseStore
from tests.contract.passing import PassingContract
from tests.contract.raising import RaisingContract
from tests.servers.fixtures import Outside, StartPgbouncer
from tests.servers.postgres import PostgresServer


class InRealTime(PassingContract, RaisingContract):
    """On the server's clock."""

    async def let_pass(self, store: LeaseStore, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TestPostgres(InRealTime):
    """On each version that is found; the second store is another one on the same database."""

    @pytest.fixture
    async def store(self, every_postgres_url: str) -> AsyncIterator[PostgresStore]:
        async with PostgresStore(every_postgres_url) as store:
            yield store

    @pytest.fixture
    async def other(self, store: PostgresStore, every_postgres_url: str) -> AsyncIterator[PostgresStore]:
        async with PostgresStore(every_postgres_url) as other:
            yield other


class TestPostgresBehindAPooler(InRealTime):
    """Through pgbouncer in transaction mode, whose two sessions are used in turn; hints come from the server itself."""

    @pytest.fixture
    async def stores(
        self, postgres_server: PostgresServer | Outside, postgres_url: str, start_pgbouncer: StartPgbouncer
    ) -> AsyncIterator[list[PostgresStore]]:
        if isinstance(postgres_server, Outside):
            pytest.skip("the server of POSTGRES_URL may not be reachable for a pooler")
        pooler = start_pgbouncer(postgres_server, default_pool_size=2, server_round_robin=1)
        parts = urlsplit(postgres_url)
        url = urlunsplit(parts._replace(netloc=f"postgres@127.0.0.1:{pooler.port}"))
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(PostgresStore(url, listen_url=postgres_url)) for _ in range(2)]

    @pytest.fixture
    def store(self, stores: list[PostgresStore]) -> PostgresStore:
        return stores[0]

    @pytest.fixture
    def other(self, stores: list[PostgresStore]) -> PostgresStore:
        return stores[1]


class TestPostgresOnAPool(InRealTime):
    """On a pool of an application, which lends one connection at a time."""

    @pytest.fixture
    async def store(self, postgres_url: str) -> AsyncIterator[PostgresStore]:
        async with (
            asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool,
            PostgresStore(pool=pool, listen_url=postgres_url) as store,
        ):
            yield store

    @pytest.fixture
    async def other(self, store: PostgresStore, postgres_url: str) -> AsyncIterator[PostgresStore]:
        async with PostgresStore(postgres_url) as other:
            yield other
