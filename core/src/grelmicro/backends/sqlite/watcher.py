"""Sees what other processes changed in a SQLite file, for the waiters of this one."""

import asyncio
import logging
import math
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from typing import NamedTuple

from grelmicro.backends.sqlite.lane import Lane, is_locked
from grelmicro.backends.sqlite.notifier import Files, files_at
from grelmicro.backends.sqlite.reports import Reports
from grelmicro.backends.sqlite.table import Row, Table
from grelmicro.clock import SYSTEM_CLOCK, Clock, Signal, Timer
from grelmicro.leases.lease import Lease, SignalWaiter, Waiter
from grelmicro.lifecycle import distinguish_cancellation

logger = logging.getLogger("grelmicro.coordination")

PROBE_INTERVAL_S = 0.01
"""Seconds between two looks at the file where the operating system does not report its changes."""

MAX_PAUSE_S = 1.0
"""Seconds between two looks while looking fails."""

TEST_INTERVAL_S = 30.0
"""Seconds after which reports are tested again."""

READ_PAUSE_S = 0.000_05
"""Seconds between two looks, for each name: one takes half as long, so that looking never takes a whole processor."""

ASK_GRACE_S = 0.005
"""Seconds within which a waiter that has just subscribed asks the store, and so is marked as waiting."""

MUTE_S = 0.001
"""Seconds for which a write of this process delays reports about leases of others."""

MAX_OURS = 10_000
"""Names of leases that this process got that are kept at most. Those of leases that ended by themselves stay."""

LINGER_S = 1.0
"""Seconds for which the watch goes on without a waiter: a contended name is soon waited for again."""

Version = tuple[int, int]
"""Which connection, and what it says about the file: a number that changes with every commit of another connection."""


class _Watched:
    """What is known of a name that has waiters."""

    __slots__ = ("asks_until", "hinted", "looked", "row", "signal", "unmarked")

    def __init__(self) -> None:
        self.signal = Signal()
        self.asks_until = 0.0  # when the last waiter to come has asked, by the event loop's time
        self.looked = False
        self.row: Row | None = None
        self.hinted: tuple[object, ...] | None = None  # the free state of the last hint
        self.unmarked: int | None = None  # the fence for which the mark of waiters was reported missing


class _Seen(NamedTuple):
    """What a look at the file has found."""

    version: Version
    files: Files
    rows: Mapping[str, Row | None] | None
    """The records; None when the version is the one that was known."""
    reported: bool
    """Whether reports had come that the event loop had not seen."""
    settled: bool
    """Whether no process was in the middle of a write."""


