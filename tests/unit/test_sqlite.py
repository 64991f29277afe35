"""What is special about leases in a SQLite file, in one process."""

import asyncio
import gc
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from grelmicro.backends.sqlite import SQLiteProvider, SQLiteStore
from grelmicro.backends.sqlite import lane as sqlite_lane
from grelmicro.backends.sqlite import table as sqlite_table
from grelmicro.backends.sqlite.store import SWEEP_INTERVAL
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError, OutOfContextError
from grelmicro.leases import Lease
from grelmicro.leases.marks import MARK
from grelmicro.testing import MovableClock

DAY = 24 * 3600.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def store(path: Path, clock: MovableClock) -> AsyncIterator[SQLiteStore]:
    async with SQLiteStore(path, clock=clock) as store:
        yield store


@pytest.fixture
async def other(path: Path, clock: MovableClock) -> AsyncIterator[SQLiteStore]:
    """Another instance on the same file, as another process has it."""
    async with SQLiteStore(path, clock=clock) as store:
        yield store


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """No thread of a store outlives it, but for the moment that one takes whose event loop is gone."""
    yield
    until = time.monotonic() + 5.0
    while (
        left := [thread for thread in threading.enumerate() if "sqlite" in thread.name]
    ) and time.monotonic() < until:
        time.sleep(0.01)
    assert left == []


@contextmanager
def stranger(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that somebody else has to the file."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)) as connection:
        yield connection


def remove(path: Path) -> None:
    """Remove the file with all that belongs to it."""
    for file in path.parent.glob(path.name + "*"):
        file.unlink()


@contextmanager
def another_process(path: Path) -> Iterator[Callable[[], str]]:
    """A process that has the file open; each call makes it count the records there."""
    code = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1])\n"
        "for line in sys.stdin:\n"
        "    print(connection.execute('SELECT count(*) FROM grelmicro_leases').fetchone()[0], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def count() -> str:
            asked.write("\n")
            asked.flush()
            return answers.readline().strip()

        yield count


