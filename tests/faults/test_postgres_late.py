"""Acquires whose connection is reset while their statement waits on the server are never granted for nobody."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import OutcomeUnknownError
from grelmicro.leases import Lease
from tests.helpers.postgres import TABLE, fetchval, stranger, with_settings
from tests.helpers.worlds import eventually
from tests.servers.fixtures import Outside, StartPgbouncer, StartPostgres
from tests.servers.postgres import PostgresServer, execute
from tests.servers.proxy import Proxy

LONG = 3600.0
"""A lease that does not end by itself within a test."""

LIMIT = 0.5
"""Seconds after which the clients here give a request up."""

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = $1"
"""How many statements wait for something of a kind."""

HELD = f"SELECT count(*) FROM {TABLE} WHERE name = 'lock:cart' AND holder <> ''"

INSERT = f"INSERT INTO {TABLE} VALUES ('grelmicro', 'lock:cart', '', 1, 0, now(), now(), now(), now(), '', '', 'epoch')"


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


@pytest.fixture(params=["direct", "pgbouncer"])
async def proxy(
    request: pytest.FixtureRequest,
    postgres_server: PostgresServer | Outside,
    postgres_url: str,
    _nothing_left: None,
) -> AsyncIterator[Proxy]:
    """Before the server, or before a pooler of it in transaction mode."""
    url = postgres_url
    if request.param == "pgbouncer":
        if isinstance(postgres_server, Outside):
            pytest.skip("the server of POSTGRES_URL may not be reachable for a pooler")
        start: StartPgbouncer = request.getfixturevalue("start_pgbouncer")
        pooler = start(postgres_server, default_pool_size=4)
        url = urlunsplit(urlsplit(url)._replace(netloc=f"postgres@127.0.0.1:{pooler.port}"))
    async with Proxy(url) as proxy:
        yield proxy


@asynccontextmanager
async def client_of(proxy: Proxy, postgres_url: str) -> AsyncIterator[LockAdapter]:
    """A client behind the proxy that has prepared its statements; of another name there is a record."""
    store = PostgresStore(proxy.url, listen_url=postgres_url, command_timeout=LIMIT)
    async with LockAdapter(store) as client:
        lease = await client.acquire("lock:warm", "warm", LONG)
        await client.acquire("lock:warm", "other", LONG)
        await client.release(lease)
        await client.release(await client.acquire("lock:warm", "warm", LONG))
        yield client


async def cut_off_while_waiting(client: LockAdapter, proxy: Proxy, url: str, kind: str = "Lock") -> None:
    """Acquire, and lose the connection while the statement waits."""
    acquiring = asyncio.create_task(client.acquire("lock:cart", "late-holder", LONG))
    while await fetchval(url, WAITING, kind) == 0:
        await asyncio.sleep(0.01)
    proxy.reset()
    with pytest.raises(OutcomeUnknownError):
        await acquiring


async def never_granted(client: LockAdapter, url: str) -> None:
    """What waited goes on now; it is not granted, or given back at once, and the next one gets it."""
    while await fetchval(url, WAITING, "Lock"):
        await asyncio.sleep(0.01)
    await eventually(lambda: not client._background, "the undo is done", 20.0)
    assert await fetchval(url, HELD) == 0
    lease = await client.acquire("lock:cart", "next", LONG)
    assert lease.granted_to("next")
    assert await client.release(lease)


@pytest.mark.parametrize("kept", [0.1, 2.5], ids=["in time", "too late"])
@pytest.mark.parametrize("how", ["locked", "inserted", "locked table"])
async def test_an_acquire_that_waited_for_its_row_is_not_granted_after_its_undo(
    proxy: Proxy, postgres_url: str, how: str, kept: float
) -> None:
    async with client_of(proxy, postgres_url) as client, stranger(postgres_url) as connection:
        if how != "inserted":
            await client.release(await client.acquire("lock:cart", "before", LONG))
        transaction = connection.transaction()
        await transaction.start()
        if how == "inserted":
            await connection.execute(INSERT)
        elif how == "locked":
            await connection.execute(f"SELECT 1 FROM {TABLE} WHERE name = 'lock:cart' FOR UPDATE")
        else:
            await connection.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
        await cut_off_while_waiting(client, proxy, postgres_url)
        await asyncio.sleep(kept)
        assert client._background, "its end is not certain while the row is kept"
        await transaction.rollback()
        await never_granted(client, postgres_url)


async def test_a_lease_that_is_passed_on_too_late_goes_to_nobody(proxy: Proxy, postgres_url: str) -> None:
    async with client_of(proxy, postgres_url) as client, stranger(postgres_url) as connection:
        held = await client.acquire("lock:cart", "before", LONG)
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(f"SELECT 1 FROM {TABLE} WHERE name = 'lock:cart' FOR UPDATE")
        assert isinstance(client.store, PostgresStore)
        passing = asyncio.create_task(client.store.pass_on(held, "late-holder", LONG))
        while await fetchval(postgres_url, WAITING, "Lock") == 0:
            await asyncio.sleep(0.01)
        proxy.reset()
        with suppress(Exception):
            await passing
        undo = Lease("lock:cart", "late-holder", 0)
        await asyncio.sleep(LIMIT + 0.5)
        with pytest.raises(Exception, match="lock"):
            await client.store.release(undo)
        await transaction.rollback()
        while await fetchval(postgres_url, WAITING, "Lock"):
            await asyncio.sleep(0.01)
        assert await client.store.release(undo) is False
        assert await client.release(held) is True


async def test_a_commit_that_waits_for_a_standby_is_undone_once_it_is_seen(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    async with Proxy(server.url) as proxy, client_of(proxy, server.url) as client:
        await client.release(await client.acquire("lock:cart", "before", LONG))
        await execute(server.url, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        while await fetchval(server.url, "SHOW synchronous_standby_names") != "nobody":
            await asyncio.sleep(0.01)
        await cut_off_while_waiting(client, proxy, server.url, "IPC")
        await asyncio.sleep(LIMIT + 1.5)
        assert client._background, "its end is not certain while it is not seen"
        async with stranger(with_settings(server.url, synchronous_commit="local")) as connection:
            await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            await connection.execute("SELECT pg_reload_conf()")
        await never_granted(client, server.url)


@pytest.mark.parametrize("statement", [INSERT, f"SELECT 1 FROM {TABLE} FOR UPDATE"], ids=["inserted", "locked"])
async def test_a_row_that_is_free_in_time_is_granted_for_the_whole_time(postgres_url: str, statement: str) -> None:
    async with PostgresStore(postgres_url) as store, stranger(postgres_url) as connection:
        if statement != INSERT:
            await store.release(await store.acquire("lock:cart", "before", LONG))
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(statement)
        acquiring = asyncio.create_task(store.acquire("lock:cart", "a", 4.0))
        while await fetchval(postgres_url, WAITING, "Lock") == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        await transaction.rollback()
        lease = await acquiring
        assert lease.granted_to("a")
        assert lease.remaining > 3.0
        assert await store.release(lease)
