"""A PostgreSQL server that is stopped, killed, paused, full or started again."""

import asyncio
import contextlib
import time
from collections.abc import Sized
from functools import partial

import pytest

from grelmicro.backends.postgres import PostgresProvider, PostgresStore
from grelmicro.coordination import LeaderElection, Lock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutcomeUnknownError, WouldBlockError
from grelmicro.task import Tasks
from tests.helpers.postgres import TABLE, fetchval, stranger, with_settings
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartPostgres
from tests.servers.postgres import PostgresServer, execute
from tests.servers.proxy import Proxy

LONG = 3600.0
"""A lease that does not end by itself within a test."""


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


def longer_than(items: Sized, count: int) -> bool:
    """Whether there are more."""
    return len(items) > count


def stand_still(server: PostgresServer, seconds: float) -> None:
    """Pause the server for a while."""
    server.pause()
    time.sleep(seconds)
    server.resume()


async def test_a_restart_keeps_leases_and_repeats_no_fence(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    async with LockAdapter(PostgresStore(server.url)) as client:
        held = await client.acquire("lock:held", "a", LONG)
        free = await client.acquire("lock:free", "a", LONG)
        await client.release(free)
        await asyncio.to_thread(server.restart)
        refused = await client.acquire("lock:held", "b", LONG)
        assert (refused.holder, refused.fence) == ("a", held.fence)
        again = await client.acquire("lock:free", "a", LONG)
        assert again.fence > free.fence
        assert await client.renew(held, LONG) is not None
        await client.release(again)
        assert (await client.acquire("lock:free", "a", LONG)).fence == again.fence + 1


async def test_a_grant_is_durable_also_where_commits_usually_are_not(start_postgres: StartPostgres) -> None:
    server = start_postgres(synchronous_commit="off", wal_writer_delay="10s")
    async with LockAdapter(PostgresStore(server.url)) as client, stranger(server.url) as connection:
        await connection.execute("CREATE TABLE public.others (n int)")
        fences = []
        for _ in range(3):
            fences.append((await client.acquire("lock:cart", "a", LONG)).fence)
            await client.release(await client.acquire("lock:cart", "a", LONG))
        held = await client.acquire("lock:cart", "b", LONG, data={"k": "1"})
        assert await client.renew(held, 2 * LONG) is not None
        await connection.execute("INSERT INTO public.others VALUES (1)")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        record = await client.read("lock:cart")
        assert record is not None
        assert (record.holder, record.fence) == ("b", held.fence)
        assert record.remaining > LONG
        # It is the transactions of leases alone that were made durable.
        assert await fetchval(server.url, "SELECT count(*) FROM public.others") == 0


async def test_under_traffic_a_server_that_is_killed_costs_no_exclusion_and_no_fence(
    start_postgres: StartPostgres,
) -> None:
    server = start_postgres()
    fences: list[int] = []
    holders = 0
    stop = asyncio.Event()

    async def work(client: LockAdapter, number: int) -> None:
        nonlocal holders
        lock = Lock("cart", backend=client, lease_duration=LONG, retry_interval=0.02)
        while not stop.is_set():
            with contextlib.suppress(CoordinationBackendError, WouldBlockError):
                handle = await lock.acquire(timeout=1.0)
                holders += 1
                assert holders == 1
                fences.append(handle.fencing_token)
                await asyncio.sleep(0.001)
                holders -= 1
                await handle.release()

    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(LockAdapter(PostgresStore(server.url, command_timeout=1.0)))
            for _ in range(2)
        ]
        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(work(clients[number % 2], number))
            for turn in range(3):
                before = len(fences)
                await eventually(partial(longer_than, fences, before + 20), "work goes on", 20.0)
                await asyncio.to_thread(server.kill if turn % 2 == 0 else server.stop)
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.start)
            before = len(fences)
            await eventually(partial(longer_than, fences, before + 20), "work goes on", 20.0)
            stop.set()
    assert fences == sorted(set(fences))


