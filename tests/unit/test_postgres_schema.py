"""The table in PostgreSQL: made once, found by everybody, and never taken for another one."""

import asyncio
from uuid import uuid4

import pytest

from grelmicro.backends.postgres import PostgresProvider, PostgresStore
from grelmicro.errors import BackendUnavailableError, SettingsValidationError
from tests.helpers.postgres import TABLE, as_role, fetchval, role, stranger, with_settings
from tests.servers.fixtures import StartPostgres
from tests.servers.postgres import execute

TABLES = "SELECT array_agg(schemaname ORDER BY schemaname) FROM pg_tables WHERE tablename = 'grelmicro_leases'"


@pytest.fixture
def name() -> str:
    """A role that no other test uses."""
    return f"role_{uuid4().hex[:12]}"


async def test_without_auto_migrate_the_error_gives_the_sql_that_makes_it(every_postgres_url: str) -> None:
    provider = PostgresProvider(every_postgres_url, auto_migrate=False)
    with pytest.raises(SettingsValidationError, match="auto_migrate is off and the table") as refused:
        await provider.check()
    assert provider.table_sql in str(refused.value)
    assert await fetchval(every_postgres_url, TABLES) is None
    await execute(every_postgres_url, provider.table_sql)
    await provider.check()
    await PostgresProvider(every_postgres_url).check()


async def test_sessions_with_any_search_path_share_one_table(postgres_url: str) -> None:
    await execute(
        postgres_url,
        "CREATE SCHEMA evil",
        "CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql RETURN timestamptz 'infinity'",
        "CREATE FUNCTION evil.date_part(text, timestamptz) RETURNS float8 LANGUAGE sql RETURN 0.0::float8",
        "CREATE TABLE evil.grelmicro_leases (name text)",
    )
    hostile = with_settings(postgres_url, search_path="evil, pg_catalog")
    empty = with_settings(postgres_url, search_path="")
    async with PostgresStore(hostile) as first, PostgresStore(postgres_url) as second, PostgresStore(empty) as third:
        held = await first.acquire("lock:cart", "a", 60.0)
        assert 59.0 < held.remaining <= 60.0
        for store in (second, third):
            refused = await store.acquire("lock:cart", "b", 60.0)
            assert (refused.holder, refused.fence) == ("a", held.fence)
        renewed = await third.renew_many([(held, 30.0)])
        assert [lease.fence for lease in renewed] == [held.fence]
        assert await second.release(held)
        assert [lease.name async for lease in first.scan()] == ["lock:cart"]
    assert await fetchval(postgres_url, TABLES) == ["evil", "public"]


async def test_the_table_can_be_in_another_schema(postgres_url: str) -> None:
    with pytest.raises(SettingsValidationError, match='there is no schema Sh"op: name another one with schema='):
        await PostgresProvider(postgres_url, schema='Sh"op').check()
    await execute(postgres_url, 'CREATE SCHEMA "Sh""op"')
    async with PostgresStore(postgres_url, schema='Sh"op') as store, PostgresStore(postgres_url) as other:
        assert (await store.acquire("lock:cart", "a", 60.0)).granted_to("a")
        assert (await other.acquire("lock:cart", "b", 60.0)).granted_to("b")
    assert await fetchval(postgres_url, TABLES) == ['Sh"op', "public"]


async def test_a_role_that_may_not_make_tables_uses_the_one_that_is_there(postgres_url: str, name: str) -> None:
    async with PostgresStore(postgres_url):
        pass
    async with (
        role(postgres_url, name, "USAGE ON SCHEMA public", f"SELECT, INSERT, UPDATE, DELETE ON {TABLE}") as url,
        PostgresStore(url) as store,
    ):
        lease = await store.acquire("lock:cart", "a", 60.0)
        assert await store.renew(lease, 60.0) is not None
        assert await store.release(lease)


