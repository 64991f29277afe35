"""Where PostgreSQL is: URLs, the host form, the environment; nothing misread, and no secret shown."""

import asyncio
import traceback
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import asyncpg
import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.backends.postgres.url import Settings, limit_of, parse
from grelmicro.coordination import Coordination
from grelmicro.errors import BackendUnavailableError, SettingsValidationError
from grelmicro.providers.postgres import PostgresProvider
from tests.servers.fixtures import Outside, StartPostgres
from tests.servers.postgres import PostgresServer, execute, fresh_database

PASSWORD = "p@ss/w:o#r?d %41&="

ENVIRONMENT = ("URL", "HOST", "PORT", "DB", "DATABASE", "USER", "PASSWORD", "COMMAND_TIMEOUT", "LISTEN_URL")


@pytest.fixture(scope="module")
def postgres_url(postgres_server: PostgresServer | Outside) -> Iterator[str]:
    """A new database, for all tests here: what they look for is how it is found, and not what is in it."""
    with fresh_database(postgres_server.url) as url:
        yield url


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, postgres_url: str) -> None:
    """The environment says nothing, but to the fixtures."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"POSTGRES_{name}", raising=False)


@pytest.mark.parametrize(
    "scheme", ["postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg", "POSTGRESQL", "Postgres+Asyncpg"]
)
async def test_every_usual_scheme_connects(scheme: str, postgres_url: str) -> None:
    async with PostgresProvider(scheme + postgres_url.removeprefix("postgresql")) as provider:
        await provider.check()


async def test_options_of_sqlalchemy_are_understood_or_left_out(postgres_url: str) -> None:
    async with PostgresProvider(postgres_url + "?ssl=disable&prepared_statement_cache_size=0") as provider:
        await provider.check()


async def test_options_of_the_server_reach_it(postgres_url: str) -> None:
    async with PostgresStore(postgres_url + "?application_name=shop%20one"):
        connection = await asyncpg.connect(postgres_url)
        assert (
            await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'shop one'") > 0
        )
        await connection.close()


async def test_connect_timeout_is_for_connecting(postgres_url: str) -> None:
    async with PostgresProvider(postgres_url + "?connect_timeout=30") as provider:
        await provider.check()
    assert parse("postgresql://db/shop?connect_timeout=3").connect_timeout == 3
    assert parse("postgresql://db/shop?connect_timeout=0").connect_timeout == float("inf")
    with pytest.raises(SettingsValidationError, match="connect_timeout that is not a whole number"):
        parse("postgresql://db/shop?connect_timeout=soon")


async def test_a_server_that_is_silent_is_given_up_after_connect_timeout() -> None:
    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(be_silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        store = PostgresStore(
            f"postgresql://127.0.0.1:{port}/shop?connect_timeout=1&sslmode=disable", command_timeout=300
        )
        async with asyncio.timeout(60):
            with pytest.raises(BackendUnavailableError):
                await store.open()


async def test_the_whole_application_on_one_url(postgres_url: str) -> None:
    url = postgres_url + "?schema=public&namespace=shop"
    async with Coordination.from_url(url) as coordination, coordination.lock("cart") as held:
        assert held.fencing_token > 0
    connection = await asyncpg.connect(postgres_url)
    found = await connection.fetchval("SELECT namespace FROM public.grelmicro_leases WHERE name = 'lock:cart'")
    assert found == "shop"
    await connection.close()


async def test_any_password_arrives_whole_and_is_not_shown(
    start_postgres: StartPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_postgres()
    user = "o'neill@shop"
    await execute(server.url, f"CREATE ROLE \"{user}\" SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
    rules = server.data / "pg_hba.conf"
    rules.write_text(rules.read_text().replace("trust", "scram-sha-256"))
    await asyncio.to_thread(server.restart)
    place = f"127.0.0.1:{server.port}/postgres"
    full = f"postgresql://{quote(user, safe='')}:{quote(PASSWORD, safe='')}@{place}"
    providers = [
        PostgresProvider(full),
        PostgresProvider(f"postgresql://{quote(user, safe='')}@{place}", password=PASSWORD),
        PostgresProvider(host="127.0.0.1", port=server.port, database="postgres", user=user, password=PASSWORD),
    ]
    monkeypatch.setenv("POSTGRES_PASSWORD", PASSWORD)
    monkeypatch.setenv("POSTGRES_URL", full)
    providers.append(PostgresProvider())
    monkeypatch.delenv("POSTGRES_URL")
    for name, value in (("HOST", "127.0.0.1"), ("PORT", str(server.port)), ("DB", "postgres"), ("USER", user)):
        monkeypatch.setenv(f"POSTGRES_{name}", value)
    providers.append(PostgresProvider())
    for provider in providers:
        async with provider:
            await provider.check()
        for shown in (provider.safe_url, repr(provider), repr(provider.store.address)):
            assert not any(secret in shown for secret in (PASSWORD, quote(PASSWORD, safe=""), "p@ss", "o#r", "%41"))
        parts = urlsplit(provider.safe_url)
        assert (parts.hostname, parts.port, parts.password) == ("127.0.0.1", server.port, None)
    wrong = PostgresProvider(host="127.0.0.1", port=server.port, database="postgres", user=user, password="wr0ng")
    with pytest.raises(BackendUnavailableError, match="does not accept user and password: check both") as refused:
        await wrong.check()
    assert "wr0ng" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:p@ss@host/db",
        "postgresql://me:s3cret/w@host/db",
        "postgresql://me:s3cret#w@host/db",
        "postgresql://me:s3cret?w@host/db",
        "postgresql://me:5?s3cret@host/db",
        "postgresql://me:x@host:s3cret/db",
        "postgresql://me:x@host:0/db",
        "postgresql://me:x@host:99999/db",
        "postgresql://me:x@[::1/s3cret",
        "postgresql://",
        "mysql://me:s3cret@host/db",
        "s3cret",
        "",
    ],
)
def test_a_url_that_is_easily_misread_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(SettingsValidationError, match=r"^PostgreSQL: url .* [Ii]ts form is postgresql://") as refused:
        PostgresProvider(url)
    shown = "".join(traceback.format_exception(refused.value))
    assert "s3cret" not in shown
    assert "p@ss" not in shown


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("postgresql://me:s3cret@host:5433/db?sslmode=require&password=s3cret", "postgresql://me@host:5433/db"),
        ("postgres://a,b:5433/db?target_session_attrs=read-write", "postgresql://a,b:5433/db"),
        ("postgresql://[::1]:5432/db", "postgresql://[::1]:5432/db"),
        ("postgresql:///db?host=/run/postgresql", "postgresql:///db"),
    ],
)
def test_the_safe_url_says_where_and_who(url: str, safe: str) -> None:
    assert parse(url).safe_url == safe
    assert "s3cret" not in repr(parse(url))


async def test_a_server_is_found_by_its_socket(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    for provider in (
        PostgresProvider(server.socket_url),
        PostgresProvider(host=str(server.folder), port=server.port, database="postgres", user="postgres"),
    ):
        async with provider:
            await provider.check()


def test_the_environment_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsValidationError, match="POSTGRES_URL or POSTGRES_HOST"):
        PostgresProvider()
    monkeypatch.setenv("POSTGRES_HOST", "db.internal")
    monkeypatch.setenv("POSTGRES_DATABASE", "shop")
    assert PostgresProvider().safe_url == "postgresql://db.internal:5432/shop"
    monkeypatch.setenv("POSTGRES_PORT", "x")
    with pytest.raises(SettingsValidationError, match="port should be a number from 1 to 65535"):
        PostgresProvider()
    monkeypatch.setenv("POSTGRES_URL", "postgresql://db.other/shop")
    with pytest.raises(SettingsValidationError, match="url and host are both given"):
        PostgresProvider()
    assert PostgresProvider("postgresql://mine/shop").safe_url == "postgresql://mine/shop"  # it asks for no more
    monkeypatch.delenv("POSTGRES_HOST")
    assert PostgresProvider().safe_url == "postgresql://db.other/shop"


async def test_two_answers_to_one_question_are_refused() -> None:
    with pytest.raises(SettingsValidationError, match="url and host are both given"):
        PostgresProvider("postgresql://a/b", host="c")
    with pytest.raises(SettingsValidationError, match="another one is set on its own") as refused:
        PostgresProvider("postgresql://me:one@a/b", password="two")
    assert "one@" not in str(refused.value)
    with pytest.raises(SettingsValidationError, match="pool and url are both given"):
        PostgresStore("postgresql://a/b", pool=asyncpg.create_pool("postgresql://a/b"))


def test_the_limit_of_a_request_has_its_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_of(None) == 5.0
    monkeypatch.setenv("POSTGRES_COMMAND_TIMEOUT", "2.5")
    assert (limit_of(None), limit_of(1)) == (2.5, 1.0)
    monkeypatch.setenv("POSTGRES_COMMAND_TIMEOUT", "")
    assert limit_of(None) == 5.0, "empty is not set"
    for text in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("POSTGRES_COMMAND_TIMEOUT", text)
        with pytest.raises(SettingsValidationError, match="POSTGRES_COMMAND_TIMEOUT should be a number of seconds"):
            PostgresProvider("postgresql://a/b")
    with pytest.raises(SettingsValidationError, match="command_timeout should be a number of seconds"):
        PostgresProvider("postgresql://a/b", command_timeout=0)


@pytest.mark.parametrize("schema", ["", "x" * 64, "a\nb"])
def test_a_schema_that_cannot_exist_is_refused(schema: str) -> None:
    with pytest.raises(SettingsValidationError, match="schema should be the name of a schema"):
        PostgresProvider("postgresql://a/b", schema=schema)


def test_settings_show_no_secret() -> None:
    assert "s3cret" not in repr(Settings("postgresql://me:s3cret@host/db", password="s3cret"))


def test_options_for_the_store_are_not_sent_to_the_server() -> None:
    store = PostgresStore("postgresql://db/shop?namespace=cart&application_name=x&schema=locks")
    assert store.address is not None
    assert store.address.arguments["dsn"] == "postgresql://db/shop?application_name=x"
    assert store.namespace == "cart"
    assert '"locks".grelmicro_leases' in store.table_sql


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_URL", "")
    monkeypatch.setenv("POSTGRES_LISTEN_URL", "")
    monkeypatch.setenv("POSTGRES_HOST", "db")
    address = PostgresStore().address
    assert address is not None
    assert address.safe_url == "postgresql://db:5432/"
