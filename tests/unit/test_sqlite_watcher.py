"""How waiters learn of changes of a SQLite file: by reports of the operating system, or else by probing."""

import asyncio
import errno
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic

import pytest

from grelmicro.backends.sqlite import SQLiteStore, notifier, reports, watcher
from grelmicro.backends.sqlite import store as sqlite_store
from grelmicro.backends.sqlite.notifier import Files, Notifier, files_at
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter
from grelmicro.leases import Lease, Waiter

PATIENCE = 20.0
"""Seconds within which what has to happen happens, also on a busy machine."""

TROUBLE = "{path}: waking waiters at once (they probe it meanwhile) has trouble since 0.0 s: {reason}"

reported = pytest.mark.skipif(
    not sys.platform.startswith(("linux", "darwin", "freebsd")), reason="this platform reports no changes of files"
)


RARE_PROBE_S = 3.0
"""Seconds between two probes where a test wants to see reports."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(path) as store:
        yield store


@pytest.fixture
async def other(path: Path) -> AsyncIterator[SQLiteStore]:
    """Another instance on the same file, as another process has it."""
    async with SQLiteStore(path) as store:
        yield store


@pytest.fixture
def rarely_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen sooner was reported. A report precedes its commit, so that now and then a probe has to see it."""
    monkeypatch.setattr(watcher, "PROBE_INTERVAL_S", RARE_PROBE_S)