async def test_a_server_that_is_down_is_no_contention(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    async with LockAdapter(PostgresStore(server.url, command_timeout=1.0)) as client:
        lock = Lock("cart", backend=client)
        await (await lock.acquire()).release()
        await asyncio.to_thread(server.stop)
        for timeout in (0.0, 0.5, None):
            began = time.monotonic()
            with pytest.raises(BackendUnavailableError, match=r"connecting to postgresql://.*: it cannot be reached"):
                await lock.acquire(timeout=timeout)
            assert time.monotonic() - began < 5.0
        await asyncio.to_thread(server.start)
        await (await lock.acquire(timeout=5.0)).release()


async def test_opening_while_the_server_is_down_leaves_nothing_open(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    await asyncio.to_thread(server.stop)
    provider = PostgresProvider(server.url)
    with pytest.raises(BackendUnavailableError, match="check host and port, and whether it runs"):
        await provider.check()
    await asyncio.to_thread(server.start)
    await provider.check()


async def test_a_server_that_became_a_standby_is_left_for_the_new_primary(start_postgres: StartPostgres) -> None:
    old, new = start_postgres(), start_postgres()
    async with Proxy(old.url) as proxy, LockAdapter(PostgresStore(proxy.url)) as client:
        lease = await client.acquire("lock:cart", "a", LONG)
        async with PostgresStore(new.url) as primary:
            # What the new one has is older: asynchronous replication lost the last grants.
            await primary.acquire("lock:cart", "a", LONG)
        await execute(old.url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
        await asyncio.sleep(0.3)
        proxy.port_of_server = new.port
        with pytest.raises(BackendUnavailableError, match="takes no writes"):
            await client.acquire("lock:other", "a", LONG)
        assert (await client.acquire("lock:other", "a", LONG)).granted_to("a")
        assert await client.release(lease) is False  # it has another fence there


@pytest.mark.parametrize("state", ["dead", "paused"])
async def test_a_dead_server_makes_closing_neither_fail_nor_last(start_postgres: StartPostgres, state: str) -> None:
    server = start_postgres()
    async with contextlib.AsyncExitStack() as stack:
        provider = await stack.enter_async_context(PostgresProvider(server.url))
        client = await stack.enter_async_context(provider.lock())
        await client.acquire("lock:cart", "a", LONG)
        await asyncio.to_thread(server.pause if state == "paused" else server.kill)
        began = time.monotonic()
    assert time.monotonic() - began < 4.0
    await asyncio.to_thread(server.resume)


async def test_a_server_without_a_free_connection_says_so(start_postgres: StartPostgres) -> None:
    server = start_postgres(max_connections=5, superuser_reserved_connections=0)
    async with contextlib.AsyncExitStack() as stack:
        taken = [await stack.enter_async_context(stranger(server.url)) for _ in range(5)]
        with pytest.raises(BackendUnavailableError, match="it has no connection left: raise max_connections"):
            await PostgresProvider(server.url).check()
        await taken[0].close()
        await taken[1].close()
        await asyncio.sleep(0.2)
        await PostgresProvider(server.url).check()


async def test_a_full_disk_says_so_and_changes_nothing(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    async with LockAdapter(PostgresStore(server.url)) as client, stranger(server.url) as connection:
        lease = await client.acquire("lock:cart", "a", LONG)
        await connection.execute(
            "CREATE FUNCTION public.full() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE 'could not extend file' USING ERRCODE = '53100'; END $$".replace(
                "public.full", "public.disk"
            )
        )
        await connection.execute(
            f"CREATE TRIGGER disk BEFORE UPDATE OR INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION public.disk()"
        )
        for call in (client.acquire("lock:new", "a", LONG), client.renew(lease, LONG), client.release(lease)):
            with pytest.raises(BackendUnavailableError, match="its disk is full: make room"):
                await call
        await connection.execute(f"DROP TRIGGER disk ON {TABLE}")
        await eventually(lambda: not client._background, "the release is repeated")
        record = await client.read("lock:cart")
        assert record is not None
        assert record.holder == ""


async def test_waiters_are_woken_again_after_a_restart(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    async with (
        LockAdapter(PostgresStore(server.url)) as client,
        LockAdapter(PostgresStore(server.url)) as holder,
    ):
        mine = Lock("cart", backend=client, lease_duration=LONG, retry_interval=0.05)
        handle = await Lock("cart", backend=holder, lease_duration=LONG).acquire()
        waiting = asyncio.create_task(mine.acquire(timeout=30))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.restart)
        if waiting.done():  # it asked in the very moment
            with pytest.raises(CoordinationBackendError):
                await waiting
            waiting = asyncio.create_task(mine.acquire(timeout=30))
        async with client.watch("lock:cart") as waiter:
            await eventually(lambda: waiter.pushes, "hints come again", 20.0)
        await handle.release()
        await (await asyncio.wait_for(waiting, 3.0)).release()


async def test_a_session_that_is_ended_in_the_middle_has_an_unknown_outcome(postgres_url: str) -> None:
    name = "ended in the middle"
    url = with_settings(postgres_url, application_name=name)
    async with LockAdapter(PostgresStore(url)) as client:
        await client.release(await client.acquire("lock:cart", "a", LONG))
        async with stranger(postgres_url) as connection:
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            asked = asyncio.create_task(client.acquire("lock:cart", "b", LONG))
            await asyncio.sleep(0.2)
            ended = (
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE application_name = $1 AND wait_event_type = 'Lock'"
            )
            assert await connection.fetchval(ended, name) == 1
            with pytest.raises(OutcomeUnknownError):
                await asked
            await transaction.rollback()
        await eventually(lambda: not client._background, "it is undone", 20.0)
        assert (await client.acquire("lock:cart", "c", LONG)).granted_to("c")


async def test_a_leader_goes_on_through_a_restart_and_never_overlaps(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    terms: set[int] = set()

    def make(backend: LeaderElectionAdapter) -> LeaderElection:
        return LeaderElection(
            "main",
            backend=backend,
            lease_duration=3.0,
            renew_deadline=2.0,
            retry_interval=0.2,
            backend_timeout=1.0,
        )

    async with (
        LeaderElectionAdapter(PostgresStore(server.url, command_timeout=1.0)) as first,
        LeaderElectionAdapter(PostgresStore(server.url, command_timeout=1.0)) as second,
    ):
        leaders = [make(first), make(second)]
        async with Tasks(tasks=list(leaders)):
            await eventually(lambda: any(leader.is_leader() for leader in leaders), "somebody leads", 10.0)
            for act in (server.restart, partial(stand_still, server, 2.5), server.restart):
                doing = asyncio.create_task(asyncio.to_thread(act))
                while not doing.done():
                    assert sum(leader.is_leader() for leader in leaders) <= 1
                    await asyncio.sleep(0.005)
                await doing
                await eventually(lambda: any(leader.is_leader() for leader in leaders), "somebody leads again", 10.0)
                terms.update(leader.record.transitions for leader in leaders if leader.record is not None)
    assert terms
