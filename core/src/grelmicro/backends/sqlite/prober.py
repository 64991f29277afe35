"""Sees what other processes changed in a SQLite file, for those who wait in this one."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import Context

from grelmicro.backends.sqlite.lane import Lane
from grelmicro.backends.sqlite.table import Row, Table
from grelmicro.clock import Clock, Signal
from grelmicro.leases.lease import Lease, SignalWaiter, Waiter
from grelmicro.lifecycle import distinguish_cancellation

logger = logging.getLogger("grelmicro.coordination")

INTERVAL = 0.01
"""Seconds between two looks, while somebody waits."""

LONGEST_PAUSE = 1.0
"""Seconds between two looks while looking fails."""

Version = tuple[int, int]
"""Which connection, and what it says about the file: a number that changes with every commit of another connection."""


class _Watched:
    """What is known of a name that somebody waits for."""

    __slots__ = ("hinted", "looked", "row", "signal", "unmarked")

    def __init__(self) -> None:
        self.signal = Signal()
        self.looked = False
        self.row: Row | None = None
        self.hinted: tuple[object, ...] | None = None  # the free state that was told last
        self.unmarked: int | None = None  # the fence for which it was told that nobody is marked as waiting


class Prober:
    """One task, which exists only while somebody waits, and looks at all the names that are waited for.

    Args:
        path: the file, for log lines.
        lane: the connection to look with: not the one that writes, so that this process's commits are seen too.
        table: the records.
        clock: the time of those who wait.
    """

    def __init__(self, path: str, lane: Lane, table: Table, clock: Clock) -> None:
        self._path = path
        self._lane = lane
        self._table = table
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Waiter]:
        """Subscribe to hints about `name`."""
        watched = self._watched.setdefault(name, _Watched())
        waiter = SignalWaiter(watched.signal, self._clock)
        if self._task is None or self._task.done():
            # In a context of its own: it may live longer than the request that happened to start it.
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="grelmicro-sqlite-prober", context=Context()
            )
        try:
            yield waiter
        finally:
            waiter.close()
            if watched.signal.idle and self._watched.get(name) is watched:
                del self._watched[name]

    def releasing(self, lease: Lease) -> None:
        """This process is about to set `lease` free: hint at once, so that the next look need not."""
        if (watched := self._watched.get(lease.name)) is not None:
            watched.hinted = (lease.fence, "", 0)
            watched.signal.send()

    def shortened(self, name: str) -> None:
        """This process let a lease end sooner: hint at once."""
        if (watched := self._watched.get(name)) is not None:
            watched.signal.send()

    def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        version: Version | None = None
        pause = INTERVAL
        while self._watched:
            try:
                with distinguish_cancellation():
                    version = await self._look(version)
            except Exception as error:
                if pause == INTERVAL:
                    logger.warning("%s cannot be watched, so waiters ask it from time to time: %s", self._path, error)
                version, pause = None, min(pause * 2, LONGEST_PAUSE)
            else:
                if pause != INTERVAL:
                    logger.warning("%s can be watched again", self._path)
                pause = INTERVAL
            # Real time: that of other processes passes however a test moves the clock of leases.
            await asyncio.sleep(pause)

    async def _look(self, version: Version | None) -> Version:
        """Read the watched records if the file changed since `version`, and give hints; the version that was read."""
        if not all(watched.looked for watched in self._watched.values()):
            version = None
        found, rows = await self._lane.read(self._changes, version, tuple(self._watched))
        now = self._table.now()
        for name, watched in self._watched.items():
            before = watched.looked
            if rows is not None and name in rows:
                watched.looked, watched.row = True, rows[name]
            if watched.looked and self._is_news(watched, now, first=not before):
                watched.signal.send()
        return found

    def _changes(
        self, connection: sqlite3.Connection, version: Version | None, names: Sequence[str]
    ) -> tuple[Version, dict[str, Row | None] | None]:
        """The version, and the records if it is not `version`. Runs on the lane's thread."""
        # Read before the records: a commit in between is seen once more at the next look, and never missed.
        found = (self._lane.opened, int(connection.execute("PRAGMA data_version").fetchone()[0]))
        if found == version:
            return found, None
        return found, {name: self._table.row(connection, name) for name in names}

    def _is_news(self, watched: _Watched, now: float, *, first: bool) -> bool:
        """Whether those who wait should ask now.

        They should when the lease is free, once for each time that it becomes free. While it is held, by whomever,
        there is nothing to ask for: a hand-over wakes only those that look between the release and the next grant.
        But when no process is marked as waiting, one has to ask to be marked, or the holder's would never yield.
        """
        row = watched.row
        if row is None or not self._table.is_live(row, now):
            free = () if row is None else (row.fence, row.holder, row.expires_at)
            news, watched.hinted = free != watched.hinted, free
            return news
        if self._table.is_marked(row, now):
            watched.unmarked = None
            return False
        if first:  # whoever has just begun to wait is about to ask anyway
            return False
        news, watched.unmarked = row.fence != watched.unmarked, row.fence
        return news