class Watcher:
    """One task, which exists only while there is a waiter, and looks at all the names that are waited for.

    It looks when the operating system reports a change, or often where it does not.

    Args:
        path: the file, for log lines.
        lane: the connection to look with: not the one that writes, so that this process's commits are seen too.
        table: the records.
        clock: the time of the waiters.
        reported: whether the file system reports the changes of all processes.
    """

    def __init__(self, path: str, lane: Lane, table: Table, clock: Clock, *, reported: bool) -> None:
        self._path = path
        self._lane = lane
        self._table = table
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._ours: set[str] = set()  # names whose leases this process got: the next change is most likely its own
        self._task: asyncio.Task[None] | None = None
        self._wake = Signal()
        self._reports = Reports(path, lane, self._wake.send, possible=reported)
        self._version: Version | None = None
        self._looked_at = -math.inf
        self._due = False  # a look, whatever is reported
        self._settled = False  # whether what was seen last is all that was reported until then
        self._end: Timer | None = None  # of the next lease that ends by itself
        self._rest_at: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Waiter]:
        """Subscribe to hints about `name`."""
        watched = self._watched.setdefault(name, _Watched())
        watched.asks_until = self._time() + ASK_GRACE_S
        waiter = SignalWaiter(watched.signal, self._clock)
        self._look_soon()
        self._stay_awake()
        if self._task is None or self._task.done():
            # In a context of its own: it may live longer than the request that happened to start it.
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="grelmicro-sqlite-watcher", context=Context()
            )
        try:
            yield waiter
        finally:
            waiter.close()
            if watched.signal.idle and self._watched.get(name) is watched:
                del self._watched[name]
            if not self._watched:
                self._wake.send()
                self._rest_soon()

    def writing(self) -> None:
        """This process is about to write: its own report must not wake the event loop in the middle of that."""
        if self._reports.listening:
            self._reports.mute(PROBE_INTERVAL_S if self._ours.issuperset(self._watched) else MUTE_S)

    def answered(self, lease: Lease, holder: str) -> None:
        """The store answered to `holder`, which had asked for it."""
        if lease.holder != holder:
            self._ours.discard(lease.name)
        elif len(self._ours) < MAX_OURS:
            self._ours.add(lease.name)

    def releasing(self, lease: Lease) -> None:
        """This process is about to set `lease` free: hint at once, so that the next look need not."""
        self._ours.discard(lease.name)
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
        self._rest()

    def abandon(self) -> None:
        """Forget the waiters of an event loop that is gone, or that a fork left to the parent."""
        self._watched.clear()
        self._task = self._rest_at = None
        self._reports.abandon()

    async def _run(self) -> None:
        pause = PROBE_INTERVAL_S
        quiet = not await self._change_within(pause)
        while self._watched:
            try:
                with distinguish_cancellation():
                    files = await self._look(quiet)
            except Exception as error:
                if pause == PROBE_INTERVAL_S:
                    logger.warning("%s cannot be watched, so waiters ask it from time to time: %s", self._path, error)
                self._version, self._settled, pause = None, False, min(pause * 2, MAX_PAUSE_S)
            else:
                if pause != PROBE_INTERVAL_S:
                    logger.warning("%s can be watched again", self._path)
                pause = PROBE_INTERVAL_S
                await self._reports.follow(files)
            self._reports.listen()
            settled = self._settled = self._settled and self._reports.trusted
            self._plan_end(self._next_end() if settled else None)
            # Real time: that of other processes passes however a test moves the clock of leases.
            quiet = not await self._change_within(TEST_INTERVAL_S if settled else pause)

    def _stay_awake(self) -> None:
        if self._rest_at is not None:
            self._rest_at.cancel()
            self._rest_at = None

    def _rest_soon(self) -> None:
        """Keep the watch for a moment, not as a task: a program may end meanwhile."""
        self._stay_awake()
        self._rest_at = asyncio.get_running_loop().call_later(LINGER_S, self._rest)

    def _rest(self) -> None:
        """Keep nothing that costs anything."""
        self._stay_awake()
        self._watched.clear()
        self._reports.end()
        self._plan_end(None)

    async def _change_within(self, seconds: float) -> bool:
        """Wait for a reason to look, or to end, for `seconds` at most; whether there is one."""
        until = self._time() + seconds
        while True:
            now, ready = self._time(), self._ready_at()
            if ready <= now or until <= now:
                return ready <= now
            await self._wake.wait(SYSTEM_CLOCK, min(ready, until) - now)

    def _ready_at(self) -> float:
        """When to look. What this process has is changed by itself, mostly: then a look in a while is enough."""
        if not self._watched:
            return -math.inf
        if not self._due and not self._reports.pending:
            return math.inf
        ready = self._looked_at + len(self._watched) * READ_PAUSE_S
        if self._ours.issuperset(self._watched):
            return max(ready, self._looked_at + PROBE_INTERVAL_S, self._reports.came_at + PROBE_INTERVAL_S)
        return ready

    def _look_soon(self) -> None:
        """Look without a report."""
        self._due = True
        self._wake.send()

    async def _look(self, quiet: bool) -> Files:
        """Read the watched records if the file changed, and give hints; the files that are there.

        A report comes with each part of a write, and so before the commit that it is for can be seen. When no report
        came for a while (`quiet`), a look that no write is under way shows whether that was all.
        """
        reports, settled = self._reports, self._settled
        self._due = self._settled = False
        reported, trusted = reports.take(), reports.trusted
        self._looked_at = self._time()
        known = self._version if all(watched.looked for watched in self._watched.values()) else None
        seen = await self._lane.read(self._read, known, tuple(self._watched), quiet and trusted)
        changed = self._tell(seen.rows)
        reports.pending |= reports.drain()
        if changed and settled and not reported and not seen.reported and not reports.pending:
            reports.miss(seen.files)
        elif quiet and settled:
            reports.test()
        self._version, self._settled = seen.version, seen.settled and not reports.pending
        return seen.files

    def _read(self, connection: sqlite3.Connection, known: Version | None, names: Sequence[str], settle: bool) -> _Seen:
        """What the file says now. Runs on the lane's thread."""
        reported = self._reports.drain()
        settled = settle and not is_locked(connection)
        # Read before the records: a commit in between is seen once more at the next look, and never missed.
        version = (self._lane.opened, int(connection.execute("PRAGMA data_version").fetchone()[0]))
        rows = None if version == known else {name: self._table.row(connection, name) for name in names}
        return _Seen(version, files_at(self._lane.resolved), rows, reported, settled)

    def _tell(self, rows: Mapping[str, Row | None] | None) -> bool:
        """Give hints about what `rows` say, or time; whether a record changed that was known."""
        now = self._table.now()
        changed = False
        for name, watched in self._watched.items():
            if rows is not None and name in rows:
                changed |= watched.looked and watched.row != rows[name]
                watched.looked, watched.row = True, rows[name]
            if watched.looked and self._is_news(watched, now):
                watched.signal.send()
        return changed

    def _is_news(self, watched: _Watched, now: float) -> bool:
        """Whether the waiters should ask now.

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
        if self._time() < watched.asks_until:
            return False
        news, watched.unmarked = row.fence != watched.unmarked, row.fence
        return news

    def _next_end(self) -> float | None:
        """Seconds until the first of the leases ends by itself, which nothing reports."""
        now = self._table.now()
        ends = [
            each.row.expires_at for each in self._watched.values() if each.row and self._table.is_live(each.row, now)
        ]
        # A lease is live at the very instant of its end.
        return min(ends) / 1e6 - now + 0.001 if ends else None

    def _plan_end(self, seconds: float | None) -> None:
        """Look again in `seconds`; None: do not."""
        if self._end is not None:
            self._end.cancel()
        self._end = None if seconds is None else self._clock.call_later(seconds, self._look_soon)

    @staticmethod
    def _time() -> float:
        return asyncio.get_running_loop().time()
