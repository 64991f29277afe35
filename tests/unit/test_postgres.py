"""What is special about leases in PostgreSQL, in one process."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from grelmicro.backends import sweeper
from grelmicro.backends.postgres import PostgresProvider, PostgresStore
from grelmicro.coordination import Lock
from grelmicro.errors import BackendUnavailableError, OutOfContextError
from grelmicro.leases import Lease
from tests.helpers.postgres import TABLE, fetchval, stranger, with_settings

DAY = 24 * 3600.0


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


@pytest.fixture
async def store(postgres_url: str, _nothing_left: None) -> AsyncIterator[PostgresStore]:
    async with PostgresStore(postgres_url) as store:
        yield store


@pytest.fixture
async def other(store: PostgresStore, postgres_url: str) -> AsyncIterator[PostgresStore]:
    """Another instance on the same database, as another process has it."""
    async with PostgresStore(postgres_url) as other:
        yield other


async def mark_of(url: str, name: str) -> str:
    """Who is marked as waiting."""
    mark = await fetchval(url, f"SELECT waiter FROM {TABLE} WHERE name = $1", name)
    assert isinstance(mark, str)
    return mark


# Time


async def test_sessions_in_any_time_zone_agree_about_a_lease(postgres_url: str) -> None:
    zones = ("UTC", "Asia/Tokyo", "America/Havana", "Australia/Lord_Howe")
    for mine, theirs in pairwise((*zones, zones[0])):
        async with (
            PostgresStore(with_settings(postgres_url, TimeZone=mine, DateStyle="SQL, DMY")) as first,
            PostgresStore(with_settings(postgres_url, TimeZone=theirs, IntervalStyle="iso_8601")) as second,
        ):
            lease = await first.acquire(f"lock:{mine}{theirs}", "a", 60.0)
            refused = await second.acquire(lease.name, "b", 60.0)
            assert refused.granted_to("a")
            assert 55.0 < refused.remaining <= 60.0
            assert abs(lease.acquired_at - time.time()) < 30.0
            assert await second.renew(lease, 0.02) is not None
            await asyncio.sleep(0.05)
            assert (await second.acquire(lease.name, "b", 60.0)).granted_to("b")


async def test_a_lease_of_a_year_is_as_long_in_every_zone(postgres_url: str) -> None:
    async with PostgresStore(with_settings(postgres_url, TimeZone="America/New_York")) as store:
        lease = await store.acquire("lock:year", "a", 366 * DAY)
        assert abs(lease.remaining - 366 * DAY) < 0.01
        renewed = await store.renew(lease, 100 * DAY)
        assert renewed is not None
        assert abs(renewed.remaining - 100 * DAY) < 0.01


@pytest.mark.parametrize("held", ["locked", "changed"])
async def test_no_lease_is_granted_that_is_partly_spent_by_waiting_for_its_row(
    held: str, store: PostgresStore, postgres_url: str
) -> None:
    await store.release(await store.acquire("lock:cart", "before", 60.0))
    async with stranger(postgres_url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        if held == "locked":
            await connection.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
        else:
            await connection.execute(f"UPDATE {TABLE} SET data = data")
        asked = [asyncio.create_task(store.acquire("lock:cart", f"h{number}", 1.0)) for number in range(4)]
        await asyncio.sleep(1.1)
        assert not any(task.done() for task in asked)
        await transaction.commit()
    answers = await asyncio.gather(*asked)
    granted = [answer for number, answer in enumerate(answers) if answer.granted_to(f"h{number}")]
    assert len(granted) == 1
    assert granted[0].remaining > 0.8
    assert {answer.holder for answer in answers} == {granted[0].holder}


@pytest.mark.parametrize("operation", ["renew", "renew_many"])
async def test_a_renewal_that_waited_for_its_row_is_judged_when_it_got_it(
    operation: str, store: PostgresStore, postgres_url: str
) -> None:
    short, long = [await store.acquire(f"lock:{name}", "a", ttl) for name, ttl in (("short", 0.3), ("long", 60.0))]
    async with stranger(postgres_url) as connection, connection.transaction():
        await connection.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
        if operation == "renew":
            renewals = [asyncio.create_task(store.renew(lease, 90.0)) for lease in (short, long)]
        else:
            renewals = [asyncio.create_task(survivor(store, lease, 90.0)) for lease in (short, long)]
        await asyncio.sleep(0.5)
        await connection.execute("SELECT 1")
    lost, kept = await asyncio.gather(*renewals)
    assert lost is None
    assert kept is not None
    assert kept.remaining > 89.5


async def survivor(store: PostgresStore, lease: Lease, ttl: float) -> Lease | None:
    """The lease after it was renewed with others."""
    survivors = await store.renew_many([(lease, ttl)])
    return survivors[0] if survivors else None


async def test_one_locked_row_does_not_keep_the_others_from_being_renewed(
    store: PostgresStore, postgres_url: str
) -> None:
    leases = [await store.acquire(f"lock:{number}", "a", 60.0) for number in range(5)]
    async with stranger(postgres_url) as connection, connection.transaction():
        await connection.execute(f"SELECT 1 FROM {TABLE} WHERE name = 'lock:2' FOR UPDATE")
        renewal = asyncio.create_task(store.renew_many([(lease, 90.0) for lease in leases]))
        await asyncio.sleep(0.3)
        expiries = await connection.fetch(
            f"SELECT name FROM {TABLE} WHERE expires_at > clock_timestamp() + interval '80 s' ORDER BY name"
        )
        assert [row["name"] for row in expiries] == ["lock:0", "lock:1", "lock:3", "lock:4"]
    assert len(await renewal) == 5


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("before", ["free", "held", "own"])
async def test_what_changes_while_a_request_waits_for_its_row_is_what_counts(
    before: str, waiting: bool, store: PostgresStore, postgres_url: str
) -> None:
    lease = await store.acquire("lock:cart", "me" if before == "own" else "before", 60.0)
    if before == "free":
        await store.release(lease)
    async with stranger(postgres_url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            f"UPDATE {TABLE} SET holder = 'other', fence = fence + 1, expires_at = clock_timestamp() + interval '90 s'"
        )
        asked = asyncio.create_task(store.acquire("lock:cart", "me", 60.0, waiting=waiting))
        await asyncio.sleep(0.3)
        await transaction.commit()
    refused = await asked
    if before == "held" and not waiting:
        assert refused.holder in ("before", "other")  # it needed no row to be refused
    else:
        assert (refused.holder, refused.fence, refused.live) == ("other", lease.fence + 1, True)
    assert (await mark_of(postgres_url, "lock:cart") != "") is waiting


@pytest.mark.parametrize("waiting", [False, True])
async def test_what_is_set_free_while_a_request_waits_for_its_row_is_granted(
    waiting: bool, store: PostgresStore, postgres_url: str
) -> None:
    lease = await store.acquire("lock:cart", "before", 60.0)
    async with stranger(postgres_url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(f"UPDATE {TABLE} SET holder = '', expires_at = clock_timestamp()")
        asked = asyncio.create_task(store.acquire("lock:cart", "me", 60.0, waiting=waiting))
        await asyncio.sleep(0.3)
        await transaction.commit()
    answer = await asked
    if waiting:  # or else it would sleep, and nobody would tell it
        assert (answer.holder, answer.fence) == ("me", lease.fence + 1)
    else:
        assert answer.holder in ("before", "me")


# Sessions


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_any_default_isolation_will_do(isolation: str, postgres_url: str) -> None:
    url = with_settings(postgres_url, default_transaction_isolation=isolation, default_transaction_deferrable="on")
    async with PostgresStore(url) as first, PostgresStore(url) as second:
        stores = (first, second)
        for turn in range(5):
            name = f"lock:{turn % 2}"
            answers = await asyncio.gather(
                *(stores[n % 2].acquire(name, f"h{n}", 60.0, waiting=n > 5) for n in range(16))
            )
            granted = [answer for n, answer in enumerate(answers) if answer.granted_to(f"h{n}")]
            assert len(granted) == 1
            renewed = await asyncio.gather(*(stores[n % 2].renew(granted[0], 60.0) for n in range(8)))
            assert all(lease is not None for lease in renewed)
            released = await asyncio.gather(*(stores[n % 2].release(granted[0]) for n in range(8)))
            assert sum(released) == 1


async def test_a_row_that_stays_locked_ends_the_call_in_time(postgres_url: str) -> None:
    async with PostgresStore(postgres_url, command_timeout=0.5) as store:
        lease = await store.acquire("lock:cart", "a", 60.0)
        async with stranger(postgres_url) as connection, connection.transaction():
            await connection.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await store.acquire("lock:cart", "a", 60.0)
            with pytest.raises(TimeoutError):
                await store.release(lease)
            assert time.monotonic() - began < 4.0
            # The statements are ended on the server too, which would carry them out as soon as it can.
            while await fetchval(postgres_url, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                assert time.monotonic() - began < 10.0
        assert await store.release(lease)


async def test_the_servers_own_limits_are_told_apart(postgres_url: str) -> None:
    async with PostgresStore(postgres_url) as plain:
        await plain.acquire("lock:cart", "a", 60.0)
    for setting, text in (("statement_timeout", "ended the statement"), ("lock_timeout", "could not lock the row")):
        async with (
            PostgresStore(with_settings(postgres_url, **{setting: "300"})) as store,
            stranger(postgres_url) as connection,
            connection.transaction(),
        ):
            await connection.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            with pytest.raises(BackendUnavailableError, match=text):
                await store.acquire("lock:cart", "a", 60.0)


async def test_what_is_read_and_written_needs_one_statement_each(postgres_url: str) -> None:
    wanted = "SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database WHERE datname = current_database()"
    others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    async with stranger(postgres_url) as connection:
        before = await connection.fetchval(wanted)
        async with PostgresStore(postgres_url) as store:
            for _ in range(50):
                lease = await store.acquire("lock:cart", "a", 60.0)
                await store.release(lease)
        async with asyncio.timeout(20.0):
            while await connection.fetch(others):  # a session sends its statistics when it ends, if not before
                await asyncio.sleep(0.01)
        # Some more are those of opening it; two statements for each would be twice as many.
        assert 100 <= await connection.fetchval(wanted) - before <= 150


# Fences


async def test_a_fence_begins_at_the_servers_time(store: PostgresStore) -> None:
    lease = await store.acquire("lock:new", "a", 60.0)
    assert abs(lease.fence / 1e6 - time.time()) < 30.0


async def test_a_record_that_is_gone_never_repeats_a_fence(store: PostgresStore, postgres_url: str) -> None:
    fences = []
    for _ in range(3):
        for _ in range(3):
            lease = await store.acquire("lock:cart", "a", 60.0)
            fences.append(lease.fence)
            await store.release(lease)
        await store.acquire("lock:cart", "lost", 60.0)
        async with stranger(postgres_url) as connection:
            await connection.execute(f"DELETE FROM {TABLE}")
        assert await store.renew(lease, 60.0) is None
    assert fences == sorted(set(fences))


async def test_a_record_of_another_start_of_the_server_continues_from_the_clock(
    store: PostgresStore, postgres_url: str
) -> None:
    lease = await store.acquire("lock:cart", "a", 60.0)
    await store.release(lease)
    async with stranger(postgres_url) as connection:
        # As after a fail-over that lost the last grants.
        await connection.execute(f"UPDATE {TABLE} SET fence = 7, incarnation = incarnation - interval '1 day'")
        first = await store.acquire("lock:cart", "a", 60.0)
        assert first.fence > lease.fence
        # One that is held goes on under its fence, and does not forget where it came from.
        await connection.execute(f"UPDATE {TABLE} SET fence = 7, incarnation = incarnation - interval '1 day'")
        held = await store.acquire("lock:cart", "a", 60.0)
        assert held.fence == 7
        assert await store.renew(held, 60.0) is not None
        assert await store.release(held)
        assert (await store.acquire("lock:cart", "a", 60.0)).fence > first.fence


# Waiters


async def test_a_mark_is_set_kept_and_widened(store: PostgresStore, other: PostgresStore, postgres_url: str) -> None:
    name = "lock:cart"
    lease = await store.acquire(name, "a", 60.0)
    await other.acquire(name, "b", 60.0)
    assert await mark_of(postgres_url, name) == ""
    await other.acquire(name, "b", 60.0, waiting=True)
    theirs = await mark_of(postgres_url, name)
    assert len(theirs) == 16
    before = await fetchval(postgres_url, f"SELECT xmin::text FROM {TABLE}")
    assert (await other.acquire(name, "b", 60.0, waiting=True)).granted_to("a")
    assert await fetchval(postgres_url, f"SELECT xmin::text FROM {TABLE}") == before  # nothing was written
    await store.acquire(name, "c", 60.0, waiting=True)
    assert await mark_of(postgres_url, name) == "*"
    assert (await store.acquire(name, "a", 60.0)).waited
    assert await store.release(lease)
    assert (await other.acquire(name, "b", 60.0)).waited
    async with stranger(postgres_url) as connection:
        await connection.execute(f"UPDATE {TABLE} SET waited_at = waited_at - interval '13 s'")
    assert not (await other.acquire(name, "b", 60.0)).waited


async def test_a_grant_clears_ones_own_mark_only(store: PostgresStore, other: PostgresStore, postgres_url: str) -> None:
    name = "lock:cart"
    lease = await store.acquire(name, "a", 60.0)
    await other.acquire(name, "b", 60.0, waiting=True)
    await store.release(lease)
    again = await store.acquire(name, "a", 60.0)
    assert again.waited
    await store.release(again)
    assert not (await other.acquire(name, "b", 60.0)).waited
    assert await mark_of(postgres_url, name) == ""


async def test_a_message_is_sent_only_when_another_process_waits(
    store: PostgresStore, other: PostgresStore, postgres_url: str
) -> None:
    heard: list[str] = []
    channel = store._statements.channel
    async with stranger(postgres_url) as connection:
        await connection.add_listener(channel, lambda *args: heard.append(args[3]))

        async def after(operation: Any) -> int:
            heard.clear()
            await operation
            await asyncio.sleep(0.1)
            return len([topic for topic in heard if not topic.startswith("self:")])

        lease = await store.acquire("lock:cart", "a", 60.0)
        assert await after(store.release(lease)) == 0
        lease = await store.acquire("lock:cart", "a", 60.0)
        await store.acquire("lock:cart", "b", 60.0, waiting=True)
        assert await after(store.release(lease)) == 0  # it was this process, which was told already
        lease = await store.acquire("lock:cart", "a", 60.0)
        await other.acquire("lock:cart", "b", 60.0, waiting=True)
        assert await after(store.renew(lease, 90.0)) == 0
        assert await after(store.renew(lease, 60.0)) == 1
        assert await after(store.release(lease)) == 1
        await connection.remove_listener(channel, lambda *args: None)


async def test_a_queue_of_messages_that_is_full_fails_no_release(
    store: PostgresStore, other: PostgresStore, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await store.acquire("lock:cart", "a", 60.0)
    await other.acquire("lock:cart", "b", 60.0, waiting=True)
    async with stranger(postgres_url) as connection:
        await connection.execute(
            "CREATE FUNCTION public.queue() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN IF NEW.holder = '' AND current_query() LIKE '%pg_notify%' THEN "
            "RAISE 'too many notifications' USING ERRCODE = '54000'; END IF; RETURN NEW; END $$"
        )
        await connection.execute(
            f"CREATE TRIGGER queue BEFORE UPDATE ON {TABLE} FOR EACH ROW EXECUTE FUNCTION public.queue()"
        )
    assert await store.release(lease)
    assert (await store.acquire("lock:cart", "b", 60.0)).granted_to("b")
    assert "cannot send messages" in caplog.text


# Retention


async def test_old_free_locks_are_dropped_and_nothing_else(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "SWEEP_INTERVAL", 0.0)
    monkeypatch.setattr(sweeper, "SWEEP_PAUSE", 0.0)
    async with PostgresStore(postgres_url) as store, stranger(postgres_url) as connection:
        names = [f"lock:{number:05d}" for number in range(1200)]
        kept = ["leader:main", "schedule:report", "lock:data", "lock:held", "tasklock:young"]
        for name in [names[0], "tasklock:old", "process:killed", "break:lock:a", *kept]:
            data = {"k": "1"} if name in ("lock:data", "process:killed", "break:lock:a") else None
            lease = await store.acquire(name, "a", 3600.0, data=data)
            if name != "lock:held":
                await store.release(lease)
        await connection.execute(
            f"INSERT INTO {TABLE} SELECT namespace, 'lock:' || lpad(n::text, 5, '0'), holder, fence, transitions, "
            f"acquired_at, renewed_at, expires_at, incarnation, data, waiter, waited_at "
            f"FROM {TABLE}, generate_series(1, 1199) AS n WHERE name = 'lock:00000'"
        )
        await connection.execute(
            f"UPDATE {TABLE} SET renewed_at = renewed_at - interval '8 days' WHERE name <> 'tasklock:young'"
        )
        await store.acquire("lock:expired", "a", 0.001)
        await connection.execute(
            f"UPDATE {TABLE} SET renewed_at = renewed_at - interval '8 days' WHERE name = 'lock:expired'"
        )
        last = await store.read(names[-1])
        assert last is not None
        await store.acquire("lock:now", "a", 60.0)

        async def left() -> list[str]:
            return [lease.name async for lease in store.scan()]

        until = time.monotonic() + 10.0
        while len(found := await left()) > len(kept) + 1:
            assert time.monotonic() < until, found
            await store.acquire("lock:now", "a", 60.0)
            await asyncio.sleep(0.05)
        assert sorted(found) == sorted([*kept, "lock:now"])
        assert (await store.acquire(names[-1], "a", 60.0)).fence > last.fence


async def test_closing_vacates_what_expired_and_marks_it_as_such(postgres_url: str) -> None:
    async with PostgresStore(postgres_url) as store:
        await store.acquire("lock:cart", "a", 0.01)
        await asyncio.sleep(0.05)
    async with stranger(postgres_url) as connection:
        row = await connection.fetchrow(f"SELECT holder, expires_at = 'epoch' AS never FROM {TABLE}")
        assert tuple(row) == ("", True)


# Connections


async def test_a_pool_of_the_application_is_used_as_it_is(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=2, max_queries=1) as pool:
        provider = PostgresProvider.from_pool(pool)
        assert (provider.safe_url, provider.store.is_open) == ("postgresql://", False)
        async with provider, provider.lock() as backend:
            lock = Lock("cart", backend=backend, lease_duration=60, retry_interval=0.05)
            other = Lock("cart", backend=backend, lease_duration=60, retry_interval=0.05)
            async with lock:
                waiting = asyncio.create_task(other.acquire(timeout=20))
                for _ in range(40):
                    async with pool.acquire() as connection:
                        await connection.execute("SELECT 1")
                assert await lock.owned()
            handle = await waiting
            await handle.release()
        assert pool.get_idle_size() <= 2
        assert (await pool.fetchval("SELECT 1")) == 1
    assert caplog.text.count("waiters poll, since hints need a connection") == 1


async def test_a_pool_with_listen_url_wakes_waiters(postgres_url: str, store: PostgresStore) -> None:
    async with (
        asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool,
        PostgresStore(pool=pool, listen_url=postgres_url) as borrowed,
        borrowed.watch("lock:cart") as waiter,
    ):
        assert waiter.pushes
        lease = await store.acquire("lock:cart", "a", 60.0)
        await borrowed.acquire("lock:cart", "b", 60.0, waiting=True)
        await store.release(lease)
        assert await asyncio.wait_for(waiter.wait(20.0), 10.0)


async def test_an_exhausted_pool_is_named_and_renewals_go_on(postgres_url: str) -> None:
    async with (
        asyncpg.create_pool(postgres_url, min_size=0, max_size=3) as pool,
        PostgresStore(pool=pool, listen_url=postgres_url, command_timeout=0.5) as store,
    ):
        lease = await store.acquire("lock:cart", "a", 60.0)
        taken = [await pool.acquire() for _ in range(3)]
        began = time.monotonic()
        with pytest.raises(
            BackendUnavailableError, match=r"the pool lent no connection within 0\.\d s: make it larger"
        ):
            await store.acquire("lock:other", "a", 60.0)
        assert time.monotonic() - began < 3.0
        assert await store.renew(lease, 90.0) is not None
        assert len(await store.renew_many([(lease, 90.0)])) == 1
        for connection in taken:
            await pool.release(connection)
        assert await store.release(lease)


async def test_own_connections_that_are_all_busy_are_named_and_renewals_go_on(postgres_url: str) -> None:
    async with PostgresStore(postgres_url, command_timeout=1.2) as store:
        kept = await store.acquire("lock:kept", "a", 60.0)
        await store.acquire("lock:cart", "a", 60.0)
        async with stranger(postgres_url) as connection, connection.transaction():
            await connection.execute(f"SELECT 1 FROM {TABLE} WHERE name = 'lock:cart' FOR UPDATE")
            stuck = [asyncio.create_task(store.acquire("lock:cart", "a", 60.0)) for _ in range(5)]
            await asyncio.sleep(0.3)
            late = asyncio.create_task(store.acquire("lock:other", "a", 60.0))
            assert await store.renew(kept, 90.0) is not None
            assert await fetchval(postgres_url, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
            done = await asyncio.gather(*stuck, late, return_exceptions=True)
        assert all(isinstance(error, TimeoutError) for error in done[:5])
        # It may have got one of those that were given up in the last moment.
        assert isinstance(done[5], Lease) or "none of the 5 connections for requests became free" in str(done[5])
        assert (await store.acquire("lock:other", "a", 60.0)).live


async def test_a_pool_that_is_not_open_is_an_error_that_says_so(postgres_url: str) -> None:
    pool = asyncpg.create_pool(postgres_url)
    with pytest.raises(BackendUnavailableError, match="open it before the store, and close it after"):
        await PostgresProvider.from_pool(pool).check()


async def test_a_connection_that_was_idle_for_long_is_tried_first(
    store: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.acquire("lock:cart", "a", 60.0)
    monkeypatch.setattr("grelmicro.backends.postgres.connections.IDLE", 0.0)
    for _ in range(3):
        assert (await store.acquire("lock:cart", "a", 60.0)).live


async def test_it_serves_one_loop_after_another(postgres_url: str) -> None:
    provider = PostgresProvider(postgres_url)

    async def use() -> int:
        async with provider, provider.lock() as backend, Lock("cart", backend=backend) as held:
            return held.fencing_token

    first = await asyncio.to_thread(asyncio.run, use())
    assert await asyncio.to_thread(asyncio.run, use()) == first + 1
    assert await use() == first + 2


async def test_a_closed_store_says_so(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = PostgresStore(postgres_url)
    with pytest.raises(OutOfContextError, match="PostgresStore is not open"):
        await store.read("lock:cart")
    async with store:
        lease = await store.acquire("lock:cart", "s3cret-holder", 60.0)
        await store.release(lease)
    with pytest.raises(OutOfContextError, match="PostgresStore is not open"):
        await store.release(lease)
    assert "s3cret-holder" not in caplog.text
