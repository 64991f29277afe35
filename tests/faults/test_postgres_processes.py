"""Processes that share a PostgreSQL server: starting together, killed, forked, behind a pooler."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from urllib.parse import urlsplit, urlunsplit

import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.coordination import Lock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import OutcomeUnknownError
from tests.helpers.postgres import TABLE, fetchval, stranger, with_settings
from tests.helpers.scripts import Script, script
from tests.helpers.worlds import eventually
from tests.servers.fixtures import Outside, StartPgbouncer
from tests.servers.postgres import PostgresServer, execute

OPENER = """
import asyncio, sys
from grelmicro.backends.postgres import PostgresStore

async def open_it(url):
    async with PostgresStore(url) as store:
        lease = await store.acquire("lock:cart", sys.argv[1], 60.0)
        return lease.granted_to(sys.argv[1])

print("ready", flush=True)
for url in sys.stdin:
    print(asyncio.run(open_it(url.strip())), flush=True)
"""

HOLDER = """
import asyncio, sys
from grelmicro.backends.postgres import PostgresStore
from grelmicro.coordination import Lock
from grelmicro.coordination.adapters import LockAdapter

async def hold(url, listen, seconds):
    async with LockAdapter(PostgresStore(url, listen_url=listen)) as client:
        while True:
            lock = Lock("cart", backend=client, lease_duration=seconds)
            handle = await lock.acquire()
            print(handle.fencing_token, flush=True)
            if sys.argv[4] == "once":
                await asyncio.sleep(3600)
            await handle.release()

