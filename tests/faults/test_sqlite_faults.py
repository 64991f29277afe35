"""Leases in a SQLite file whose writer is killed or paused, and whose disk is full, read-only or gone."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

import pytest

from grelmicro.backends.sqlite import SQLiteStore, lane
from grelmicro.errors import BackendUnavailableError

PATIENCE = 20.0
"""Seconds within which what has to happen happens, also on a busy machine."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(path) as store:
        yield store


IN_THE_MIDDLE = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=5)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
# More than fits into its memory: part of it is in the log before there is a commit.
connection.execute("UPDATE grelmicro_leases SET holder = 'thief', fence = 1")
for number in range(200):
    row = f"'lock:{number}', 'thief', 1, 0, 0, 0, 1 << 60, 'x', '{'v' * 1000}', '', 0"
    connection.execute(f"INSERT INTO grelmicro_leases VALUES ('other', {row})")
print("in the middle", flush=True)
time.sleep(600)
"""


@contextmanager
def in_the_middle(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process in the middle of a transaction, of which a part is in the log."""
    before = os.path.getsize(f"{path}-wal")
    command = [sys.executable, "-c", IN_THE_MIDDLE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        assert os.path.getsize(f"{path}-wal") > before + 10_000
        try:
            yield process
        finally:
            process.kill()


async def test_what_a_killed_writer_did_not_commit_was_never_there(store: SQLiteStore, path: Path) -> None:
    lease = await store.acquire("lock:a", "a", 600.0)
    async with SQLiteStore(path) as other:
        await other.acquire("lock:a", "b", 600.0, waiting=True)
        async with other.watch("lock:a") as waiter:
            with in_the_middle(path) as process:
                renewal = asyncio.create_task(store.renew(lease, 600.0))
                await asyncio.sleep(0.1)
                assert not renewal.done()
                process.send_signal(signal.SIGKILL)
                assert await asyncio.wait_for(renewal, PATIENCE) is not None
            assert await store.release(lease)
            assert await asyncio.wait_for(waiter.wait(3 * PATIENCE), PATIENCE)
        assert (await other.acquire("lock:a", "b", 600.0)).granted_to("b")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        thief = "SELECT count(*) FROM grelmicro_leases WHERE holder = 'thief'"
        assert connection.execute(thief).fetchone() == (0,)


async def test_a_writer_that_is_paused_holds_up_writes_for_a_bounded_time_and_no_reads(
    store: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await store.acquire("lock:a", "a", 600.0)
    with in_the_middle(path) as process:
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(lane, "BUSY_TIMEOUT", 0.3)
        with pytest.raises(BackendUnavailableError, match="kept it locked"):
            await store.renew(lease, 600.0)
        record = await store.read("lock:a")
        assert record is not None
        assert record.holder == "a"
        process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert await store.renew(lease, 600.0) is not None


async def test_a_folder_that_is_removed_in_use_is_named_and_used_again_once_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    async with SQLiteStore(folder / "locks.db") as store:
        assert (await store.acquire("lock:a", "a", 600.0)).granted_to("a")
        async with store.watch("lock:b") as waiter:
            await asyncio.sleep(0.05)
            shutil.rmtree(folder)
            for _ in range(2):
                with pytest.raises(BackendUnavailableError, match=r"locks\.db"):
                    await store.acquire("lock:b", "b", 600.0)
            folder.mkdir()
            assert (await store.acquire("lock:a", "b", 600.0)).granted_to("b")
            async with SQLiteStore(folder / "locks.db") as other:
                lease = await other.acquire("lock:b", "c", 600.0)
                await store.acquire("lock:b", "b", 600.0, waiting=True)
                waiting = asyncio.create_task(waiter.wait(3 * PATIENCE))
                await other.release(lease)
                assert await asyncio.wait_for(waiting, PATIENCE)


# File systems of their own


@cache
def can_mount() -> bool:
    """Whether this user may mount a file system in a namespace of its own."""
    try:
        command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


mounting = pytest.mark.skipif("not can_mount()", reason="needs the right to mount a file system (unshare --user)")


def run_on_tmpfs(code: str, folder: Path, *, size: str = "10m", then: str = "") -> str:
    """What a program says whose argument is a folder of a file system of that size; `then` prepares that."""
    mount = f'mount -t tmpfs -o size={size} tmpfs "$1" && {then or "true"} && exec "$2" -W error -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    command += [str(folder), sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FULL = """
import asyncio, errno, os, sys
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.errors import BackendUnavailableError

folder = sys.argv[1]

def fill():
    with open(f"{folder}/fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 1024)
        except OSError as error:
            assert error.errno == errno.ENOSPC

async def refused(work):
    try:
        await work
    except BackendUnavailableError as error:
        assert "the disk is full: free some space" in str(error), error
    else:
        raise AssertionError("there was room")

async def main():
    async with SQLiteStore(f"{folder}/locks.db") as store, SQLiteStore(f"{folder}/locks.db") as other:
        lease = await store.acquire("lock:a", "a", 60)
        assert not (await other.acquire("lock:a", "b", 60, waiting=True)).granted_to("b")
        async with other.watch("lock:a") as waiter:
            fill()
            await refused(store.acquire("lock:b", "a", 60))
            await refused(store.renew(lease, 60))
            await refused(store.release(lease))
            await refused(SQLiteStore(f"{folder}/new.db").__aenter__())
            record = await store.read("lock:a")
            assert (record.holder, record.live) == ("a", True)
            os.unlink(f"{folder}/fill")
            assert await store.renew(lease, 60) is not None
            assert await store.release(lease)
            assert await asyncio.wait_for(waiter.wait(60), 20)
        assert (await other.acquire("lock:a", "b", 60)).granted_to("b")
    print("done")

asyncio.run(main())
"""


@mounting
def test_a_full_disk_changes_nothing_until_there_is_room_again(tmp_path: Path) -> None:
    assert run_on_tmpfs(FULL, tmp_path, size="200k") == "done\n"


READ_ONLY = """
import asyncio, sys
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.errors import SettingsValidationError

async def main():
    for name in ("locks.db", "new.db"):
        try:
            async with SQLiteStore(f"{sys.argv[1]}/{name}"):
                pass
        except SettingsValidationError as error:
            print(error)

asyncio.run(main())
"""


@mounting
def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    said = run_on_tmpfs(READ_ONLY, tmp_path, then='touch "$1/locks.db" && mount -o remount,ro "$1"')
    assert said.splitlines() == [
        "SQLite: path is a file that this process may not read and write: change its permissions, or name another",
        "SQLite: path is in a directory in which this process may not create files: change its permissions, or name "
        "another",
    ]
