"""Leases in a SQLite file: for the processes of one host."""

import asyncio
import json
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import Context
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from grelmicro.backends.sqlite_file import check_path, check_place
from grelmicro.backends.sqlite_lane import Lane, Unit, transact
from grelmicro.clock import Clock, Signal
from grelmicro.config import check_seconds
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter, Provider, ScheduleAdapter
from grelmicro.errors import BackendUnavailableError, SettingsValidationError
from grelmicro.leases.lease import NO_DATA, Lease, LeaseStore, SignalWaiter, Waiter
from grelmicro.leases.retention import RETENTION, droppable
from grelmicro.leases.rules import owns, renewed, taken, vacated

logger = logging.getLogger("grelmicro.coordination")

PROBE_INTERVAL = 0.01
"""Seconds between two looks at what other processes changed, while somebody waits."""

LONGEST_PROBE_PAUSE = 1.0
"""Seconds between two looks while looking fails."""

MARK = 12.0
"""Seconds for which the mark of a waiter counts; it comes back sooner if it still waits (`SAFETY_POLL`)."""

MARK_AGAIN = 1.0
"""Age in seconds from which on a waiter renews its mark."""

SWEEP_INTERVAL = 3600.0
"""Seconds between two rounds through the records for those to drop."""

SWEEP_BATCH, SWEEP_LIMIT = 500, 0.1
"""Records looked at in one go, and seconds for which opening and closing do so."""

COLUMNS = (
    "namespace TEXT NOT NULL, name TEXT NOT NULL, holder TEXT NOT NULL, fence INTEGER NOT NULL, "
    "transitions INTEGER NOT NULL, acquired_at INTEGER NOT NULL, renewed_at INTEGER NOT NULL, "
    "expires_at INTEGER NOT NULL, incarnation TEXT NOT NULL, data TEXT, waiter TEXT NOT NULL, "
    "waited_at INTEGER NOT NULL"
)
NAMES = tuple(column.split()[0] for column in COLUMNS.split(", "))

CREATE = f"CREATE TABLE IF NOT EXISTS grelmicro_leases ({COLUMNS}, PRIMARY KEY (namespace, name)) WITHOUT ROWID"
FIELDS = ", ".join(NAMES[1:])
READ = f"SELECT {FIELDS} FROM grelmicro_leases WHERE namespace = ? AND name = ?"
WRITE = f"INSERT OR REPLACE INTO grelmicro_leases VALUES ({', '.join('?' * len(NAMES))})"
PAGE = f"SELECT {FIELDS} FROM grelmicro_leases WHERE namespace = ? AND name > ? ORDER BY name LIMIT {SWEEP_BATCH}"
MARK_WAITER = "UPDATE grelmicro_leases SET waiter = ?, waited_at = ? WHERE namespace = ? AND name = ?"
EXPIRED = "namespace = ? AND holder <> '' AND (incarnation <> ? OR expires_at < ?)"
ANY_EXPIRED = f"SELECT 1 FROM grelmicro_leases WHERE {EXPIRED} LIMIT 1"
# The incarnation stays: it says that the next fence has to come from the clock.
VACATE_EXPIRED = f"UPDATE grelmicro_leases SET holder = '', expires_at = 0 WHERE {EXPIRED}"
DROP = "DELETE FROM grelmicro_leases WHERE namespace = ? AND name = ?"

FLOOR = ""
"""The name of the record whose fence is the highest that was dropped with its record; no lease has this name."""


class Row(NamedTuple):
    """A record as it is in the table, without its namespace; times in microseconds."""

    name: str
    holder: str
    fence: int
    transitions: int
    acquired_at: int
    renewed_at: int
    expires_at: int
    incarnation: str
    data: str | None
    waiter: str
    waited_at: int


