"""The table of leases in a SQLite file: what each operation does to it."""

import json
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from grelmicro.backends.sqlite.lane import transact
from grelmicro.clock import Clock
from grelmicro.errors import BackendUnavailableError, SettingsValidationError
from grelmicro.leases.lease import NO_DATA, Lease
from grelmicro.leases.marks import MARK, MARK_AGAIN
from grelmicro.leases.retention import droppable
from grelmicro.leases.rules import granted, owns, renewed, taken, vacated

logger = logging.getLogger("grelmicro.coordination")

BATCH = 500
"""Records that are read in one go."""

BOOT_SLACK = 60.0
"""Seconds by which the wall clock may have been wrong when the host was started."""

SWEEP_LIMIT = 0.1
"""Seconds for which opening and closing look for old records."""

COLUMNS = (
    "namespace TEXT NOT NULL, name TEXT NOT NULL, holder TEXT NOT NULL, fence INTEGER NOT NULL, "
    "transitions INTEGER NOT NULL, acquired_at INTEGER NOT NULL, renewed_at INTEGER NOT NULL, "
    "expires_at INTEGER NOT NULL, incarnation TEXT NOT NULL, data TEXT, waiter TEXT NOT NULL, "
    "waited_at INTEGER NOT NULL"
)
NAMES = tuple(column.split()[0] for column in COLUMNS.split(", "))
FIELDS = ", ".join(NAMES[1:])

CREATE = f"CREATE TABLE IF NOT EXISTS grelmicro_leases ({COLUMNS}, PRIMARY KEY (namespace, name)) WITHOUT ROWID"
READ = f"SELECT {FIELDS} FROM grelmicro_leases WHERE namespace = ? AND name = ?"
PAGE = f"SELECT {FIELDS} FROM grelmicro_leases WHERE namespace = ? AND name > ? ORDER BY name LIMIT {BATCH}"
WRITE = f"INSERT OR REPLACE INTO grelmicro_leases VALUES ({', '.join('?' * len(NAMES))})"
MARK_WAITER = "UPDATE grelmicro_leases SET waiter = ?, waited_at = ? WHERE namespace = ? AND name = ?"
EXPIRED = "namespace = ? AND holder <> '' AND (incarnation <> ? OR expires_at < ?)"
ANY_EXPIRED = f"SELECT 1 FROM grelmicro_leases WHERE {EXPIRED} LIMIT 1"
# The incarnation stays what it was: it tells that the next fence has to come from the clock.
VACATE_EXPIRED = f"UPDATE grelmicro_leases SET holder = '', expires_at = 0 WHERE {EXPIRED}"
DROP = "DELETE FROM grelmicro_leases WHERE namespace = ? AND name = ?"

FLOOR = ""
"""The name of the record that keeps the highest fence of those that were dropped. No lease has this name."""


