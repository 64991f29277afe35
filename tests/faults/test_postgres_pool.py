"""A pool that the application lends: exhausted, inside transactions, or left behind by a fail-over."""

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from grelmicro.backends.postgres import PostgresProvider, PostgresStore
from grelmicro.coordination import LeaderElection, Lock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutcomeUnknownError
from grelmicro.task import Tasks
from tests.helpers.postgres import TABLE, fetchval, stranger
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartPostgres
from tests.servers.postgres import execute
from tests.servers.proxy import Proxy

LONG = 3600.0
"""A lease that does not end by itself within a test."""

READ_ONLY = ("ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
"""What makes a server take no writes, as a standby does."""


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


# Fail-over


async def test_after_a_failover_the_connections_to_the_old_primary_are_expired(start_postgres: StartPostgres) -> None:
    old, new = start_postgres(), start_postgres()
    count = f"SELECT count(*) FROM {TABLE} WHERE name = $1"
    async with Proxy(old.url) as proxy, asyncpg.create_pool(proxy.url, min_size=4, max_size=4) as pool:
        async with PostgresStore(new.url):
            pass  # which makes the table there, too
        async with LockAdapter(PostgresStore(pool=pool)) as client, LeaderElectionAdapter(client.store) as elections:
            await client.acquire("lock:before", "a", LONG)
            leader = LeaderElection(
                "main", backend=elections, lease_duration=6.0, renew_deadline=4.0, retry_interval=0.2
            )
            async with Tasks(tasks=[leader]):
                await leader.wait_for_leader()
                await execute(old.url, *READ_ONLY)
                await eventually(lambda: proxy.open == 4, "the pool is connected")
                proxy.port_of_server = new.port
                refusals = []
                until = time.monotonic() + 20.0
                while await fetchval(new.url, count, "lock:after") == 0:
                    try:
                        await client.acquire("lock:after", "a", LONG)
                    except BackendUnavailableError as error:
                        refusals.append(str(error))
                    assert time.monotonic() < until
                assert all("it takes no writes now" in refusal for refusal in refusals)
                # The election asks too, and whatever each of them had borrowed meanwhile is refused once.
                assert len(refusals) <= 2
                while await fetchval(new.url, count, "leader:main") == 0:
                    await asyncio.sleep(0.05)
                    assert time.monotonic() < until
                await eventually(leader.is_leader, "it leads again", 20.0)


# Transactions


async def begin(connection: Any) -> None:
    """Leave a transaction open, as the `setup=` or `init=` of a pool may do."""
    await connection.execute("BEGIN")


@pytest.mark.parametrize("step", ["setup", "init"])
async def test_a_pool_that_leaves_a_transaction_open_is_refused_at_each_borrow(step: str, postgres_url: str) -> None:
    hooks: dict[str, Any] = {step: begin}
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2, **hooks) as pool:
        for _ in range(2):
            with pytest.raises(
                BackendUnavailableError, match="inside a transaction, in which no lease can be kept"
            ) as e:
                await PostgresProvider.from_pool(pool).check()
            assert e.value.lasting


async def test_a_transaction_that_appears_later_hides_no_record(postgres_url: str) -> None:
    careless = False

    async def setup(connection: Any) -> None:
        if careless:
            await begin(connection)

    async with (
        asyncpg.create_pool(postgres_url, min_size=2, max_size=2, setup=setup) as pool,
        LockAdapter(PostgresStore(pool=pool)) as client,
    ):
        held = await client.acquire("lock:held", "a", LONG)
        careless = True
        for call in (
            client.acquire("lock:cart", "a", LONG),
            client.acquire("lock:cart", "b", LONG),
            client.renew(held, LONG),
            client.release(held),
        ):
            with pytest.raises(BackendUnavailableError, match="let setup=, init= and reset= of the pool end"):
                await call
        careless = False
        await eventually(lambda: not client._background, "the release is repeated", 20.0)
        assert (await client.acquire("lock:cart", "c", LONG)).granted_to("c")
        assert (await client.acquire("lock:held", "c", LONG)).granted_to("c")


# Exhaustion


async def test_a_deadline_that_passes_while_the_pool_is_exhausted_names_the_pool(postgres_url: str) -> None:
    async with (
        asyncpg.create_pool(postgres_url, min_size=0, max_size=2) as pool,
        LockAdapter(PostgresStore(pool=pool, listen_url=postgres_url)) as client,
    ):
        lock = Lock("cart", backend=client)
        taken = [await pool.acquire() for _ in range(2)]
        with pytest.raises(
            BackendUnavailableError, match=r"'cart'.*: the pool lent no connection within 0\.\d s: make"
        ):
            await lock.acquire(timeout=0.7)
        assert not client._background  # there is nothing to undo
        cancelled = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0.1)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert not client._background
        for connection in taken:
            await pool.release(connection)
        async with lock:
            pass


async def test_an_election_whose_pool_is_exhausted_says_so(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        asyncpg.create_pool(postgres_url, min_size=0, max_size=1) as pool,
        LeaderElectionAdapter(PostgresStore(pool=pool, listen_url=postgres_url)) as elections,
    ):
        leader = LeaderElection("main", backend=elections, backend_timeout=0.3)
        async with pool.acquire(), Tasks(tasks=[leader]):
            await eventually(lambda: "the pool lent no connection within 0." in caplog.text, "it is told")
        assert "no answer in time" not in caplog.text


async def test_a_deadline_that_passes_while_own_connections_are_busy_says_so(postgres_url: str) -> None:
    async with LockAdapter(PostgresStore(postgres_url)) as client:
        await client.acquire("lock:locked", "a", LONG)
        async with stranger(postgres_url) as connection, connection.transaction():
            await connection.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            stuck = [asyncio.create_task(client.acquire("lock:locked", "a", LONG)) for _ in range(5)]
            await asyncio.sleep(0.3)
            with pytest.raises(CoordinationBackendError, match=r"none of the 5 connections for requests became free"):
                await Lock("cart", backend=client).acquire(timeout=2.0)
            for task in stuck:
                task.cancel()
            await asyncio.wait(stuck)
        await eventually(lambda: not client._background, "what was cut off is undone", 20.0)


# Connections that break


async def test_an_acquire_whose_lent_connection_breaks_is_undone(postgres_url: str) -> None:
    async with (
        Proxy(postgres_url) as proxy,
        asyncpg.create_pool(proxy.url, min_size=0, max_size=2) as pool,
        LockAdapter(PostgresStore(pool=pool, listen_url=postgres_url, command_timeout=1.0)) as client,
    ):
        await client.release(await client.acquire("lock:cart", "before", LONG))
        for then in ("reset", "silent"):
            proxy.drop_reply(b"late-holder", then="reset" if then == "reset" else "silent")
            with pytest.raises(OutcomeUnknownError):
                await client.acquire("lock:cart", "late-holder", LONG)
            await eventually(lambda: not client._background, "it is undone", 20.0)
            lease = await client.acquire("lock:cart", "next", LONG)
            assert lease.granted_to("next")
            assert await client.release(lease)