asyncio.run(hold(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""

FORKING = """
import asyncio, gc, os, sys
from grelmicro.backends.postgres import PostgresProvider
from grelmicro.coordination import Lock
from grelmicro.errors import OutOfContextError

provider = PostgresProvider(sys.argv[1])

async def anew(lock):
    async with provider, provider.lock() as backend:
        own = Lock("of the child", backend=backend)
        async with own as held:
            return held.fencing_token > 0

def child(lock, how):
    try:
        lock.from_thread.acquire(timeout=0)
    except OutOfContextError:
        pass
    else:
        os._exit(3)
    if how == "anew" and not asyncio.run(anew(lock)):
        os._exit(4)
    if how == "forget":
        provider.store.abandon()
    gc.collect()

async def main():
    async with provider, provider.lock() as backend:
        lock = Lock("cart", backend=backend, lease_duration=60, auto_renew=True)
        async with lock as held:
            for how in ("leave", "forget", "anew"):
                pid = os.fork()
                if pid == 0:
                    asyncio.events._set_running_loop(None)
                    code = 5
                    try:
                        child(lock, how)
                        code = 0
                    finally:
                        os._exit(code)
                _, status = os.waitpid(pid, 0)
                assert os.waitstatus_to_exitcode(status) == 0, (how, status)
                await asyncio.sleep(0.1)
                # The very connections of before serve on.
                assert await lock.owned()
                assert (await held.extend()).fencing_token == held.fencing_token
                async with backend.watch("lock:cart") as waiter:
                    assert waiter.pushes
    print("done", flush=True)

asyncio.run(main())
"""

CARELESS = """
import asyncio, sys
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock

micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])

async def main():
    async with micro:
        async with Lock("cart"):
            pass
        if sys.argv[2] == "exit":
            sys.exit(3)
        if sys.argv[2] == "hold":
            await Lock("left held").acquire()

asyncio.run(main())
with micro:
    with Lock("cart").from_thread:
        pass
print("done", flush=True)
"""


@pytest.fixture
def pooled(postgres_server: PostgresServer | Outside, postgres_url: str, start_pgbouncer: StartPgbouncer) -> str:
    """The database through pgbouncer in transaction mode, with two sessions for everybody."""
    if isinstance(postgres_server, Outside):
        pytest.skip("the server of POSTGRES_URL may not be reachable for a pooler")
    pooler = start_pgbouncer(postgres_server, default_pool_size=2, server_round_robin=1, max_client_conn=500)
    return urlunsplit(urlsplit(postgres_url)._replace(netloc=f"postgres@127.0.0.1:{pooler.port}"))


@pytest.fixture
async def client(postgres_url: str) -> AsyncIterator[LockAdapter]:
    async with LockAdapter(PostgresStore(postgres_url)) as client:
        yield client


async def test_sixteen_stores_that_make_the_table_at_once_all_open(every_postgres_url: str) -> None:
    url = with_settings(every_postgres_url, search_path="pg_temp")
    for _ in range(20):
        async with contextlib.AsyncExitStack() as stack:
            stores = [PostgresStore(url if number % 2 else every_postgres_url) for number in range(16)]
            opened = await asyncio.gather(*(stack.enter_async_context(store) for store in stores))
            answers = await asyncio.gather(
                *(store.acquire("lock:cart", store._statements.table, 60.0) for store in opened)
            )
            assert len({answer.fence for answer in answers}) == 1
        await execute(every_postgres_url, f"DROP TABLE {TABLE}")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sixteen_processes_that_make_the_table_at_once_all_start(postgres_url: str) -> None:
    with ExitStack() as stack:
        openers: list[Script] = [stack.enter_context(script(OPENER, number, strict=False)) for number in range(16)]
        for opener in openers:
            assert opener.hear(120.0) == "ready"
        for _ in range(3):
            for opener in openers:
                opener.tell(postgres_url)
            assert sorted(opener.hear() for opener in openers) == ["False"] * 15 + ["True"]
            asyncio.run(execute(postgres_url, f"DROP TABLE {TABLE}"))
        for opener in openers:
            ending = opener.end()
            assert (ending.code, ending.errors) == (0, "")


@pytest.mark.parametrize("way", ["directly", "through a pooler"])
async def test_a_killed_holder_delays_the_next_by_its_lease_at_most(
    way: str, request: pytest.FixtureRequest, postgres_url: str, client: LockAdapter
) -> None:
    url = postgres_url if way == "directly" else request.getfixturevalue("pooled")
    with script(HOLDER, url, postgres_url, 2.0, "once") as holder:
        fence = int(await asyncio.to_thread(holder.hear))
        lock = Lock("cart", backend=client, lease_duration=60.0)
        other = Lock("cart", backend=client, lease_duration=60.0)
        waits = [asyncio.create_task(each.acquire(timeout=20)) for each in (lock, other)]
        await asyncio.sleep(0.2)
        holder.send(signal.SIGKILL)
        killed = time.monotonic()
        first = await waits[0]
        assert time.monotonic() - killed < 2.0 + 1.0
        assert first.fencing_token == fence + 1
        await first.release()
        second = await asyncio.wait_for(waits[1], 1.0)
        assert second.fencing_token == fence + 2
        await second.release()


@pytest.mark.timeout(120)
async def test_a_client_killed_at_any_moment_leaves_nothing_to_a_pooler(
    pooled: str, postgres_url: str, client: LockAdapter
) -> None:
    for turn in range(3):
        with script(HOLDER, pooled, postgres_url, 1.0, "forever") as holder:
            await asyncio.to_thread(holder.hear)
            await asyncio.sleep(0.05 + turn * 0.0137)
            holder.send(signal.SIGKILL)
        began = time.monotonic()
        async with Lock("cart", backend=client, lease_duration=60.0):
            assert time.monotonic() - began < 3.0
    assert await fetchval(postgres_url, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
    assert await fetchval(postgres_url, "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in tr%'") == 0


async def test_twenty_clients_share_two_sessions_of_a_pooler(
    pooled: str, postgres_url: str, nothing_left: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "grelmicro.coordination")
    inside = 0
    fences: list[int] = []

    async def work(client: LockAdapter) -> None:
        nonlocal inside
        for turn in range(10):
            lock = Lock(f"cart{turn % 2}", backend=client, lease_duration=60.0, auto_renew=turn % 3 == 0)
            async with lock as held:
                if turn % 2 == 0:
                    inside += 1
                    assert inside == 1
                    fences.append(held.fencing_token)
                    await asyncio.sleep(0.001)
                    await held.extend()
                    inside -= 1

    async with contextlib.AsyncExitStack() as stack:
        stores = [PostgresStore(pooled, listen_url=postgres_url if number % 2 else None) for number in range(20)]
        clients = [await stack.enter_async_context(LockAdapter(store)) for store in stores[:4]]
        clients += await asyncio.gather(*(stack.enter_async_context(LockAdapter(store)) for store in stores[4:]))
        await asyncio.gather(*(work(client) for client in clients))
    assert len(fences) == 100
    assert fences == sorted(set(fences))
    # Each store learns once that what it prepares gets lost, and does not try it again and again.
    told = [record for record in caplog.records if "going on without them" in record.getMessage()]
    assert 0 < len(told) <= 20


async def test_a_session_that_is_ended_behind_a_pooler_has_an_unknown_outcome(
    pooled: str, postgres_url: str, client: LockAdapter
) -> None:
    async with LockAdapter(PostgresStore(pooled, listen_url=postgres_url)) as behind, stranger(postgres_url) as other:
        await behind.release(await behind.acquire("lock:cart", "a", 60.0))
        transaction = other.transaction()
        await transaction.start()
        await other.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
        asked = asyncio.create_task(behind.acquire("lock:cart", "b", 60.0))
        await asyncio.sleep(0.3)
        ended = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        assert await other.fetchval(ended) == 1
        with pytest.raises(OutcomeUnknownError):
            await asked
        await transaction.rollback()
        await eventually(lambda: not behind._background, "it is undone", 20.0)
        assert (await client.acquire("lock:cart", "c", 60.0)).granted_to("c")


async def test_many_waiters_need_one_connection_for_their_hints(postgres_url: str) -> None:
    name = "many waiters"
    url = with_settings(postgres_url, application_name=name)
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
    async with LockAdapter(PostgresStore(url)) as waiting, LockAdapter(PostgresStore(postgres_url)) as holding:
        handles = [await Lock(f"cart{n}", backend=holding, lease_duration=600.0).acquire() for n in range(200)]
        waits = [
            asyncio.create_task(Lock(f"cart{n}", backend=waiting, lease_duration=600.0).acquire(timeout=50))
            for n in range(200)
        ]
        await asyncio.sleep(2.0)
        assert await fetchval(postgres_url, count, name) <= 8
        began = time.monotonic()
        await asyncio.gather(*(handle.release() for handle in handles))
        taken = await asyncio.gather(*waits)
        assert time.monotonic() - began < 9.0  # without hints they would ask again after ten seconds
        await asyncio.gather(*(handle.release() for handle in taken))


def test_a_forked_child_disturbs_nothing_of_its_parents(postgres_url: str) -> None:
    with script(FORKING, postgres_url, strict=False) as parent:
        ending = parent.end()
        assert (ending.code, ending.said) == (0, "done\n"), ending.errors


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exit", 3), ("hold", 0)])
def test_a_program_ends_soon_and_silently(postgres_url: str, how: str, code: int) -> None:
    with script(CARELESS, postgres_url, how) as careless:
        ending = careless.end()
        assert ending.code == code, ending.errors
        assert ending.errors == "" or how == "hold"