@contextmanager
def stranger(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that another program has to the file."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=5)) as connection:
        yield connection


def reports_of(store: SQLiteStore) -> reports.Reports:
    assert store._opened is not None
    return store._opened.watcher._reports


def is_settled(store: SQLiteStore) -> bool:
    """Whether its watcher has seen everything, and waits for a report."""
    assert store._opened is not None
    return store._opened.watcher._settled and reports_of(store).trusted


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def is_hinted(waiter: Waiter) -> bool:
    return await asyncio.wait_for(waiter.wait(3 * PATIENCE), PATIENCE)


async def held_by_other(store: SQLiteStore, other: SQLiteStore) -> Lease:
    """A lease of `other`, on which the process of `store` is marked as waiting."""
    lease = await other.acquire("lock:a", "a", 600.0)
    await store.acquire("lock:a", "b", 600.0, waiting=True)
    return lease


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def descriptors() -> list[str]:
    """The watches that this process has."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.lexists(link) and "inotify" in os.readlink(link)]


# Reports


@reported
@pytest.mark.usefixtures("rarely_probed")
async def test_a_release_by_another_process_is_reported(store: SQLiteStore, other: SQLiteStore) -> None:
    took = []
    for _ in range(5):
        lease = await held_by_other(store, other)
        async with store.watch("lock:a") as waiter:
            await until(lambda: reports_of(store).trusted)
            waiting = asyncio.create_task(waiter.wait(3 * PATIENCE))
            await asyncio.sleep(0.02)
            await other.release(lease)
            released_at = monotonic()
            assert await asyncio.wait_for(waiting, PATIENCE)
            took.append(monotonic() - released_at)
    assert min(took) < RARE_PROBE_S / 2


@reported
async def test_an_idle_waiter_costs_no_statement_and_no_call(store: SQLiteStore, other: SQLiteStore) -> None:
    statements: list[str] = []
    await held_by_other(store, other)
    assert store._opened is not None
    async with store.watch("lock:a"):
        await until(lambda: is_settled(store))
        for lane in (store._opened.reader, store._opened.writer):
            await lane.read(lambda c: c.set_trace_callback(statements.append))
        await asyncio.sleep(0.3)
        assert statements == []
        assert is_settled(store)


@reported
@pytest.mark.usefixtures("rarely_probed")
@pytest.mark.parametrize("mode", ["PASSIVE", "FULL", "RESTART", "TRUNCATE"])
async def test_checkpoints_and_a_log_that_begins_anew_change_nothing(
    store: SQLiteStore, other: SQLiteStore, path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with store.watch("lock:a") as waiter:
        await until(lambda: reports_of(store).trusted)
        for _ in range(3):
            lease = await held_by_other(store, other)
            with stranger(path) as connection:
                connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            await other.release(lease)
            while (await store.acquire("lock:a", "b", 600.0)).holder != "b":
                assert await is_hinted(waiter)
            await store.release(Lease("lock:a", "b", 0))
    assert warnings(caplog) == []


@reported
@pytest.mark.parametrize("removed", ["locks.db*", "locks.db", "moved"])
async def test_a_file_that_is_replaced_is_watched_in_its_place(
    store: SQLiteStore, other: SQLiteStore, path: Path, removed: str, caplog: pytest.LogCaptureFixture
) -> None:
    await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await until(lambda: is_settled(store))
        if removed == "moved":
            os.rename(path, f"{path}.old")
        else:
            for file in path.parent.glob(removed):
                file.unlink()
        assert await is_hinted(waiter)  # long before the next test of the reports
        lease = await held_by_other(store, other)
        assert lease.granted_to("a")
        await until(lambda: is_settled(store))
        assert watched(store) == files_at(str(path))
        await other.release(lease)
        assert await is_hinted(waiter)
    assert set(warnings(caplog)) == {f"{path} was deleted or replaced: the leases in it are gone"}


def watched(store: SQLiteStore) -> Files | None:
    watch = reports_of(store)._notifier
    return None if watch is None else watch.files


@reported
async def test_a_symbolic_link_is_watched_where_it_leads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / "locks.db"
    link.symlink_to(tmp_path / "data" / "real.db")
    async with SQLiteStore(link) as store, SQLiteStore(link) as other:
        lease = await held_by_other(store, other)
        async with store.watch("lock:a") as waiter:
            await until(lambda: is_settled(store))
            await other.release(lease)
            assert await is_hinted(waiter)
    assert warnings(caplog) == []


@reported
async def test_a_commit_that_is_seen_after_its_report_is_not_missed(
    store: SQLiteStore, other: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may be paused after its last write to the log, and before the others can see its commit."""
    await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await until(lambda: is_settled(store))
        with stranger(path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("UPDATE grelmicro_leases SET holder = '', expires_at = 0")
            os.utime(f"{path}-wal")
            await until(lambda: not is_settled(store))
            await asyncio.sleep(0.05)
            assert not is_settled(store)  # for as long as the transaction is open
            assert watched(store) is not None
            monkeypatch.setattr(reports_of(store), "listen", lambda: None)
            reports_of(store)._stop_listening()
            monkeypatch.setattr(reports_of(store), "drain", lambda: False)
            connection.execute("COMMIT")
        assert await is_hinted(waiter)


@reported
async def test_a_waiter_that_has_just_come_asks_by_itself(
    store: SQLiteStore, other: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "ASK_GRACE_S", 0.5)
    await other.acquire("lock:a", "a", 600.0)  # which no process is marked as waiting for
    begun = asyncio.get_running_loop().time()
    async with store.watch("lock:a") as waiter:
        waiting = asyncio.create_task(waiter.wait(3 * PATIENCE))
        await until(lambda: is_settled(store) or waiting.done())
        while not waiting.done() and asyncio.get_running_loop().time() < begun + PATIENCE:
            os.utime(f"{path}-wal")
            await asyncio.sleep(0.02)
        assert await waiting
    assert asyncio.get_running_loop().time() > begun + 0.5


@reported
async def test_reports_are_tested_now_and_then(
    store: SQLiteStore, other: SQLiteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tests = 0
    touch = Notifier.touch

    def counted(watch: Notifier) -> None:
        nonlocal tests
        tests += 1
        touch(watch)

    monkeypatch.setattr(Notifier, "touch", counted)
    monkeypatch.setattr(watcher, "TEST_INTERVAL_S", 0.02)
    await held_by_other(store, other)
    async with store.watch("lock:a"):
        await until(lambda: tests >= 5)
    assert warnings(caplog) == []


@reported
async def test_a_process_that_contends_with_itself_looks_now_and_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = watcher.Watcher._look

    async def counted(self: watcher.Watcher, quiet: bool) -> Files:
        nonlocal looks
        looks += 1
        return await look(self, quiet)

    monkeypatch.setattr(watcher.Watcher, "_look", counted)
    monkeypatch.setattr(watcher, "PROBE_INTERVAL_S", 0.5)
    loop = asyncio.get_running_loop()
    async with SQLiteLockAdapter(path) as backend:

        async def compete() -> None:
            lock = Lock("cart", backend=backend)
            for _ in range(10):
                async with lock:
                    await asyncio.sleep(0.001)

        begun = loop.time()
        await asyncio.gather(*(compete() for _ in range(16)))
        seconds = loop.time() - begun
    assert looks <= 10 + seconds / 0.5  # of 160 hand-overs


@reported
async def test_there_is_no_watch_while_nothing_waits(
    store: SQLiteStore, other: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "LINGER_S", 0.05)
    await held_by_other(store, other)
    before = len(descriptors())
    for _ in range(2):
        async with store.watch("lock:a"), store.watch("lock:b"):
            await until(lambda: reports_of(store).trusted)
            assert len(descriptors()) == before + (sys.platform == "linux")
        await until(lambda: len(descriptors()) == before and not reports_of(store).trusted)


async def test_closing_ends_the_watch(path: Path) -> None:
    before = descriptors()
    async with SQLiteStore(path) as store, SQLiteStore(path) as other:
        await held_by_other(store, other)
        async with store.watch("lock:a"):
            await until(lambda: is_settled(store))
    assert descriptors() == before


async def test_a_loop_that_ends_without_closing_leaves_no_watch(path: Path) -> None:
    before = descriptors()

    def scenario() -> None:
        store = SQLiteStore(path)

        async def leave_open() -> None:
            await store.__aenter__()
            async with store.watch("lock:a"):
                await until(lambda: reports_of(store).trusted)

        async def open_again() -> None:
            async with store:
                assert (await store.acquire("lock:a", "a", 60.0)).granted_to("a")

        asyncio.run(leave_open())
        asyncio.run(open_again())

    await asyncio.to_thread(scenario)
    await until(lambda: descriptors() == before)


# Without reports


async def test_a_file_system_of_several_hosts_is_probed(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_store, "check_place", lambda path: False)
    statements: list[str] = []
    async with SQLiteStore(path) as store, SQLiteStore(path) as other:
        lease = await held_by_other(store, other)
        assert store._opened is not None
        async with store.watch("lock:a") as waiter:
            await asyncio.sleep(0.1)
            assert watched(store) is None
            await store._opened.reader.read(lambda c: c.set_trace_callback(statements.append))
            await until(lambda: len(statements) >= 5)
            assert set(statements) == {"PRAGMA data_version"}
            await other.release(lease)
            assert await is_hinted(waiter)
    assert warnings(caplog) == []


@reported
async def test_a_process_that_yields_gives_others_time_to_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with SQLiteStore(path) as store:
        assert store.notice < watcher.PROBE_INTERVAL_S
    monkeypatch.setattr(sqlite_store, "check_place", lambda path: False)
    async with SQLiteStore(path) as store:
        assert store.notice >= 2 * watcher.PROBE_INTERVAL_S


async def test_an_event_loop_that_listens_to_no_descriptor_probes(
    store: SQLiteStore, other: SQLiteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def add_reader(*args: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", add_reader)
    lease = await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await asyncio.sleep(0.05)
        await other.release(lease)
        assert await is_hinted(waiter)
    assert watched(store) is None
    assert warnings(caplog) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
async def test_a_kernel_without_reports_is_no_trouble(
    store: SQLiteStore,
    other: SQLiteStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    def unsupported(path: str) -> Notifier:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(reports, "notifier", unsupported)
    lease = await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await asyncio.sleep(0.05)
        await other.release(lease)
        assert await is_hinted(waiter)
    assert warnings(caplog) == []


@reported
async def test_a_limit_of_the_system_is_told_once_and_asked_for_again(
    store: SQLiteStore,
    other: SQLiteStore,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = 0

    def full(path: str) -> Notifier:
        nonlocal asked
        asked += 1
        raise OSError(errno.ENOSPC, "too many inotify watches")

    healthy = notifier.notifier
    monkeypatch.setattr(reports, "notifier", full)
    monkeypatch.setattr(reports, "RETRY_INTERVAL_S", 0.05)
    lease = await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await until(lambda: asked >= 3)
        await other.release(lease)
        assert await is_hinted(waiter)
        assert len(warnings(caplog)) == 1
        assert warnings(caplog)[0].startswith(TROUBLE.format(path=path, reason="[Errno 28] too many inotify watches"))
        monkeypatch.setattr(reports, "notifier", healthy)
        await until(lambda: reports_of(store).trusted)
    assert len(warnings(caplog)) == 2
    assert "works again" in warnings(caplog)[1]


@reported
async def test_reports_that_do_not_come_round_are_not_believed(
    store: SQLiteStore,
    other: SQLiteStore,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Notifier, "touch", lambda self: None)
    monkeypatch.setattr(Notifier.__subclasses__()[0], "drain", lambda self: False)
    monkeypatch.setattr(reports, "ANSWER_LIMIT_S", 0.1)
    lease = await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await until(lambda: warnings(caplog))
        await other.release(lease)
        assert await is_hinted(waiter)
    reason = "a change by this process was not reported within 0.1 s"
    assert warnings(caplog) == [TROUBLE.format(path=path, reason=reason)]


@reported
async def test_changes_that_are_not_reported_end_the_watch(
    store: SQLiteStore,
    other: SQLiteStore,
    tmp_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where a container mounts the file anew: its own changes are reported, and those of others are not."""
    decoy = tmp_path / "decoy.db"
    for each in (decoy, tmp_path / "decoy.db-wal"):
        each.touch()

    def elsewhere(path: str) -> Notifier:
        watch = notifier.notifier(str(decoy))
        watch.files = files_at(path)
        return watch

    monkeypatch.setattr(reports, "notifier", elsewhere)
    monkeypatch.setattr(watcher, "TEST_INTERVAL_S", 0.1)
    lease = await held_by_other(store, other)
    async with store.watch("lock:a") as waiter:
        await until(lambda: is_settled(store))
        for _ in range(3):
            await other.release(lease)
            assert await is_hinted(waiter)
            lease = await held_by_other(store, other)
        assert not reports_of(store).trusted
    assert warnings(caplog) == [TROUBLE.format(path=path, reason="a change by another process was not reported")]


# The notifier


@reported
@pytest.mark.parametrize("change", ["touch", "write", "truncate", "remove", "remove the file", "replace"])
def test_a_change_is_reported_at_once(path: Path, change: str) -> None:
    with stranger(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("CREATE TABLE t (a)")
        watch = notifier.notifier(str(path))
        assert not watch.drain()
        match change:
            case "touch":
                watch.touch()
            case "write":
                connection.execute("INSERT INTO t VALUES (1)")
            case "truncate":
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            case "remove":
                os.unlink(f"{path}-wal")
            case "remove the file":
                path.unlink()
            case "replace":
                new = path.with_name("new.db")
                new.touch()
                new.rename(path)
        assert watch.drain()
        assert not watch.drain()
        watch.close()
        watch.close()


@reported
def test_another_log_is_another_file_though_it_has_the_same_number(path: Path) -> None:
    """File systems give the number of a removed file to the next one."""
    with stranger(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("CREATE TABLE t (a)")
        watch = notifier.notifier(str(path))
        assert watch.files == files_at(str(path))
    with stranger(path) as connection:  # the first was the last one, and so has removed the log
        connection.execute("INSERT INTO t VALUES (1)")
        watch.drain()
        assert watch.files != files_at(str(path))
        watch.close()


@reported
def test_what_is_not_there_is_not_watched(path: Path) -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        notifier.notifier(str(path))
    assert descriptors() == before


# Processes

LIMITED = """
import asyncio, resource, sys
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter

async def main():
    async with SQLiteLockAdapter(sys.argv[1]) as backend, SQLiteLockAdapter(sys.argv[1]) as other:
        for each in (backend, other):
            await each.read("lock:a")
        held = await Lock("a", backend=other).acquire()
        free = open("/dev/null")
        resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        waiting = asyncio.create_task(Lock("a", backend=backend).acquire(timeout=20))
        await asyncio.sleep(0.1)
        await held.release()
        await (await waiting).release()
        print("got it")

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limits of inotify")
def test_a_process_without_a_free_descriptor_probes(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "got it\n"), done.stderr
    assert "too many inotify instances or open files: raise fs.inotify.max_user_instances" in done.stderr
    assert len(done.stderr.splitlines()) == 1


FORKED = """
import asyncio, os, sys
from grelmicro.backends.sqlite import SQLiteStore

def watches():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.lexists(link) and "inotify" in os.readlink(link)]

async def in_child(path):
    async with SQLiteStore(path) as store:
        lease = await store.acquire("lock:b", "child", 60)
        assert lease.granted_to("child")
        async with store.watch("lock:b"):
            await asyncio.sleep(0.1)
        await store.release(lease)

def fork(path):
    child = os.fork()
    if not child:
        code = 1
        try:
            assert watches() == [], watches()
            asyncio.run(in_child(path))
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]

async def main(path):
    async with SQLiteStore(path) as store, SQLiteStore(path) as other:
        for _ in range(3):
            lease = await other.acquire("lock:a", "a", 600)
            await store.acquire("lock:a", "b", 600, waiting=True)
            async with store.watch("lock:a") as waiter:
                while not store._opened.watcher._settled:
                    await asyncio.sleep(0.005)
                assert len(watches()) == 1
                assert await asyncio.to_thread(fork, path) == 0
                waiting = asyncio.create_task(waiter.wait(60))
                await asyncio.sleep(0.02)
                await other.release(lease)
                assert await asyncio.wait_for(waiting, 20)
    assert watches() == []
    print("done")

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for descriptors in /proc")
def test_a_fork_takes_no_watch_along(path: Path) -> None:
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