class Row(NamedTuple):
    """A record as it is stored, but for its namespace; times in microseconds."""

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
    """What changes whenever the host is started; "" where nothing tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Table:
    """The records of one namespace. What takes a connection runs on the thread of a lane.

    Args:
        namespace: whose records.
        clock: the time of leases.
        retention: seconds for which a free lock's record is kept.
    """

    def __init__(self, namespace: str, clock: Clock, retention: float) -> None:
        self._namespace = namespace
        self._clock = clock
        self._retention = retention
        self._swept = FLOOR  # the last name that was looked at in this round
        self._incarnation = boot_id()
        self._warned = False
        self.me = token_hex(8)
        """This process, as others see it waiting."""

    def now(self) -> float:
        """The clock of leases, in whole microseconds as it is stored.

        To write, it is read inside the transaction: by a time from before, which waiting for the file has made old, a
        lease would seem live that has expired, and be renewed although another process may have seen its end.
        """
        # Where nothing tells one start of the host from the next, only the wall clock outlives it.
        return round((self._clock.now() if self._incarnation else self._clock.wall()) * 1e6) / 1e6

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Make the file what it has to be, whoever else is doing so at the same moment."""
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            # This needs the file for itself, and fails at once when it is in use: then the lane tries again.
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise BackendUnavailableError(f"the SQLite file cannot have a write-ahead log, only '{mode}'")
        # A power failure may undo the last commits; but every lease ends with the host, and fences begin anew.
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

    def acquire(
        self,
        connection: sqlite3.Connection,
        name: str,
        holder: str,
        ttl: float,
        data: Mapping[str, str] | None,
        waiting: bool,
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        now, wall = self.now(), self._clock.wall()
        row = self.row(connection, name)
        record = None if row is None else self._lease(row, now)
        lease = taken(record, name, holder, ttl, data, now, wall, self._first_fence(connection, row, wall))
        if lease is not None:
            if row is not None and row.incarnation != self._incarnation:
                self._look_for_other_hosts(row, now, wall)
            return self._write(connection, lease, row, granted=True)
        assert row is not None
        assert record is not None
        if waiting and self._may_mark(row, now):
            connection.execute(MARK_WAITER, (self.me, _micros(now), self._namespace, name))
        return record

    def renew(
        self,
        connection: sqlite3.Connection,
        renewals: Sequence[tuple[Lease, float]],
        data: Mapping[str, str] | None,
    ) -> list[tuple[Lease, bool]]:
        """The survivors, each with whether it was shortened; see `LeaseStore.renew`."""
        now, wall = self.now(), self._clock.wall()
        survivors = []
        for lease, ttl in renewals:
            row = self.row(connection, lease.name)
            record = None if row is None else self._lease(row, now)
            renewal = renewed(record, lease, ttl, data, now, wall)
            if record is not None and renewal is not None:
                shortened = renewal.expires_at < record.expires_at
                survivors.append((self._write(connection, renewal, row), shortened))
        return survivors

    def release(self, connection: sqlite3.Connection, lease: Lease, data: Mapping[str, str] | None) -> Lease | None:
        """The record set free; None if the lease was not the caller's. See `LeaseStore.release`."""
        now = self.now()
        row = self.row(connection, lease.name)
        record = None if row is None else self._lease(row, now)
        if record is None or not owns(record, lease, now):
            return None
        return self._write(connection, vacated(record, data, now), row)

    def raise_fence(self, connection: sqlite3.Connection, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        now = self.now()
        row = self.row(connection, lease.name)
        record = None if row is None else self._lease(row, now)
        if record is None or not owns(record, lease, now):
            return None
        return self._write(connection, replace(record, fence=max(record.fence, least)), row)

    def pass_on(self, connection: sqlite3.Connection, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        now, wall = self.now(), self._clock.wall()
        row = self.row(connection, lease.name)
        record = None if row is None else self._lease(row, now)
        if record is None or not owns(record, lease, now):
            return None
        lease = granted(vacated(record, None, now), record.name, holder, ttl, None, now, wall, 0)
        return self._write(connection, lease, row, granted=True)

    def read(self, connection: sqlite3.Connection, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        row = self.row(connection, name)
        return None if row is None else self._lease(row, self.now())

    def page(self, connection: sqlite3.Connection, after: str, prefix: str) -> list[Lease]:
        """The next records whose name begins with `prefix`, in the order of their names."""
        leases = []
        for row in self._rows_after(connection, after):
            # Those with one prefix stand together.
            if not row.name.startswith(prefix):
                break
            leases.append(self._lease(row, self.now()))
        return leases

    def row(self, connection: sqlite3.Connection, name: str) -> Row | None:
        """The record as it is stored."""
        found = connection.execute(READ, (self._namespace, name)).fetchone()
        return None if found is None else Row._make(found)

    def is_live(self, row: Row, now: float) -> bool:
        """Whether it is held; one of an earlier start of the host is not, whatever its numbers say."""
        return row.holder != "" and row.incarnation == self._incarnation and row.expires_at / 1e6 >= now

    def is_marked(self, row: Row, now: float) -> bool:
        """Whether a process said, not long ago, that it waits."""
        return row.waiter != "" and row.incarnation == self._incarnation and 0 <= now - row.waited_at / 1e6 <= MARK

    def tidy(self, connection: sqlite3.Connection) -> None:
        """Vacate what expired, and drop what is old."""
        expired = (self._namespace, self._incarnation, _micros(self.now()))
        if connection.execute(ANY_EXPIRED, expired).fetchone() is not None:
            transact(connection, lambda inner: inner.execute(VACATE_EXPIRED, expired))
        self.sweep(connection)

    def sweep(self, connection: sqlite3.Connection) -> None:
        """Drop old records, a few at a time and for a moment at most."""
        until = time.monotonic() + SWEEP_LIMIT
        while self.sweep_some(connection) and time.monotonic() < until:
            pass

    def sweep_some(self, connection: sqlite3.Connection) -> bool:
        """Drop the old ones among the next records of the round; whether it goes on."""
        now, oldest = self.now(), _micros(self._clock.wall() - self._retention)
        rows = self._rows_after(connection, self._swept)
        old = [row for row in rows if row.renewed_at < oldest and self._is_droppable(row, now)]
        if old:
            transact(connection, self._drop, old)
        self._swept = rows[-1].name if len(rows) == BATCH else FLOOR
        return self._swept != FLOOR

    def _rows_after(self, connection: sqlite3.Connection, name: str) -> list[Row]:
        return [Row._make(found) for found in connection.execute(PAGE, (self._namespace, name)).fetchall()]

    def _lease(self, row: Row, now: float) -> Lease:
        return Lease(
            row.name,
            row.holder,
            row.fence,
            row.transitions,
            row.acquired_at / 1e6,
            row.renewed_at / 1e6,
            row.expires_at / 1e6 if row.incarnation == self._incarnation else -1.0,
            now,
            json.loads(row.data) if row.data else NO_DATA,
            row.waiter not in ("", self.me) and self.is_marked(row, now),
        )

    def _write(
        self, connection: sqlite3.Connection, lease: Lease, before: Row | None, *, granted: bool = False
    ) -> Lease:
        """Store a record, whose marked waiter stays; but one that is granted the lease waits no more."""
        waiter, waited_at = "", 0
        if before is not None and before.waiter and not (granted and before.waiter == self.me):
            waiter, waited_at = before.waiter, before.waited_at
            lease.waited = waiter != self.me and self.is_marked(before, lease.now)
        connection.execute(
            WRITE,
            (
                self._namespace,
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
        return lease

    def _first_fence(self, connection: sqlite3.Connection, row: Row | None, wall: float) -> int:
        """The lowest fence that may be given.

        Where the record cannot tell, because there is none, or because the host was started since and a power failure
        may have undone the last commits, it is the time: in microseconds since 1970. Every fence that the record may
        have had began at such a time and grew by one in a transaction, which takes longer than a microsecond, so it is
        below. Should the wall clock have been put back, the floor is still above the fences of dropped records.
        """
        if row is not None:
            return 0 if row.incarnation == self._incarnation else _micros(wall)
        floor = self.row(connection, FLOOR)
        return _micros(wall) if floor is None else max(_micros(wall), floor.fence + 1)

    def _look_for_other_hosts(self, row: Row, now: float, wall: float) -> None:
        """Warn when a record tells of another start of a host, and is newer than the start of this one."""
        if row.renewed_at / 1e6 > wall - now + BOOT_SLACK and not self._warned:
            self._warned = True
            logger.warning(
                "%r was held under another start of the host since this host was started: if several hosts share the "
                "SQLite file, they do not exclude each other; use a store that all of them reach by network",
                row.name,
            )

    def _may_mark(self, row: Row, now: float) -> bool:
        if not self.is_marked(row, now):
            return True
        return row.waiter == self.me and now - row.waited_at / 1e6 > MARK_AGAIN

    def _is_droppable(self, row: Row, now: float) -> bool:
        return not self.is_live(row, now) and droppable(self._lease(row._replace(holder=""), now))

    def _drop(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        unchanged = [row for row in rows if self.row(connection, row.name) == row]
        connection.executemany(DROP, [(self._namespace, row.name) for row in unchanged])
        floor = self.row(connection, FLOOR)
        fences = [row.fence for row in unchanged] + ([floor.fence] if floor is not None else [])
        self._write(connection, Lease(FLOOR, "", max(fences, default=0)), floor)


def _columns(connection: sqlite3.Connection) -> tuple[str, ...]:
    return tuple(found[1] for found in connection.execute("PRAGMA table_info(grelmicro_leases)").fetchall())


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