def version(connection: sqlite3.Connection) -> int:
    """A number that changes when another connection changed the file."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def watchers() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "grelmicro-sqlite-watcher"]


# Opening


async def test_it_is_closed_before_and_after(path: Path) -> None:
    store = SQLiteStore(path)
    with pytest.raises(OutOfContextError, match="is not open"):
        await store.acquire("lock:a", "a", 5)
    async with store:
        await store.acquire("lock:a", "a", 5)
    for use in (store.acquire("lock:a", "a", 5), store.read("lock:a"), store.release(Lease("lock:a", "a", 1))):
        with pytest.raises(OutOfContextError, match="is not open"):
            await use
    with pytest.raises(OutOfContextError, match="is not open"):
        store.watch("lock:a")


async def test_the_file_is_in_write_ahead_mode_and_not_synchronous_at_each_commit(store: SQLiteStore) -> None:
    assert store._opened is not None
    for lane in (store._opened.writer, store._opened.reader):
        modes = await lane.read(
            lambda c: [c.execute(f"PRAGMA {mode}").fetchone()[0] for mode in ("journal_mode", "synchronous")]
        )
        assert modes == ["wal", 1]


def test_a_file_that_can_have_no_write_ahead_log_is_refused() -> None:
    table = sqlite_table.Table("grelmicro", MovableClock(), DAY)
    with (
        closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(BackendUnavailableError, match="cannot have a write-ahead log, only 'memory'"),
    ):
        table.prepare(connection)


async def test_a_connection_that_is_closed_does_nothing_any_more(path: Path) -> None:
    lane = sqlite_lane.Lane(str(path), lambda connection: None)
    assert await lane.read(lambda connection: 1) == 1
    await asyncio.wrap_future(lane.close())
    lane.join()
    with pytest.raises(OutOfContextError, match="was closed while it was in use"):
        await lane.read(lambda connection: 1)
    lane.later(lambda connection: None)
    assert lane.close().done()


async def test_namespaces_do_not_meet(path: Path) -> None:
    async with SQLiteStore(path, namespace="shop") as shop, SQLiteStore(path, namespace="blog") as blog:
        assert (await shop.acquire("lock:a", "a", 5)).granted_to("a")
        assert await blog.read("lock:a") is None
        assert (await blog.acquire("lock:a", "b", 5)).granted_to("b")
        assert [lease.holder async for lease in shop.scan()] == ["a"]


async def test_a_scan_goes_on_beyond_one_page(store: SQLiteStore) -> None:
    names = [f"lock:{number:04}" for number in range(sqlite_table.BATCH * 2 + 1)]
    await asyncio.gather(*(store.acquire(name, "a", 5) for name in names))
    assert [lease.name async for lease in store.scan("lock:")] == names
    assert [lease.name async for lease in store.scan("lock:1")] == names[1000:]
    assert [lease.name async for lease in store.scan("lock:0999")] == ["lock:0999"]


async def test_a_provider_can_be_asked_whether_it_works(path: Path) -> None:
    provider = SQLiteProvider(path)
    await provider.check()
    async with provider:
        await provider.check()
        with stranger(path) as connection:
            connection.execute("DROP TABLE grelmicro_leases")
        with pytest.raises(BackendUnavailableError, match="no such table"):
            await provider.check()


async def test_it_can_be_opened_by_the_next_event_loop_after_one_that_ended_without_closing(path: Path) -> None:
    def scenario() -> None:
        store = SQLiteStore(path)

        async def leave_open() -> Lease:
            await store.__aenter__()
            async with store.watch("lock:a"):
                return await store.acquire("lock:a", "a", 60)

        async def open_again() -> Lease:
            async with store:
                return await store.acquire("lock:a", "b", 60)

        lease = asyncio.run(leave_open())
        assert asyncio.run(open_again()).granted_to("a")
        assert lease.granted_to("a")

    await asyncio.to_thread(scenario)


async def test_a_store_that_is_forgotten_ends_its_threads(path: Path) -> None:
    async def forget() -> None:
        store = SQLiteStore(path)
        await store.__aenter__()
        await store.acquire("lock:a", "a", 60)
        await store.read("lock:a")

    await forget()
    gc.collect()
    # `no_thread_left` looks for what is left of it.


# The clock


async def test_time_is_read_once_the_file_is_locked(store: SQLiteStore, clock: MovableClock, path: Path) -> None:
    lease = await store.acquire("lock:mine", "a", 30.0)
    with stranger(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        acquire = asyncio.create_task(store.acquire("lock:new", "a", 30.0))
        renew = asyncio.create_task(store.renew(lease, 30.0))
        await asyncio.sleep(0.05)
        await clock.advance(100.0)
        connection.execute("COMMIT")
    assert (await acquire).now == clock.now()
    assert (await acquire).remaining == 30.0
    assert await renew is None  # it had expired by the time at which it could be renewed


async def test_a_lease_ends_with_the_host(
    path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_table, "boot_id", lambda: "first")
    async with SQLiteStore(path, clock=clock) as store:
        before = await store.acquire("lock:a", "a", 1_000.0, data={"k": "v"})
        await store.acquire("lock:b", "a", 1_000.0)
    monkeypatch.setattr(sqlite_table, "boot_id", lambda: "second")
    restarted = MovableClock(now=1.0, wall=clock.wall() + 100.0)
    async with SQLiteStore(path, clock=restarted) as store:
        record = await store.read("lock:a")
        assert record is not None
        assert (record.live, record.remaining, dict(record.data)) == (False, 0.0, {"k": "v"})
        assert await store.renew(before, 60.0) is None
        assert await store.release(before) is False
        after = await store.acquire("lock:a", "b", 60.0)
        assert after.granted_to("b")
        assert after.fence == round(restarted.wall() * 1e6)  # the power failure may have undone the last ones
        again = await store.acquire("lock:a", "b", 60.0)
        assert again.fence == after.fence
    async with SQLiteStore(path, clock=restarted) as store:
        vacated = await store.read("lock:b")
        assert vacated is not None
        assert vacated.holder == ""  # by closing
        assert (await store.acquire("lock:b", "b", 60.0)).fence == round(restarted.wall() * 1e6)
    assert warnings(caplog) == []


async def test_a_file_that_two_hosts_share_gives_one_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovableClock(now=10_000.0)  # both have been running for hours
    for host in ("first", "second", "first"):
        monkeypatch.setattr(sqlite_table, "boot_id", lambda host=host: host)
        async with SQLiteStore(path, clock=clock) as store:
            for name in ("lock:a", "lock:b"):
                await store.acquire(name, host, 60.0)
    assert (
        warnings(caplog)
        == [
            "'lock:a' was held under another start of the host since this host was started: if several hosts share the "
            "SQLite file, they do not exclude each other; use a store that all of them reach by network"
        ]
        * 2
    )


async def test_a_fence_never_falls_though_the_wall_clock_was_put_back(
    path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SQLiteStore(path, clock=clock) as store:
        before = await store.acquire("lock:a", "a", 60.0)
    monkeypatch.setattr(sqlite_table, "boot_id", lambda: "another")
    clock.shift_wall(-1_000_000.0)
    async with SQLiteStore(path, clock=clock) as store:
        assert (await store.acquire("lock:a", "b", 60.0)).fence == before.fence + 1


async def test_without_a_boot_id_leases_are_judged_by_the_wall_clock(
    path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_table, "boot_id", lambda: "")
    async with SQLiteStore(path, clock=clock) as store:
        await store.acquire("lock:a", "a", 60.0)
    # The host was started anew, and its other clock with it.
    restarted = MovableClock(now=1.0, wall=clock.wall() + 59.0)
    async with SQLiteStore(path, clock=restarted) as store:
        assert (await store.acquire("lock:a", "b", 60.0)).granted_to("a")
        restarted.shift_wall(2.0)
        assert (await store.acquire("lock:a", "b", 60.0)).granted_to("b")


def test_this_host_has_a_boot_id() -> None:
    assert len(sqlite_table.boot_id()) == 36


# The file


async def test_a_deleted_file_takes_its_leases_along(
    store: SQLiteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await store.acquire("lock:a", "a", 60.0)
    assert await store.read("lock:a") is not None
    remove(path)
    assert await store.read("lock:a") is None
    assert await store.renew(lease, 60.0) is None
    assert await store.release(lease) is False
    assert (await store.acquire("lock:a", "b", 60.0)).granted_to("b")
    assert os.listdir(path.parent) != []
    assert warnings(caplog) == [f"{path} was deleted or replaced: the leases in it are gone"]


async def test_a_new_file_continues_above_the_fences_of_the_old(path: Path) -> None:
    async with SQLiteStore(path) as store:  # by the machine's clock, which goes on
        fences = []
        for number in range(5):
            lease = await store.acquire("lock:a", f"h{number}", 60.0)
            fences.append(lease.fence)
            await store.release(lease)
            if number == 2:
                os.unlink(path)
    assert fences == sorted(set(fences))


async def test_a_file_can_be_deleted_while_another_process_has_it_open(path: Path) -> None:
    async with SQLiteStore(path) as store:
        for number in range(100):
            await store.acquire(f"lock:{number}", "a", 60.0, data={"k": "v" * 500})
        with another_process(path) as count:
            assert count() == "100"
            os.unlink(path)  # but not what belongs to it, which that process goes on using
            for number in range(90):
                assert (await store.acquire(f"lock:{number}", "b", 60.0)).granted_to("b")
            assert count() == "100"
        with stranger(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert len([lease async for lease in store.scan()]) == 90


async def test_a_locked_file_is_waited_for(store: SQLiteStore, path: Path) -> None:
    with stranger(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        acquire = asyncio.create_task(store.acquire("lock:a", "a", 60.0))
        await asyncio.sleep(0.5)
        assert not acquire.done()
        assert await store.read("lock:a") is None  # reading waits for nobody
        connection.execute("COMMIT")
        assert (await acquire).granted_to("a")


async def test_a_file_that_stays_locked_fails_all_who_wait_for_it_in_bounded_time(
    store: SQLiteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_lane, "BUSY_TIMEOUT", 0.3)
    with stranger(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        answers = await asyncio.gather(
            *(store.acquire(f"lock:{number}", "a", 60.0) for number in range(16)), return_exceptions=True
        )
        assert 0.25 < time.monotonic() - begun < 2.0  # not once for each in the queue
    assert {type(answer) for answer in answers} == {BackendUnavailableError}
    assert {str(answer) for answer in answers} == {
        f"the SQLite file {path}: other processes kept it locked for longer than 5 s: look for one that writes to it "
        "without end, and give leases a file of their own"
    }
    assert [lease async for lease in store.scan()] == []
    assert (await store.acquire("lock:0", "a", 60.0)).granted_to("a")


async def test_a_full_disk_changes_nothing_and_is_named(store: SQLiteStore, path: Path) -> None:
    lease = await store.acquire("lock:a", "a", 60.0, data={"k": "1"})
    assert store._opened is not None
    await store._opened.writer.read(lambda c: c.execute("PRAGMA max_page_count = 1").fetchall())
    with pytest.raises(BackendUnavailableError) as failure:
        await store.renew(lease, 60.0, data={"k": "2" * 100_000})
    assert str(failure.value) == f"the SQLite file {path}: the disk is full: free some space"
    record = await store.read("lock:a")
    assert record is not None
    assert dict(record.data) == {"k": "1"}
    assert await store.release(lease) is True


async def test_a_file_that_became_read_only_is_named(store: SQLiteStore, path: Path) -> None:
    assert store._opened is not None
    await store._opened.writer.read(lambda c: c.execute("PRAGMA query_only = 1").fetchall())
    with pytest.raises(BackendUnavailableError) as failure:
        await store.acquire("lock:a", "a", 60.0)
    assert str(failure.value) == (
        f"the SQLite file {path}: it cannot be written to: check the permissions of the file and of its directory"
    )


async def test_a_connection_that_failed_is_not_used_again(store: SQLiteStore, path: Path) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
        raise error

    assert store._opened is not None
    writer = store._opened.writer
    before = writer.opened
    with pytest.raises(BackendUnavailableError) as failure:
        await writer.write(fail)
    assert str(failure.value) == f"the SQLite file {path}: reading or writing it failed: check the disk"
    assert (await store.acquire("lock:a", "a", 60.0)).granted_to("a")
    assert writer.opened == before + 1


async def test_what_cannot_be_stored_leaves_no_transaction_open(store: SQLiteStore) -> None:
    with pytest.raises(UnicodeEncodeError):
        await store.acquire("lock:a", "\ud800", 60.0)
    assert (await store.acquire("lock:a", "a", 60.0)).granted_to("a")


# Cancellation


async def test_a_cancelled_request_is_carried_out_as_a_whole(store: SQLiteStore, path: Path) -> None:
    with stranger(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        acquire = asyncio.create_task(store.acquire("lock:a", "a", 60.0))
        await asyncio.sleep(0.05)
        acquire.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquire
        connection.execute("COMMIT")
    assert (await store.acquire("lock:b", "b", 60.0)).granted_to("b")
    record = await store.read("lock:a")
    assert record is not None
    assert record.holder == "a"  # it was sent, so the caller has to undo it


async def test_an_undo_comes_after_what_it_undoes(path: Path) -> None:
    store = SQLiteStore(path)
    async with LockAdapter(store) as backend:
        for turns in range(6):
            acquire = asyncio.create_task(backend.acquire("lock:a", f"h{turns}", 60.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            acquire.cancel()
            await asyncio.wait([acquire])
            if not acquire.cancelled():  # it was quicker
                await backend.release(acquire.result())
    async with store:
        assert [lease.holder async for lease in store.scan() if lease.live] == []


async def test_a_cancelled_close_still_closes(path: Path) -> None:
    store = SQLiteStore(path)
    await store.__aenter__()
    await store.acquire("lock:a", "a", 60.0)
    with stranger(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        request = asyncio.create_task(store.acquire("lock:b", "a", 60.0))
        await asyncio.sleep(0.02)
        close = asyncio.create_task(store.__aexit__(None, None, None))
        for _ in range(3):
            await asyncio.sleep(0.02)
            close.cancel()
        assert not close.done()
        connection.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await close
    assert (await request).granted_to("a")
    assert not store.is_open
    assert sorted(file.name for file in path.parent.glob("*")) == ["locks.db"]  # the last connection tidied up


async def test_a_cancelled_open_leaves_nothing(path: Path) -> None:
    async with SQLiteStore(path):
        pass
    store = SQLiteStore(path)
    with stranger(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(store.__aenter__())
        await asyncio.sleep(0.05)
        opening.cancel()
        await asyncio.sleep(0.05)
        connection.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not store.is_open
    async with store:
        assert (await store.acquire("lock:a", "a", 60.0)).granted_to("a")


# Those who wait


async def test_taking_and_giving_back_is_four_statements_each(store: SQLiteStore) -> None:
    statements: list[str] = []
    assert store._opened is not None
    await store._opened.writer.read(lambda c: c.set_trace_callback(statements.append))
    lease = await store.acquire("lock:a", "a", 60.0)
    await store.release(lease)
    lease = await store.acquire("lock:a", "a", 60.0)
    await store.release(lease)
    await store._opened.writer.read(lambda c: c.set_trace_callback(None))
    verbs = [" ".join(statement.split()[:2]) for statement in statements]
    unit = ["BEGIN IMMEDIATE", "SELECT name,", "INSERT OR", "COMMIT"]
    # The first one also looks for the lowest fence that it may give.
    assert verbs == ["BEGIN IMMEDIATE", "SELECT name,", "SELECT name,", "INSERT OR", "COMMIT"] + unit * 3


async def test_a_refusal_writes_nothing_unless_the_caller_will_wait(
    store: SQLiteStore, other: SQLiteStore, clock: MovableClock, path: Path
) -> None:
    await store.acquire("lock:a", "a", 60.0)
    with stranger(path) as connection:
        before = version(connection)
        await store.acquire("lock:a", "b", 60.0)
        assert await store.release(Lease("lock:a", "b", 0)) is False
        assert await store.renew(Lease("lock:a", "b", 1), 60.0) is None
        assert version(connection) == before
        await store.acquire("lock:a", "b", 60.0, waiting=True)
        assert version(connection) != before
        before = version(connection)
        await clock.advance(0.5)
        await store.acquire("lock:a", "c", 60.0, waiting=True)  # its process is marked
        await other.acquire("lock:a", "d", 60.0, waiting=True)  # another process is marked
        assert version(connection) == before
        await clock.advance(0.6)
        await store.acquire("lock:a", "b", 60.0, waiting=True)  # its mark is renewed
        assert version(connection) != before


async def test_a_holder_learns_that_another_process_waits(
    store: SQLiteStore, other: SQLiteStore, clock: MovableClock
) -> None:
    lease = await store.acquire("lock:a", "a", 60.0)
    assert not lease.waited
    await store.acquire("lock:a", "b", 60.0, waiting=True)
    assert not (await store.acquire("lock:a", "b", 60.0, waiting=True)).waited  # this process's own waiter
    assert (await other.acquire("lock:a", "c", 60.0)).waited  # and so the other one sees it
    await clock.advance(MARK + 0.001)
    assert not (await other.acquire("lock:a", "c", 60.0, waiting=True)).waited
    renewed = await store.renew(lease, 60.0)
    record = await store.read("lock:a")
    assert renewed is not None
    assert record is not None
    assert (renewed.waited, record.waited) == (True, True)
    await store.release(lease)
    assert (await store.acquire("lock:a", "b", 60.0)).waited  # it was overtaken, and still waits


async def test_a_mark_counts_for_a_while(store: SQLiteStore, other: SQLiteStore, clock: MovableClock) -> None:
    lease = await store.acquire("lock:a", "a", 60.0)
    await other.acquire("lock:a", "b", 60.0, waiting=True)
    await clock.advance(10.0)  # the safety poll of waiters, which renews the mark
    await other.acquire("lock:a", "b", 60.0, waiting=True)
    await clock.advance(MARK)
    renewed = await store.renew(lease, 60.0)
    assert renewed is not None
    assert renewed.waited
    await clock.advance(0.001)
    renewed = await store.renew(lease, 60.0)
    assert renewed is not None
    assert not renewed.waited


async def test_a_grant_ends_the_waiting_of_its_process(store: SQLiteStore, other: SQLiteStore) -> None:
    lease = await store.acquire("lock:a", "a", 60.0)
    await other.acquire("lock:a", "b", 60.0, waiting=True)
    await store.release(lease)
    lease = await other.acquire("lock:a", "b", 60.0)
    assert not (await store.acquire("lock:a", "a", 60.0)).waited
    await store.acquire("lock:a", "a", 60.0, waiting=True)
    third = await other.renew(lease, 60.0)
    assert third is not None
    assert third.waited


async def test_a_lease_that_is_passed_on_ends_the_waiting_of_its_process(
    store: SQLiteStore, other: SQLiteStore
) -> None:
    lease = await store.acquire("lock:a", "a", 60.0)
    await store.acquire("lock:a", "b", 60.0, waiting=True)
    assert (await other.acquire("lock:a", "c", 60.0)).waited
    assert await store.pass_on(lease, "b", 60.0) is not None
    assert not (await other.acquire("lock:a", "c", 60.0)).waited


async def test_there_is_one_watcher_and_only_while_there_is_a_waiter(store: SQLiteStore, clock: MovableClock) -> None:
    await store.acquire("lock:a", "a", 60.0)
    await store.read("lock:a")
    assert watchers() == []
    async with AsyncExitStack() as stack:
        for name in ("lock:a", "lock:a", "lock:b", "lock:c"):
            await stack.enter_async_context(store.watch(name))
        await asyncio.sleep(0.05)
        assert len(watchers()) == 1
    async with asyncio.timeout(10.0):
        while watchers():
            await asyncio.sleep(0.05)
    async with store.watch("lock:a"):
        assert len(watchers()) == 1


async def test_closing_ends_the_watcher(path: Path) -> None:
    store = SQLiteStore(path)
    async with AsyncExitStack() as stack:
        async with store:
            await stack.enter_async_context(store.watch("lock:a"))
            await asyncio.sleep(0.03)
        await asyncio.sleep(0)
        assert watchers() == []


async def test_a_watcher_survives_errors_and_says_so_once(
    store: SQLiteStore,
    other: SQLiteStore,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert store._opened is not None
    healthy = store._opened.table.row
    lease = await other.acquire("lock:a", "a", 60.0)

    def broken(connection: sqlite3.Connection, name: str) -> None:
        raise sqlite3.OperationalError("some trouble")

    async with store.watch("lock:a") as waiter:
        monkeypatch.setattr(store._opened.table, "row", broken)
        await asyncio.sleep(0.2)
        assert warnings(caplog) == [
            f"{path} cannot be watched, so waiters ask it from time to time: the SQLite file {path}: "
            "SQLite refused (some trouble): the cause is attached"
        ]
        monkeypatch.setattr(store._opened.table, "row", healthy)
        await other.release(lease)
        waiting = asyncio.create_task(waiter.wait(60.0))
        assert await asyncio.wait_for(waiting, 5.0)
    assert warnings(caplog)[1:] == [f"{path} can be watched again"]


async def test_a_waiter_is_not_woken_while_there_is_nothing_to_get(store: SQLiteStore, other: SQLiteStore) -> None:
    lease = await other.acquire("lock:a", "a", 60.0)
    await store.acquire("lock:a", "b", 60.0, waiting=True)
    async with store.watch("lock:a") as waiter:
        waiting = asyncio.create_task(waiter.wait(60.0))
        for _ in range(10):
            await asyncio.sleep(0.02)
            assert await other.renew(lease, 60.0) is not None
        assert not waiting.done()
        await other.release(lease)
        assert await asyncio.wait_for(waiting, 5.0)


async def test_a_free_lease_is_told_once(store: SQLiteStore, other: SQLiteStore) -> None:
    await other.release(await other.acquire("lock:a", "a", 60.0))
    async with store.watch("lock:a") as waiter:
        assert await asyncio.wait_for(waiter.wait(60.0), 5.0)
        waiting = asyncio.create_task(waiter.wait(60.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await other.release(await other.acquire("lock:a", "a", 60.0))
        assert await asyncio.wait_for(waiting, 5.0)


async def test_an_expiry_is_a_hint_too(store: SQLiteStore, other: SQLiteStore, clock: MovableClock) -> None:
    await other.acquire("lock:a", "a", 60.0)
    await store.acquire("lock:a", "b", 60.0, waiting=True)
    async with store.watch("lock:a") as waiter:
        waiting = asyncio.create_task(waiter.wait(10_000.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await clock.advance(61.0)
        assert await asyncio.wait_for(waiting, 5.0)


async def test_a_name_that_is_watched_later_is_looked_at_too(
    store: SQLiteStore, other: SQLiteStore, clock: MovableClock
) -> None:
    for name in ("lock:a", "lock:b"):
        await other.acquire(name, "a", 60.0)
        await store.acquire(name, "b", 60.0, waiting=True)
    async with store.watch("lock:a"):
        await asyncio.sleep(0.05)  # from now on nothing is written
        async with store.watch("lock:b") as waiter:
            await asyncio.sleep(0.05)
            await clock.advance(61.0)
            assert await asyncio.wait_for(waiter.wait(10_000.0), 5.0)


async def test_a_lease_of_an_earlier_start_of_the_host_is_free_to_those_who_wait(
    path: Path, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_table, "boot_id", lambda: "first")
    async with SQLiteStore(path, clock=clock) as store:
        await store.acquire("lock:a", "a", 60.0)
    monkeypatch.setattr(sqlite_table, "boot_id", lambda: "second")
    async with SQLiteStore(path, clock=clock) as store, store.watch("lock:a") as waiter:
        assert await asyncio.wait_for(waiter.wait(10_000.0), 5.0)
        waiting = asyncio.create_task(waiter.wait(10_000.0))
        await asyncio.sleep(0.1)
        await clock.advance(61.0)
        await asyncio.sleep(0.1)
        assert not waiting.done()  # told once, as free leases are, and not for its end
        waiting.cancel()


async def test_one_waiter_asks_to_be_marked_when_nobody_is(store: SQLiteStore, other: SQLiteStore) -> None:
    await other.acquire("lock:a", "a", 60.0)
    async with store.watch("lock:a") as waiter:
        assert await asyncio.wait_for(waiter.wait(60.0), 5.0)
        waiting = asyncio.create_task(waiter.wait(60.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()  # once for each holder, though it did not ask
        await store.acquire("lock:a", "b", 60.0, waiting=True)
        waiting.cancel()


async def test_a_waiter_finds_the_lease_after_the_file_was_deleted(
    store: SQLiteStore, other: SQLiteStore, path: Path
) -> None:
    await other.acquire("lock:a", "a", 60.0)
    await store.acquire("lock:a", "b", 60.0, waiting=True)
    async with store.watch("lock:a") as waiter:
        await asyncio.sleep(0.05)
        remove(path)
        assert await asyncio.wait_for(waiter.wait(60.0), 5.0)
        assert (await store.acquire("lock:a", "b", 60.0)).granted_to("b")


# Retention


async def names_in(path: Path) -> list[str]:
    with stranger(path) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM grelmicro_leases WHERE name <> '' ORDER BY 1")]


async def test_old_records_of_free_locks_are_dropped_and_nothing_else(path: Path, clock: MovableClock) -> None:
    async with SQLiteStore(path, clock=clock) as store:
        for name in ("lock:old", "tasklock:old", "leader:old", "schedule:old", "else:old"):
            await store.release(await store.acquire(name, "a", 60.0))
        await store.release(await store.acquire("lock:data", "a", 60.0, data={"k": "v"}))
        await store.acquire("lock:never-released", "a", 60.0)
        await store.acquire("lock:held", "a", 300 * DAY)
        await clock.advance(7 * DAY)
        await store.release(await store.acquire("lock:young", "a", 60.0))
        await clock.advance(1.0)
    kept = ["else:old", "leader:old", "lock:data", "lock:held", "lock:young", "schedule:old"]
    assert await names_in(path) == kept
    await clock.advance(7 * DAY)
    async with SQLiteStore(path, clock=clock):  # by opening
        assert await names_in(path) == [name for name in kept if name != "lock:young"]


async def test_the_retention_can_be_set(path: Path, clock: MovableClock) -> None:
    async with SQLiteStore(path, clock=clock, retention=60.0) as store:
        await store.release(await store.acquire("lock:a", "a", 5.0))
        await clock.advance(60.0)
    assert await names_in(path) == ["lock:a"]
    await clock.advance(0.001)
    async with SQLiteStore(path, clock=clock, retention=60.0):
        assert await names_in(path) == []


async def test_what_a_killed_process_left_is_dropped_with_its_data(path: Path, clock: MovableClock) -> None:
    async with SQLiteStore(path, clock=clock) as store:
        for name in ("process:killed", "break:lock:a", "lock:data"):
            await store.acquire(name, "a", 5.0, data={"k": "v"})
        await clock.advance(8 * DAY)
    async with SQLiteStore(path, clock=clock):
        assert await names_in(path) == ["lock:data"]


async def test_a_fence_goes_on_after_its_record_was_dropped(path: Path, clock: MovableClock) -> None:
    async with SQLiteStore(path, clock=clock) as store:
        fences = []
        for number in range(3):
            fences.append((await store.acquire(f"lock:{number}", "a", 5.0)).fence)
            await clock.advance(1.0)
    await clock.advance(8 * DAY)
    async with SQLiteStore(path, clock=clock):
        assert await names_in(path) == []
    clock.shift_wall(-30 * DAY)  # an administrator's mistake
    async with SQLiteStore(path, clock=clock) as store:
        assert (await store.acquire("lock:0", "a", 5.0)).fence > max(fences)


async def test_old_records_are_dropped_now_and_then_while_it_is_in_use(path: Path, clock: MovableClock) -> None:
    many = sqlite_table.BATCH + 100
    async with SQLiteStore(path, clock=clock) as store:
        await asyncio.gather(*(store.acquire(f"lock:{number:04}", "a", 5.0) for number in range(many)))
        await clock.advance(SWEEP_INTERVAL + 8 * DAY)
        for left in (100, 0):
            await store.acquire("z", "a", 5.0)
            await store.acquire("z", "a", 5.0)  # after what the first one left to do
            assert len(await names_in(path)) == left + 1
            await clock.advance(1.0)


async def test_a_record_that_is_taken_again_meanwhile_is_not_dropped(store: SQLiteStore, clock: MovableClock) -> None:
    await store.release(await store.acquire("lock:a", "a", 5.0))
    assert store._opened is not None
    table, writer = store._opened.table, store._opened.writer
    seen = await writer.read(table.row, "lock:a")
    assert seen is not None
    lease = await store.acquire("lock:a", "b", 5.0)
    await writer.write(table._drop, [seen])
    assert await store.renew(lease, 5.0) is not None


@pytest.mark.slow
async def test_closing_puts_the_log_back_into_the_file(tmp_path: Path) -> None:
    """Two connections that closed at the same moment would each leave that to the other: the writer waits."""
    release = threading.Event()
    for _ in range(20):
        async with SQLiteStore(tmp_path / "locks.db") as store:
            await store.acquire("lock:a", "a", 5)
            await store.read("lock:a")
            assert store._opened is not None
            lanes = store._opened.reader, store._opened.writer
            release.clear()
            lanes[0].later(lambda _: release.wait(10.0))
            closing = asyncio.create_task(store.__aexit__(None, None, None))
            await asyncio.sleep(0.01)
            assert [len(lane._connections) for lane in lanes] == [1, 1]
            release.set()
            await closing
        assert os.listdir(tmp_path) == ["locks.db"]
