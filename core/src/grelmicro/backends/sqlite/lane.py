"""One SQLite connection on a thread of its own, which survives cancellation, forks and the loss of its file."""

import logging
import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TypeVar, TypeVarTuple

from grelmicro.backends.sqlite.file import FileId, create, file_id
from grelmicro.backends.sqlite.thread import WorkerThread
from grelmicro.errors import BackendUnavailableError, OutOfContextError

logger = logging.getLogger("grelmicro.coordination")

BUSY_TIMEOUT = 5.0
"""Seconds for which an operation waits while other processes have the file locked, its time in the queue included.

Also one that is to try once: processes lock the file for a moment with each write, so that not to wait for that would
refuse locks that are free; and the refusal would be an error, which says nothing about the lock.
"""

LAST_PATIENCE = 1.0
"""Seconds for which closing waits for a locked file, to tidy it."""

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0003, 0.02
"""Seconds between two tries to lock the file: doubled from the first to the longest, and varied by half."""

FORK_PATIENCE = 10.0
"""Seconds for which a fork waits for the operation that is under way; it ends sooner by itself."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Unit = Callable[[sqlite3.Connection], object]
"""Work on a connection."""

_LOCKED = frozenset((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL))
_BROKEN = frozenset((sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN))

_BUSY_REASON = (
    f"other processes kept it locked for longer than {BUSY_TIMEOUT:g} s: look for one that writes to it without end, "
    "and give leases a file of their own"
)
_REASONS = {
    **dict.fromkeys(_LOCKED, _BUSY_REASON),
    sqlite3.SQLITE_READONLY: "it cannot be written to: check the permissions of the file and of its directory",
    sqlite3.SQLITE_FULL: "the disk is full: free some space",
    sqlite3.SQLITE_IOERR: "reading or writing it failed: check the disk",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check that its directory exists and can be written to",
    sqlite3.SQLITE_NOTADB: "it is not a SQLite database: name another file, or remove this one",
    sqlite3.SQLITE_CORRUPT: "it is damaged: remove it and its -wal and -shm files, and all leases in it end",
}


class Lane:
    """One connection to the file at `path`, and the one thread that uses it.

    A unit of work is a function that runs there from begin to end, whatever becomes of the task that awaits it, so a
    cancellation never leaves a transaction open. When the file was deleted or replaced, the next unit works on the
    new one. Errors of SQLite become `BackendUnavailableError`: what the unit had begun is rolled back.

    Args:
        path: the file.
        prepare: called with each new connection before it is used.
        quiet: do not warn when the file was replaced, since another lane does.
    """

    def __init__(self, path: str, prepare: Callable[[sqlite3.Connection], None], *, quiet: bool = False) -> None:
        self._path = path
        self._prepare = prepare
        self._quiet = quiet
        self._thread: WorkerThread | None = WorkerThread("grelmicro-sqlite")
        self._ending: WorkerThread | None = None
        self._mutex = threading.Lock()  # whoever has it may touch the connection
        self._connections: list[sqlite3.Connection] = []  # at most one
        self._file: FileId | None = None
        self.opened = 0
        """How many connections it has had."""
        self.resolved = path
        """The path of the file that is open, without symbolic links."""
        # A program that ends without closing anything ends without a warning all the same.
        weakref.finalize(self, _put_away, self._thread, self._connections)
        _lanes.add(self)

    def read(self, unit: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> Awaitable[T]:
        """Run a unit that only reads."""
        return self._in_thread(partial(self._run, time.monotonic() + BUSY_TIMEOUT, unit, *args))

    def write(self, unit: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> Awaitable[T]:
        """Begin to run a unit as one transaction; units run in the order in which they were begun."""
        return self._in_thread(partial(self._run, time.monotonic() + BUSY_TIMEOUT, transact, unit, *args))

    def later(self, unit: Unit) -> None:
        """Run a unit when the thread is free; nobody learns how it ended."""
        if self._thread is not None:
            self._thread.submit(partial(self._try, unit, 0.0))

    def aside(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run what needs the thread, and neither the connection nor the file."""
        return self._in_thread(work)

    def close(self, last: Unit | None = None, *, after: "Future[None] | None" = None) -> "Future[None]":
        """Run `last`, as far as it works out, close the connection and end the thread. The future says when.

        With `after`, the closing of another lane, wait for that first: only the last connection of all puts the log
        back into the file and removes it, and of two that close at the same moment each takes the other for the last.
        """
        self._ending, self._thread = self._thread, None
        # Where nothing was asked there is nothing to close, and a thread cannot be started at the interpreter's exit.
        if self._ending is None or (last is None and not self._ending.begun):
            closed: Future[None] = Future()
            closed.set_result(None)
            return closed
        future = self._ending.submit(partial(self._finish, last, after))
        self._ending.end()
        return future

    def join(self) -> None:
        """Wait for the thread's end, which is near once the future of `close` is done."""
        if self._ending is not None:
            self._ending.join()

    def _in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        if self._thread is None:
            raise OutOfContextError("the SQLite store was closed while it was in use: keep it open until its users end")
        return self._thread.run(work)

    def _run(self, until: float, unit: Callable[..., T], *args: object) -> T:
        """Carry out a unit, again and again until then while the file is locked."""
        pause = SHORTEST_PAUSE
        while True:
            try:
                with self._mutex:
                    return unit(self._current(), *args)
            except sqlite3.Error as error:
                if not self._worth_another_try(error) or time.monotonic() + pause > until:
                    raise BackendUnavailableError(f"the SQLite file {self._path}: {reason(error)}") from error
            except OSError as error:
                raise BackendUnavailableError(
                    f"the SQLite file {self._path} cannot be reached ({error.strerror}): check its directory"
                ) from error
            if (thread := self._thread or self._ending) is not None:
                thread.tell()
            # SQLite's own waiting soon sleeps 100 ms at a time, so it is switched off.
            time.sleep(pause * (0.5 + random.random()))
            pause = min(pause * 2, LONGEST_PAUSE)

    def _worth_another_try(self, error: sqlite3.Error) -> bool:
        if _code(error) in _BROKEN:
            self._drop()
        # The other: the file was deleted in the middle of the unit.
        return _code(error) in _LOCKED or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED

    def _current(self) -> sqlite3.Connection:
        """The connection to the file that is at the path now."""
        if self._connections:
            if file_id(self._path) == self._file:
                return self._connections[0]
            if not self._quiet:
                logger.warning("%s was deleted or replaced: the leases in it are gone", self._path)
            _close_all(self._connections)
        create(self._path)
        connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._file, self.resolved = file_id(self._path), os.path.realpath(self._path)
        self._connections.append(connection)
        self.opened += 1
        return connection

    def _drop(self) -> None:
        """Begin with a new connection next time."""
        with self._mutex:
            _close_all(self._connections)

    def _try(self, unit: Unit, patience: float) -> None:
        try:
            self._run(time.monotonic() + patience, unit)
        except Exception as error:
            logger.debug("tidying failed: %s", error)

    def _finish(self, last: Unit | None, after: "Future[None] | None") -> None:
        if after is not None:
            wait([after], BUSY_TIMEOUT + LAST_PATIENCE)
        if last is not None and self._connections and file_id(self._path) == self._file:
            self._try(last, LAST_PATIENCE)
        self._drop()

    def before_fork(self) -> bool:
        """Close the connection: SQLite's state must not get into another process. Whether the mutex was taken."""
        if self._mutex.acquire(timeout=FORK_PATIENCE):
            _close_all(self._connections)
            return True
        return False

    def after_fork_in_parent(self) -> None:
        """Go on: the next unit opens a connection."""
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """Be closed: the thread exists in the parent only."""
        _inherited.extend(self._connections)
        self._connections.clear()
        self._thread = self._ending = None
        self._mutex = threading.Lock()


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
_forking: dict[int, list[Lane]] = {}  # by thread: the lanes that a fork has stopped