async def test_a_role_that_may_not_make_tables_is_told_what_to_do(postgres_url: str, name: str) -> None:
    await execute(postgres_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    async with role(postgres_url, name, "USAGE ON SCHEMA public") as url:
        with pytest.raises(SettingsValidationError, match="the role may not create tables in schema public") as refused:
            await PostgresProvider(url).check()
        assert PostgresProvider(url).table_sql in str(refused.value)


async def test_a_role_without_rights_on_the_table_is_told_which(postgres_url: str, name: str) -> None:
    async with PostgresStore(postgres_url):
        pass
    async with (
        role(postgres_url, name, "USAGE ON SCHEMA public", f"SELECT ON {TABLE}") as url,
        PostgresStore(url) as store,
    ):
        assert await store.read("lock:cart") is None
        with pytest.raises(BackendUnavailableError, match="GRANT SELECT, INSERT, UPDATE, DELETE on the table"):
            await store.acquire("lock:cart", "a", 60.0)


@pytest.mark.parametrize(
    "sql",
    [
        f"CREATE TABLE {TABLE} (name text PRIMARY KEY, token text)",
        f"CREATE VIEW {TABLE} AS SELECT 1 AS one",
        "{own}; ALTER TABLE " + TABLE + " ADD COLUMN more text",
        "{own}; ALTER TABLE " + TABLE + " ALTER COLUMN fence TYPE int",
    ],
)
async def test_a_table_of_something_else_is_refused_and_left_alone(sql: str, postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    await execute(postgres_url, sql.format(own=store.table_sql))
    with pytest.raises((SettingsValidationError, BackendUnavailableError), match="grelmicro_leases"):
        await store.__aenter__()
    assert not store.is_open


async def test_a_table_that_is_dropped_meanwhile_is_an_error_and_can_be_made_again(postgres_url: str) -> None:
    async with PostgresStore(postgres_url) as store:
        await store.acquire("lock:cart", "a", 60.0)
        await execute(postgres_url, f"DROP TABLE {TABLE}")
        with pytest.raises(BackendUnavailableError, match="the table of leases is gone"):
            await store.acquire("lock:cart", "b", 60.0)
        await execute(postgres_url, store.table_sql)
        assert (await store.acquire("lock:cart", "b", 60.0)).granted_to("b")


async def test_a_changed_table_does_not_disturb_prepared_statements(postgres_url: str) -> None:
    async with PostgresStore(postgres_url) as store:
        for _ in range(6):  # until the server keeps its plans
            await store.release(await store.acquire("lock:cart", "a", 60.0))
        await execute(postgres_url, f"ALTER TABLE {TABLE} ALTER COLUMN holder TYPE varchar(500)")
        lease = await store.acquire("lock:cart", "a", 60.0)
        assert lease.granted_to("a")
        assert await store.release(lease)


async def test_a_database_in_another_encoding_holds_what_it_can(postgres_url: str) -> None:
    other = f"latin_{uuid4().hex[:12]}"
    await execute(postgres_url, f"CREATE DATABASE {other} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = postgres_url.rpartition("/")[0] + "/" + other
    try:
        async with PostgresStore(url) as store:
            lease = await store.acquire("lock:é", "a", 60.0, data={"k": "日本語\0"})
            assert dict(lease.data) == {"k": "日本語\0"}
            with pytest.raises(BackendUnavailableError, match="choose a database in UTF8"):
                await store.acquire("lock:日本語", "a", 60.0)
            for name in ("lock:\udc80", "lock:\0"):
                with pytest.raises(BackendUnavailableError, match="cannot have|cannot be stored") as refused:
                    await store.acquire(name, "s3cret", 60.0)
                assert "s3cret" not in str(refused.value)
            assert (await store.acquire("lock:é", "b", 60.0)).granted_to("a")
    finally:
        await execute(postgres_url, f"DROP DATABASE {other} WITH (FORCE)")


async def test_a_standby_is_refused_when_it_is_opened_and_named_when_it_becomes_one(
    start_postgres: StartPostgres,
) -> None:
    server = start_postgres()
    async with PostgresStore(server.url) as store:
        lease = await store.acquire("lock:cart", "a", 60.0)
        await execute(server.url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
        await asyncio.sleep(0.3)
        with pytest.raises(BackendUnavailableError, match="takes no writes now .*: connect to the primary"):
            await store.acquire("lock:other", "a", 60.0)
        with pytest.raises(BackendUnavailableError, match="takes no writes"):
            await store.release(lease)
        with pytest.raises(BackendUnavailableError, match="takes no writes"):
            await PostgresProvider(server.url).check()
        await execute(
            with_settings(server.url, default_transaction_read_only="off"),
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )
        await asyncio.sleep(0.3)
        assert await store.release(lease)
    await asyncio.to_thread(server.stop)
    (server.data / "standby.signal").touch()
    await asyncio.to_thread(server.start)
    with pytest.raises(BackendUnavailableError, match="takes no writes"):
        await PostgresProvider(server.url).check()


async def test_namespaces_share_the_table_and_nothing_else(postgres_url: str) -> None:
    async with PostgresStore(postgres_url, namespace="shop") as shop, PostgresStore(postgres_url) as other:
        await shop.acquire("lock:cart", "a", 60.0)
        assert (await other.acquire("lock:cart", "b", 60.0)).granted_to("b")
        assert [lease.holder async for lease in shop.scan()] == ["a"]
        async with other.watch("lock:cart") as waiter:
            lease = await shop.acquire("lock:cart", "a", 60.0)
            await other.acquire("lock:cart", "c", 60.0, waiting=True)
            await shop.release(lease)
            assert not await waiter.wait(0.3)
    async with stranger(postgres_url) as connection:
        rows = await connection.fetch(f"SELECT namespace, holder FROM {TABLE} ORDER BY 1")
        assert [tuple(row) for row in rows] == [("grelmicro", "b"), ("shop", "")]


async def test_the_wrong_database_or_role_is_named(postgres_url: str) -> None:
    with pytest.raises(BackendUnavailableError, match="the database does not exist: check its name"):
        await PostgresProvider(postgres_url.rpartition("/")[0] + "/nowhere").check()
    with pytest.raises(BackendUnavailableError, match="does not let this role in"):
        await PostgresProvider(as_role(postgres_url, "nobody_here")).check()
    with pytest.raises(BackendUnavailableError, match="cannot be reached"):
        await PostgresProvider("postgresql://127.0.0.1:1/x").check()
