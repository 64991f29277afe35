"""Leases in a SQLite file: for the processes of one host."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from grelmicro.backends.sqlite.file import check_path, check_place
from grelmicro.backends.sqlite.lane import Lane, Unit, is_misplaced, reason
from grelmicro.backends.sqlite.notifier import SUPPORTED
from grelmicro.backends.sqlite.table import CREATE, Table
from grelmicro.backends.sqlite.watcher import Watcher
from grelmicro.clock import Clock
from grelmicro.config import Duration, check_seconds
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.leases.lease import Lease, LeaseStore, Waiter
from grelmicro.leases.retention import RETENTION
from grelmicro.lifecycle import outlast

ENV_PREFIX = "SQLITE_"
"""What the name of the environment variable begins with, unless `env_prefix` says otherwise."""

NOTICE_S = 0.003
"""Seconds until another process learns of a release: by a report, with the time to look and to ask."""

PROBED_NOTICE_S = 0.03
"""The same where it probes the file: two looks, and the time to ask."""

SWEEP_INTERVAL = 3600.0
"""Seconds between two rounds through the records for old ones."""

SWEEP_PAUSE = 1.0
"""Seconds between two parts of such a round."""


class _Open(NamedTuple):
    """What an open store has."""

    table: Table
    writer: Lane
    reader: Lane
    watcher: Watcher


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

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        super().__init__(namespace=namespace, clock=clock)
        self.path = check_path(path_of_environment() if path is None else path)
        self.outage.title = f"SQLite file {self.path}"
        self.place = (os.path.realpath(self.path), self.namespace)
        self._retention = check_seconds("retention", retention)
        self._opened: _Open | None = None
        self._sweep_at = 0.0

    @property
    def table_sql(self) -> str:
        """The SQL that makes the table, as opening does where it is missing."""
        return f"{CREATE};"

    async def open(self) -> None:
        """Open the file, and create it if there is none.

        Raises:
            SettingsValidationError: no file of leases can be there, or it is a file of something else.
            BackendUnavailableError: it cannot be opened now.
        """
        reported = check_place(self.path) and SUPPORTED
        self.notice = NOTICE_S if reported else PROBED_NOTICE_S
        table = Table(self.namespace, self.clock, self._retention)
        writer, reader = Lane(self.path, table.prepare), Lane(self.path, table.prepare, quiet=True)
        watcher = Watcher(self.path, reader, table, self.clock, reported=reported)
        self._opened = _Open(table, writer, reader, watcher)
        self._sweep_at = self.clock.now() + SWEEP_INTERVAL
        try:
            await writer.read(table.sweep)
        except BaseException as error:
            await self._close()
            if isinstance(cause := error.__cause__, sqlite3.Error) and is_misplaced(cause):
                raise SettingsValidationError(f"SQLite: path names a file, but {reason(cause)}") from cause
            raise

    async def close(self) -> None:
        """Vacate what expired, drop what is old, and close the file; a cancellation waits for that."""
        if self._opened is not None:
            await self._close(self._opened.table.tidy)

    def abandon(self) -> None:
        """Forget the waiters of a loop that is gone, and close its connections; a fork has closed them already."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.watcher.abandon()
            opened.writer.close(after=opened.reader.close())

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        table, writer, _, watcher = self._get_open()
        watcher.writing()
        lease = await writer.write(table.acquire, name, holder, max(ttl, self.resolution), data, waiting)
        watcher.answered(lease, holder)
        if self.clock.now() >= self._sweep_at:
            self._sweep_at = self.clock.now() + SWEEP_INTERVAL
            writer.later(self._sweep)
        return lease

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        survivors = await self._renew([(lease, ttl)], data)
        return survivors[0] if survivors else None

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Renew each lease by its ttl, all in one transaction; the survivors."""
        return await self._renew(renewals, None)

    async def _renew(self, renewals: Sequence[tuple[Lease, float]], data: Mapping[str, str] | None) -> list[Lease]:
        table, writer, _, watcher = self._get_open()
        asked = [(lease, max(ttl, self.resolution)) for lease, ttl in renewals]
        watcher.writing()
        survivors = await writer.write(table.renew, asked, data)
        for lease, shortened in survivors:
            if shortened:
                watcher.shortened(lease.name)
        return [lease for lease, _ in survivors]

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        table, writer, _, watcher = self._get_open()
        watcher.writing()
        outcome = writer.write(table.release, lease, data)
        # Before it is done: what those who wait now ask comes after it on the same thread.
        watcher.releasing(lease)
        return await outcome is not None

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        table, writer, _, _ = self._get_open()
        return await writer.write(table.raise_fence, lease, least)

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        table, writer, _, watcher = self._get_open()
        watcher.writing()
        passed = await writer.write(table.pass_on, lease, holder, max(ttl, self.resolution))
        if passed is not None:
            watcher.answered(passed, holder)
        return passed

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        table, _, reader, _ = self._get_open()
        return await reader.read(table.read, name)

    async def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        table, _, reader, _ = self._get_open()
        # A page begins after a name, and the prefix may be one itself.
        first = await reader.read(table.read, prefix) if prefix else None
        page = [] if first is None else [first]
        after = prefix
        while True:
            for lease in page:
                yield lease
            page = await reader.read(table.page, after, prefix)
            if not page:
                return
            after = page[-1].name

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """See `LeaseStore.watch`; a release in this process is a hint at once, one in another process soon."""
        return self._get_open().watcher.watch(name)

    def _get_open(self) -> _Open:
        self.check_open()
        if self._opened is None:
            raise OutOfContextError("SQLiteStore is closing: keep it open until its users have ended")
        return self._opened

    def _sweep(self, connection: sqlite3.Connection) -> None:
        """Runs on the writer's thread."""
        if self._opened is not None and self._opened.table.sweep_some(connection):
            self._sweep_at = self.clock.now() + SWEEP_PAUSE

    async def _close(self, last: Unit | None = None) -> None:
        """Close both connections and end their threads, however often the caller is cancelled meanwhile."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        opened.watcher.stop()
        try:
            reader = opened.reader.close()
            futures = [reader, opened.writer.close(last, after=reader)]
            await outlast(asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True))
        finally:
            opened.reader.join()
            opened.writer.join()


def path_of_environment(env_prefix: str = ENV_PREFIX) -> str:
    """The file that the environment names.

    Raises:
        SettingsValidationError: it names none.
    """
    path = os.environ.get(f"{env_prefix}PATH")
    if not path:
        raise SettingsValidationError(
            "SQLite: path is missing: give it, such as SQLiteProvider('locks.db'), "
            f"or set the environment variable {env_prefix}PATH"
        )
    return path