def boot_id() -> str:
    """What changes whenever the host is started; "" where that is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class _Watched:
    """What is known of a name that somebody in this process waits for."""

    __slots__ = ("hinted", "looked", "row", "signal", "unmarked")

    def __init__(self) -> None:
        self.signal = Signal()
        self.looked = False
        self.row: Row | None = None
        self.hinted: tuple[object, ...] | None = None  # the free state that was hinted last
        self.unmarked = (0, 0)  # a fence, and in how many looks no process was marked as waiting for it


class SQLiteStore(LeaseStore):
    """Leases in a SQLite file of their own, shared by the processes of one host.

    A lease is judged by a clock of the host that goes on while it sleeps, and ends when the host is started anew.

    Args:
        path: the file, created when it is missing, on a local disk; None: that of the environment variable SQLITE_PATH.
        namespace: separates applications that share one file; 1 to 63 letters, digits, `_`, `-` or `.`.
        clock: the time of leases; tests give one that they move.
        retention: seconds for which a free lock's record is kept.

    Raises:
        SettingsValidationError: a setting breaks a rule; opening raises it when no file of leases can be at that path.
    """

    scope = "host"
    resolution = 0.000_001
    ordered = True
    notice = 0.03

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: float = RETENTION,
    ) -> None:
        super().__init__(namespace=namespace, clock=clock)
        self.path = check_path(_path_from_environment() if path is None else path)
        self._retention = check_seconds("retention", retention)
        self._incarnation = ""
        self._me = ""
        self._writer: Lane | None = None
        self._reader: Lane | None = None
        self._sweep_at = 0.0
        self._swept = FLOOR  # the last name that was looked at in this round
        self._watched: dict[str, _Watched] = {}
        self._prober: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open the file, and create it if there is none.

        Raises:
            SettingsValidationError: no file of leases can be there, or it is a file of something else.
            BackendUnavailableError: it cannot be opened now.
        """
        check_place(self.path)
        self._incarnation = boot_id()
        self._me = token_hex(8)
        self._sweep_at = self.clock.now() + SWEEP_INTERVAL
        self._writer, self._reader = Lane(self.path, self._prepare), Lane(self.path, self._prepare)
        try:
            await self._writer.read(self._sweep)
        except BackendUnavailableError as error:
            await self._close_lanes()
            code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY):
                raise SettingsValidationError(f"SQLite: path: {str(error).partition(': ')[2]}") from error
            raise
        except BaseException:
            await self._close_lanes()
            raise

    async def close(self) -> None:
        """Vacate what expired, drop what is old, and close the file; a cancellation waits for that."""
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None
        await self._close_lanes(self._tidy)

    def abandon(self) -> None:
        """Forget the waiters of a loop that is gone, and close its connections; in a child they are the parent's."""
        self._watched.clear()
        self._prober = None
        for lane in (self._writer, self._reader):
            if lane is not None:
                lane.close()

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        lane = self._for_writing()
        lease = await lane.write(self._acquire, name, holder, ttl, data, waiting)
        if self.clock.now() >= self._sweep_at:
            self._sweep_at += SWEEP_INTERVAL
            lane.later(self._sweep_batch)
        return lease

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        (answer,) = await self._for_writing().write(self._renew, [(lease, ttl)], data)
        return self._renewed(answer)

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Renew each lease by its ttl, all in one transaction; the survivors."""
        answers = await self._for_writing().write(self._renew, renewals, None)
        return [lease for answer in answers if (lease := self._renewed(answer)) is not None]

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        fence = await self._for_writing().write(self._release, lease, data)
        if fence is None:
            return False
        if (watched := self._watched.get(lease.name)) is not None:
            watched.hinted = (fence, "", 0)  # the prober need not tell it again
            watched.signal.send()
        return True

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        return await self._for_reading().read(self._read, name)

    async def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        after = prefix
        # A name that is the prefix itself comes first, and a page begins after a name.
        first = await self.read(prefix) if prefix else None
        page = [] if first is None else [first]
        while True:
            for lease in page:
                yield lease
            page = await self._for_reading().read(self._page, after, prefix)
            if not page:
                return
            after = page[-1].name

    def _renewed(self, answer: tuple[Lease, bool] | None) -> Lease | None:
        """The lease of an answer; whoever waits for one that was shortened learns it."""
        if answer is None:
            return None
        lease, shortened = answer
        if shortened and (watched := self._watched.get(lease.name)) is not None:
            watched.signal.send()
        return lease

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Waiter]:
        """See `LeaseStore.watch`; a release in this process is a hint at once, one in another process soon."""
        self.check_open()
        watched = self._watched.setdefault(name, _Watched())
        waiter = SignalWaiter(watched.signal, self.clock)
        if self._prober is None or self._prober.done():
            # A context of its own: the task may live longer than the request that started it.
            self._prober = asyncio.get_running_loop().create_task(
                self._probe(), name="grelmicro-sqlite-prober", context=Context()
            )
        try:
            yield waiter
        finally:
            waiter.close()
            if watched.signal.idle and self._watched.get(name) is watched:
                del self._watched[name]

    def _for_writing(self) -> Lane:
        self.check_open()
        assert self._writer is not None
        return self._writer

    def _for_reading(self) -> Lane:
        self.check_open()
        assert self._reader is not None
        return self._reader

    # What follows down to the prober runs on the threads of the lanes, in one transaction each where it writes.

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the file what it has to be; several processes may do so at once."""
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            # Needs the file for itself for a moment, and fails at once if it has not: the lane tries again.
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != ("wal",):
                raise BackendUnavailableError(f"the SQLite file {self.path} cannot keep a write-ahead log: {mode[0]}")
        # A power failure may undo the last commits, but every lease ends with the host anyway.
        connection.execute("PRAGMA synchronous = NORMAL")
        found = _columns(connection)
        if not found:
            transact(connection, lambda inner: inner.execute(CREATE))
            found = _columns(connection)
        if found != NAMES:
            raise SettingsValidationError(
                "SQLite: path is a file with a table grelmicro_leases of another version of this package: "
                "let all processes use one version, or name another file"
            )

    def _now(self) -> float:
        """The clock of leases, in whole microseconds as it is stored. Read it inside a transaction, never before."""
        # Where nothing tells one start of the host from the next, only wall time outlives it.
        return round((self.clock.now() if self._incarnation else self.clock.wall()) * 1e6) / 1e6

    def _acquire(
        self,
        connection: sqlite3.Connection,
        name: str,
        holder: str,
        ttl: float,
        data: Mapping[str, str] | None,
        waiting: bool,
    ) -> Lease:
        now, wall = self._now(), self.clock.wall()
        row = self._row(connection, name)
        record = None if row is None else self._lease(row, now)
        first_fence = self._first_fence(connection, row, wall)
        lease = taken(record, name, holder, max(ttl, self.resolution), data, now, wall, first_fence)
        if lease is not None:
            self._write(connection, lease, row, granted=True)
            return lease
        assert row is not None
        assert record is not None
        if waiting and self._may_mark(row, now):
            connection.execute(MARK_WAITER, (self._me, _micros(now), self.namespace, name))
        return record

    def _renew(
        self,
        connection: sqlite3.Connection,
        renewals: Sequence[tuple[Lease, float]],
        data: Mapping[str, str] | None,
    ) -> list[tuple[Lease, bool] | None]:
        """For each the renewed lease, and whether it was shortened."""
        now, wall = self._now(), self.clock.wall()
        answers: list[tuple[Lease, bool] | None] = []
        for lease, ttl in renewals:
            row = self._row(connection, lease.name)
            record = None if row is None else self._lease(row, now)
            renewal = renewed(record, lease, max(ttl, self.resolution), data, now, wall)
            if record is None or renewal is None:
                answers.append(None)
                continue
            self._write(connection, renewal, row)
            answers.append((renewal, renewal.expires_at < record.expires_at))
        return answers

    def _release(self, connection: sqlite3.Connection, lease: Lease, data: Mapping[str, str] | None) -> int | None:
        """The fence of what was released; None if it was not the caller's."""
        now = self._now()
        row = self._row(connection, lease.name)
        record = None if row is None else self._lease(row, now)
        if record is None or not owns(record, lease, now):
            return None
        self._write(connection, vacated(record, data=data, now=now), row)
        return record.fence

    def _read(self, connection: sqlite3.Connection, name: str) -> Lease | None:
        row = self._row(connection, name)
        return None if row is None else self._lease(row, self._now())

    def _page(self, connection: sqlite3.Connection, after: str, prefix: str) -> list[Lease]:
        rows = map(Row._make, connection.execute(PAGE, (self.namespace, after)).fetchall())
        now = self._now()
        # Names with one prefix stand together, so the first other one ends them.
        leases = []
        for row in rows:
            if not row.name.startswith(prefix):
                break
            leases.append(self._lease(row, now))
        return leases

    def _row(self, connection: sqlite3.Connection, name: str) -> Row | None:
        found = connection.execute(READ, (self.namespace, name)).fetchone()
        return None if found is None else Row._make(found)

    def _lease(self, row: Row, now: float) -> Lease:
        """The record; one of an earlier start of the host is not live, whatever its numbers say."""
        expires_at = row.expires_at / 1e6 if row.incarnation == self._incarnation else -1.0
        return Lease(
            row.name,
            row.holder,
            row.fence,
            row.transitions,
            row.acquired_at / 1e6,
            row.renewed_at / 1e6,
            expires_at,
            now,
            json.loads(row.data) if row.data else NO_DATA,
            row.waiter not in ("", self._me) and self._fresh_mark(row, now),
        )

    def _write(
        self, connection: sqlite3.Connection, lease: Lease, before: Row | None, *, granted: bool = False
    ) -> None:
        """Write the record; a grant ends the waiting of this process."""
        waiter, waited_at = ("", 0) if before is None else (before.waiter, before.waited_at)
        if granted and waiter == self._me:
            waiter, waited_at = "", 0
        if before is not None:
            lease.waited = waiter != "" and waiter != self._me and self._fresh_mark(before, lease.now)
        connection.execute(
            WRITE,
            (
                self.namespace,
                lease.name,
                lease.holder,
                lease.fence,
                lease.transitions,
                _micros(lease.acquired_at),
                _micros(lease.renewed_at),
                _micros(lease.expires_at),
                self._incarnation,
                json.dumps(dict(lease.data), ensure_ascii=False) if lease.data else None,
                waiter,
                waited_at,
            ),
        )

    def _first_fence(self, connection: sqlite3.Connection, row: Row | None, wall: float) -> int:
        """The lowest fence that may be given.

        For a record that does not exist it is the clock's microseconds since 1970. Fences that began there and grew by
        one in each transaction, which takes more than a microsecond, are below it; so they are after a host's crash
        that undid the last commits. Should the wall clock have been put back, the floor is above what was dropped.
        """
        if row is not None:
            return 0 if row.incarnation == self._incarnation else _micros(wall)
        floor = self._row(connection, FLOOR)
        return _micros(wall) if floor is None else max(_micros(wall), floor.fence + 1)

    def _fresh_mark(self, row: Row, now: float) -> bool:
        return row.waiter != "" and row.incarnation == self._incarnation and 0 <= now - row.waited_at / 1e6 <= MARK

    def _may_mark(self, row: Row, now: float) -> bool:
        if not self._fresh_mark(row, now):
            return True
        return row.waiter == self._me and now - row.waited_at / 1e6 > MARK_AGAIN

    def _tidy(self, connection: sqlite3.Connection) -> None:
        """Vacate what expired, and drop what is old."""
        expired = (self.namespace, self._incarnation, _micros(self._now()))
        if connection.execute(ANY_EXPIRED, expired).fetchone() is not None:
            transact(connection, lambda inner: inner.execute(VACATE_EXPIRED, expired))
        self._sweep(connection)

    def _sweep(self, connection: sqlite3.Connection) -> None:
        """Drop old records, in transactions of their own and for a moment at most."""
        until = time.monotonic() + SWEEP_LIMIT
        while self._sweep_batch(connection) and time.monotonic() < until:
            pass

    def _sweep_batch(self, connection: sqlite3.Connection) -> bool:
        """Look at the next records of the round for old ones; whether there are more to look at."""
        now, oldest = self._now(), self.clock.wall() - self._retention
        rows = [Row._make(found) for found in connection.execute(PAGE, (self.namespace, self._swept)).fetchall()]
        old = [row for row in rows if row.renewed_at / 1e6 < oldest and self._droppable(row, now)]
        if old:
            transact(connection, self._drop, old)
        more = len(rows) == SWEEP_BATCH
        self._swept = rows[-1].name if more else FLOOR
        if more:
            self._sweep_at = self.clock.now() + 1.0
        return more

    def _droppable(self, row: Row, now: float) -> bool:
        lease = self._lease(row, now)
        if not lease.live:
            lease.holder = ""
        return droppable(lease)

    def _drop(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        unchanged = [row for row in rows if self._row(connection, row.name) == row]
        connection.executemany(DROP, [(self.namespace, row.name) for row in unchanged])
        floor = self._row(connection, FLOOR)
        highest = max((row.fence for row in (*unchanged, *((floor,) if floor else ()))), default=0)
        self._write(connection, Lease(FLOOR, "", highest), floor)

    # The prober: what other processes changed, for those who wait in this one.

    async def _probe(self) -> None:
        """Look again and again while somebody waits."""
        version: tuple[int, int] | None = None
        pause = PROBE_INTERVAL
        while self._watched:
            try:
                version = await self._look(version)
            except Exception as error:
                if pause == PROBE_INTERVAL:
                    logger.warning("%s cannot be watched, waiters ask it now and then: %s", self.path, error)
                version, pause = None, min(pause * 2, LONGEST_PROBE_PAUSE)
            else:
                if pause > PROBE_INTERVAL:
                    logger.warning("%s can be watched again", self.path)
                pause = PROBE_INTERVAL
            # The time of other processes passes however a test moves the clock of leases.
            await asyncio.sleep(pause)

    async def _look(self, version: tuple[int, int] | None) -> tuple[int, int]:
        """Read the watched records if the file changed since `version`, and give hints; the version read now."""
        if not all(watched.looked for watched in self._watched.values()):
            version = None
        found, rows = await self._for_reading().read(self._changes, version, tuple(self._watched))
        now = self._now()
        for name, watched in self._watched.items():
            if rows is not None and name in rows:
                watched.looked, watched.row = True, rows[name]
            if watched.looked and self._is_news(watched, now):
                watched.signal.send()
        return found

    def _changes(
        self, connection: sqlite3.Connection, version: tuple[int, int] | None, names: Sequence[str]
    ) -> tuple[tuple[int, int], dict[str, Row | None] | None]:
        """The version of the file, and the records of `names` if it is not `version`. Runs on the reader's thread."""
        assert self._reader is not None
        # The number is the connection's own: a new connection, perhaps to another file, may have the same one.
        found = (self._reader.opened, int(connection.execute("PRAGMA data_version").fetchone()[0]))
        if found == version:
            return found, None
        return found, {name: self._row(connection, name) for name in names}

    def _is_news(self, watched: _Watched, now: float) -> bool:
        """Whether a waiter should ask now.

        It should when the lease is free, once for each time that it becomes free. While another process holds it there
        is nothing to ask, so a hand-over wakes only the waiters of those processes that saw it free in between; but
        when no process is marked as waiting, one has to ask in order to be marked, or the holder's would never yield.
        """
        row = watched.row
        if row is None or not self._lease(row, now).live:
            free = () if row is None else (row.fence, row.holder, row.expires_at)
            news, watched.hinted = free != watched.hinted, free
            return news
        if self._fresh_mark(row, now):
            watched.unmarked = (0, 0)
            return False
        fence, looks = watched.unmarked
        watched.unmarked = (row.fence, looks + 1 if fence == row.fence else 1)
        # Whoever just began to wait is about to ask anyway: that is seen at the next look.
        return watched.unmarked[1] == 2

    async def _close_lanes(self, last: Unit[[], object] | None = None) -> None:
        """Close both connections and end their threads, however often the caller is cancelled meanwhile."""
        writer, reader = self._writer, self._reader
        self._writer = self._reader = None
        if writer is None or reader is None:
            return
        await _finish([reader.close(), writer.close(last)])
        reader.join()
        writer.join()


class SQLiteProvider(Provider):
    """One SQLite file for locks, elections and schedules.

    Args:
        path: the file; None: that of the environment variable SQLITE_PATH.
        namespace: separates applications that share one file.
        clock: the time of leases; tests give one that they move.
        retention: seconds for which a free lock's record is kept.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: float = RETENTION,
    ) -> None:
        store = SQLiteStore(path, namespace=namespace, clock=clock, retention=retention)
        super().__init__(store, url=f"sqlite:///{quote(store.path)}")

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "grelmicro") -> Self:
        """The provider of `sqlite:///relative.db` or `sqlite:////absolute.db`.

        Raises:
            SettingsValidationError: the URL has another form, or options.
        """
        parts = urlsplit(url)
        if parts.scheme != "sqlite" or parts.netloc or parts.fragment or not parts.path.startswith("/"):
            raise SettingsValidationError(
                "SQLite: url should be sqlite:/// and a path: sqlite:///locks.db for a file in the working directory, "
                "sqlite:////var/lib/shop/locks.db for any other"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if options.keys() - {"namespace"}:
            raise SettingsValidationError("SQLite: url has an option that is not known: the only one is namespace")
        return cls(unquote(parts.path[1:]), namespace=options.get("namespace", namespace))


class SQLiteLockAdapter(LockAdapter):
    """Locks in a SQLite file; the arguments are those of `SQLiteStore`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(SQLiteStore(path, namespace=namespace, clock=clock))


class SQLiteLeaderElectionAdapter(LeaderElectionAdapter):
    """Elections in a SQLite file; the arguments are those of `SQLiteStore`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(SQLiteStore(path, namespace=namespace, clock=clock))


class SQLiteScheduleAdapter(ScheduleAdapter):
    """Schedules in a SQLite file; the arguments are those of `SQLiteStore`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(SQLiteStore(path, namespace=namespace, clock=clock))


def _path_from_environment() -> str:
    path = os.environ.get("SQLITE_PATH")
    if path is None:
        raise SettingsValidationError(
            "SQLite: path is missing: give it, such as SQLiteProvider('locks.db'), "
            "or set the environment variable SQLITE_PATH"
        )
    return path


def _columns(connection: sqlite3.Connection) -> tuple[str, ...]:
    return tuple(found[1] for found in connection.execute("PRAGMA table_info(grelmicro_leases)").fetchall())


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


async def _finish(futures: Sequence["Future[None]"]) -> None:
    """Await all of them, and be cancelled only then."""
    together = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    cancelled: asyncio.CancelledError | None = None
    while not together.done():
        try:
            await asyncio.shield(together)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