_inherited: list[sqlite3.Connection] = []
"""Connections that got into this process by a fork all the same: kept, since closing them would harm the parent's."""


def _before_fork() -> None:
    _forking[threading.get_ident()] = [lane for lane in list(_lanes) if lane.before_fork()]


def _after_fork_in_parent() -> None:
    for lane in _forking.pop(threading.get_ident(), ()):
        lane.after_fork_in_parent()


def _after_fork_in_child() -> None:
    _forking.clear()
    for lane in list(_lanes):
        lane.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def transact(connection: sqlite3.Connection, unit: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
    """Run a unit as one transaction; an error undoes it."""
    # Immediate: a transaction that reads first and writes later fails at once if another one wrote in between.
    connection.execute("BEGIN IMMEDIATE")
    try:
        answer = unit(connection, *args)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise
    return answer


def is_locked(connection: sqlite3.Connection) -> bool:
    """Whether a transaction that writes is under way on another connection, and does not end at once."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if _code(error) in _LOCKED:
            return True
        raise
    connection.execute("ROLLBACK")
    return False


def _put_away(thread: WorkerThread, connections: list[sqlite3.Connection]) -> None:
    """End what nobody closed, the thread first: a connection that is closed while it works takes the program down."""
    thread.end()
    if thread.join(BUSY_TIMEOUT + LAST_PATIENCE):
        _close_all(connections)


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        with suppress(sqlite3.Error):
            connections.pop().close()


def _code(error: sqlite3.Error) -> int:
    """The primary result code; errors of the module itself have none."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def is_misplaced(error: sqlite3.Error) -> bool:
    """Whether the file itself is to blame, and not the moment."""
    return _code(error) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY)


def reason(error: sqlite3.Error) -> str:
    """What is wrong, and the remedy."""
    return _REASONS.get(_code(error), f"SQLite refused ({error}): the cause is attached")
