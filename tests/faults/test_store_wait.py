"""Stores that come up after the application, as where all containers of a system start at once."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, GrelmicroError, SettingsValidationError
from grelmicro.providers.redis import RedisProvider
from grelmicro.providers.sqlite import SQLiteProvider
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartKubernetes, StartPostgres, StartRedis
from tests.servers.home import free_port
from tests.servers.kubernetes import GUEST, Namespace
from tests.servers.proxy import Proxy
from tests.servers.server import Server

MISSING = "is not there yet, and is waited for up to"
THERE = "is there after"


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="grelmicro")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was told of stores that are waited for."""
    return [record.getMessage() for record in caplog.records if MISSING in record.message or THERE in record.message]


async def opens_late(url: str, appear: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    """The app opens once the store is there, and says so with one line at the beginning and one at the end."""
    micro = Grelmicro(uses=[Coordination.from_url(url, wait=60)])
    opening = asyncio.create_task(micro.__aenter__())
    await eventually(lambda: MISSING in caplog.text, "it is waited for")
    await asyncio.sleep(0.5)
    assert not opening.done()
    await asyncio.to_thread(appear)
    async with asyncio.timeout(30.0):
        await opening
    try:
        async with micro.coordination.lock("cart"):
            pass
        first, last = told(caplog)
        assert MISSING in first
        assert THERE in last
    finally:
        await micro.__aexit__(None, None, None)


def stopped(server: Server) -> Server:
    """The same server before it starts."""
    server.stop()
    return server


async def test_redis_comes_late(start_redis: StartRedis, caplog: pytest.LogCaptureFixture) -> None:
    server = await asyncio.to_thread(stopped, start_redis())
    await opens_late(server.url, server.start, caplog)


async def test_postgres_comes_late(start_postgres: StartPostgres, caplog: pytest.LogCaptureFixture) -> None:
    server = await asyncio.to_thread(stopped, start_postgres())
    await opens_late(server.url, server.start, caplog)


async def test_a_folder_is_mounted_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "volume"
    await opens_late(f"sqlite:///{folder}/locks.db", folder.mkdir, caplog)


@pytest.mark.xdist_group("kubernetes")
async def test_an_api_server_comes_late(start_kubernetes: StartKubernetes, caplog: pytest.LogCaptureFixture) -> None:
    server = start_kubernetes()
    url = server.url
    await asyncio.to_thread(server.stop)
    await opens_late(url, server.start, caplog)


async def test_a_server_that_accepts_and_answers_nothing_is_waited_for(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Proxy(redis_url) as proxy:
        proxy.black_hole()
        coordination = Coordination(RedisProvider(f"{proxy.url}?command_timeout=0.3"), wait=60)
        opening = asyncio.create_task(coordination.__aenter__())
        await eventually(lambda: MISSING in caplog.text, "it is waited for")
        await proxy.heal()
        async with asyncio.timeout(30.0):
            await opening
        await coordination.__aexit__(None, None, None)
    assert len(told(caplog)) == 2


async def test_a_store_that_does_not_come_fails_when_the_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    begun = time.monotonic()
    with pytest.raises(BackendUnavailableError, match="cannot be used") as failed:
        async with Coordination.from_url(f"redis://127.0.0.1:{free_port()}", wait=0.5):
            pass
    assert time.monotonic() - begun >= 0.5
    assert failed.value.__notes__ == ["It was waited for, 0.5 s in all (wait=, GREL_STORE_WAIT)."]
    assert len(told(caplog)) == 1


async def test_without_a_wait_a_store_that_is_not_there_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendUnavailableError):
        async with Coordination.from_url(f"redis://127.0.0.1:{free_port()}"):
            pass
    assert not told(caplog)


# What waiting does not mend


async def fails_at_once(url: str, error: type[GrelmicroError], match: str) -> None:
    """Opening raises the error of the first try."""
    coordination = Coordination.from_url(url, wait=300)
    with pytest.raises(error, match=match):
        await asyncio.wait_for(coordination.__aenter__(), 30.0)


async def test_a_wrong_password_fails_at_once(start_redis: StartRedis, caplog: pytest.LogCaptureFixture) -> None:
    server = start_redis(requirepass="right")
    parts = urlsplit(server.url)
    for login, match in (("", "it asks for a password"), (":wrong@", "it does not accept user and password")):
        netloc = f"{login}{parts.netloc.rpartition('@')[2]}"
        await fails_at_once(urlunsplit(parts._replace(netloc=netloc)), BackendUnavailableError, match)
    assert not told(caplog)


async def test_wrong_credentials_of_postgres_fail_at_once(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = urlsplit(postgres_url)
    stranger = urlunsplit(parts._replace(netloc=f"nobody@{parts.netloc.rpartition('@')[2]}"))
    await fails_at_once(stranger, BackendUnavailableError, "it does not let this role in")
    missing = urlunsplit(parts._replace(path="/missing"))
    await fails_at_once(missing, BackendUnavailableError, "the database does not exist")
    await fails_at_once(f"{postgres_url}?sslmode=require", BackendUnavailableError, "takes no encrypted connections")
    await fails_at_once(f"{postgres_url}?schema=missing", SettingsValidationError, "there is no schema")
    assert not told(caplog)


async def test_missing_rights_of_kubernetes_fail_at_once(
    kubernetes_namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    await fails_at_once(kubernetes_namespace.url_of(GUEST), BackendUnavailableError, "bind a Role that allows it")
    assert not told(caplog)


async def test_a_path_that_can_never_be_right_fails_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await fails_at_once(f"sqlite:///{tmp_path}", SettingsValidationError, "path is a directory")
    (tmp_path / "text").write_text("no database " * 1000)
    await fails_at_once(f"sqlite:///{tmp_path}/text", SettingsValidationError, "path names a file")
    assert not told(caplog)


# Ways to use it


async def test_a_cancellation_ends_the_wait(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    for url in (f"redis://127.0.0.1:{free_port()}", f"postgresql://127.0.0.1:{free_port()}/shop"):
        lock = SQLiteLockAdapter(tmp_path / "locks.db")
        coordination = Coordination(lock=lock, election=Coordination.from_url(url).election_backend, wait=300)
        opening = asyncio.create_task(coordination.__aenter__())
        await eventually(lambda: MISSING in caplog.text, "it is waited for")
        opening.cancel()
        async with asyncio.timeout(10.0):
            await asyncio.wait({opening})
        assert opening.cancelled()
        assert not coordination.is_open
        assert not lock.is_open, "what was opened before is closed"
        caplog.clear()


async def test_the_environment_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "volume"
    monkeypatch.setenv("GREL_STORE_WAIT", "60")
    for opened in (Coordination.from_url(f"sqlite:///{folder}/locks.db"), SQLiteProvider(folder / "locks.db")):
        opening = asyncio.create_task(opened.__aenter__())
        await eventually(lambda: MISSING in caplog.text, "it is waited for")
        folder.mkdir()
        await asyncio.wait_for(opening, 30.0)
        await opened.__aexit__(None, None, None)
        shutil.rmtree(folder)
        caplog.clear()


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_value_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GREL_STORE_WAIT", value)
    with pytest.raises(SettingsValidationError, match="GREL_STORE_WAIT should be a number of seconds, 0 or more"):
        Coordination.from_url("memory://")


def test_a_program_without_an_event_loop_waits_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        pytest.raises(CoordinationBackendError),
        Grelmicro(uses=[Coordination.from_url(f"redis://127.0.0.1:{free_port()}", wait=0.3)]),
    ):
        pass
    with Grelmicro(uses=[Coordination.from_url(f"sqlite:///{tmp_path}/locks.db", wait=0.3)]), Lock("cart").from_thread:
        pass
    assert len(told(caplog)) == 1
