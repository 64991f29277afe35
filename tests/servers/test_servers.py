"""Servers start, keep what they owe across kills, stop, pause, and leave nothing behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic, sleep

import asyncpg
import psutil
import pytest
from redis import Redis

from tests.servers import found
from tests.servers.fixtures import Outside, StartPgbouncer, StartPostgres, StartRedis
from tests.servers.found import Binary
from tests.servers.home import Home
from tests.servers.postgres import PostgresServer, execute, run
from tests.servers.redis import RedisServer
from tests.servers.server import Server
from tests.servers.watch import inhabitants

ROOT = Path(__file__).resolve().parents[2]


async def ask(url: str, question: str) -> object:
    """The answer of a PostgreSQL server."""
    connection = await asyncpg.connect(url, timeout=5.0)
    try:
        return await connection.fetchval(question)
    finally:
        await connection.close()


def test_every_version_of_redis_answers(every_redis: RedisServer | Outside) -> None:
    with Redis.from_url(every_redis.url) as client:
        assert client.ping()
        assert client.dbsize() == 0
        if isinstance(every_redis, RedisServer) and every_redis.binary.kind == "redis":
            assert str(client.info("server")["redis_version"]).startswith(every_redis.binary.version)


async def test_every_version_of_postgres_has_a_database_for_each_test(
    every_postgres: PostgresServer | Outside, every_postgres_url: str
) -> None:
    await execute(every_postgres_url, "CREATE TABLE mine ()")
    assert await ask(every_postgres_url, "SELECT count(*) FROM mine") == 0
    assert await ask(every_postgres.url, "SELECT to_regclass('mine')") is None
    if isinstance(every_postgres, PostgresServer):
        assert str(await ask(every_postgres.url, "SHOW server_version")).startswith(every_postgres.binary.version)


def test_redis_keeps_every_write_across_a_kill(start_redis: StartRedis) -> None:
    server = start_redis(requirepass="a/b:c")
    url = server.url
    for end in (server.kill, server.stop):
        with Redis.from_url(url) as client:
            number = client.incr("kept")
        end()
        with pytest.raises(AssertionError):
            server.flush()
        server.start()
        assert server.url == url
        with Redis.from_url(server.socket_url) as client:
            assert client.get("kept") == str(number).encode()


def test_redis_can_be_one_that_keeps_nothing(start_redis: StartRedis) -> None:
    server = start_redis(appendonly="no")
    with Redis.from_url(server.url) as client:
        client.set("lost", "1")
        server.kill()
        server.start()
        assert client.get("lost") is None


async def test_postgres_keeps_every_commit_across_a_kill(start_postgres: StartPostgres) -> None:
    server = start_postgres(application_name="set for all")
    assert await ask(server.socket_url, "SHOW fsync") == "on"
    await execute(server.url, "CREATE TABLE kept (number int)")
    for end in (server.kill, server.stop):
        await execute(server.url, "INSERT INTO kept VALUES (1)")
        connection = await asyncpg.connect(server.url)
        end()
        assert inhabitants(server.folder) == []
        with pytest.raises((OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)):
            await connection.fetchval("SELECT 1")
        with pytest.raises(OSError, match="refused|Connect call failed"):
            await ask(server.url, "SELECT 1")
        server.restart()
    assert await ask(server.url, "SELECT count(*) FROM kept") == 2


async def test_a_paused_server_is_silent_until_it_is_resumed(
    start_redis: StartRedis, start_postgres: StartPostgres, start_pgbouncer: StartPgbouncer
) -> None:
    redis, postgres = start_redis(), start_postgres()
    bouncer = start_pgbouncer(postgres)

    async def ping() -> object:
        return await asyncio.to_thread(redis.ask, "PING")

    async def query() -> object:
        return await ask(bouncer.url, "SELECT 1")

    connection = await asyncpg.connect(postgres.url)
    questions: list[tuple[Server, Callable[[], Awaitable[object]]]] = [
        (redis, ping),
        (postgres, lambda: connection.fetchval("SELECT 1")),
        (bouncer, query),
    ]
    for server, question in questions:
        server.pause()
        asked = asyncio.ensure_future(question())
        done, _ = await asyncio.wait({asked}, timeout=0.1)
        assert not done
        server.resume()
        assert await asked in ("+PONG\r\n", 1)
    await connection.close()


async def test_pgbouncer_gives_a_connection_to_each_transaction(
    start_postgres: StartPostgres, start_pgbouncer: StartPgbouncer
) -> None:
    bouncer = start_pgbouncer(start_postgres(), default_pool_size=1)
    one, two = [await asyncpg.connect(bouncer.url, statement_cache_size=0) for _ in range(2)]
    assert await one.fetchval("SELECT pg_backend_pid()") == await two.fetchval("SELECT pg_backend_pid()")
    await one.close()
    await two.close()


def test_a_server_that_cannot_start_says_why(start_redis: StartRedis) -> None:
    with pytest.raises(RuntimeError, match=r"did not start: (?s:.)*no_such_setting|no-such-setting"):
        start_redis(no_such_setting="1")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "in order"])
def test_nothing_is_left_of_a_process_that_ended(ending: signal.Signals | None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers.program"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert len(inhabitants(folder)) >= 2
        if ending is not None:
            os.kill(process.pid, ending)
        process.stdin.close()
        process.wait(30.0)
    until = monotonic() + 30.0
    while folder.exists() and monotonic() < until:
        sleep(0.01)
    assert not folder.exists()
    assert inhabitants(folder) == []


def test_postgres_starts_from_a_folder_that_only_root_may_enter(server_home: Home, tmp_path: Path) -> None:
    carried = next(found.carried_postgres(), None) or found.missing("postgres")
    package = carried.parents[2]
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, tmp_path / part.name)
    tmp_path.chmod(0o700)
    binary = Binary("postgres", "closed", tmp_path / carried.relative_to(package.parent))
    server = PostgresServer(server_home, binary, {})
    try:
        server.start()
        assert run(ask(server.url, "SELECT 1")) == 1
    finally:
        server.kill()


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have a server of each kind")
def test_ci_has_a_server_of_each_kind() -> None:
    every = [*found.redis_binaries(), *found.postgres_binaries(), *found.pgbouncer_binaries()]
    assert {binary.kind for binary in every} == {"redis", "valkey", "postgres", "pgbouncer"}


def test_a_missing_server_fails_in_ci_and_is_skipped_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match="apt install redis-server"):
        found.missing("redis")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no pgbouncer server here: install it"):
        found.missing("pgbouncer")


def test_no_process_is_counted_twice_and_others_are_not_counted(start_redis: StartRedis) -> None:
    server, other = start_redis(), start_redis()
    assert inhabitants(server.folder) == [psutil.Process(server.pid)]
    server.kill()
    assert other.ask("PING") == "+PONG\r\n"
