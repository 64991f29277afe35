"""The shop's database: what is in stock, what was sold, counted and settled. Plain calls, for threads."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    id INTEGER PRIMARY KEY,
    stock INTEGER NOT NULL,
    lock_fence INTEGER NOT NULL DEFAULT 0  -- the fence of the lock under which it was last written
);
CREATE TABLE IF NOT EXISTS sales (id INTEGER PRIMARY KEY, item_id INTEGER NOT NULL, settlement INTEGER);
CREATE TABLE IF NOT EXISTS counts (
    item_id INTEGER NOT NULL, fence INTEGER NOT NULL, worker INTEGER NOT NULL, outcome TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS settlements (
    id INTEGER PRIMARY KEY, term INTEGER NOT NULL, worker INTEGER NOT NULL, began REAL NOT NULL, ended REAL
);
INSERT OR IGNORE INTO items (id, stock) VALUES (1, 25), (2, 25), (3, 25), (4, 25);
"""

BANK_DELAY = 0.03
"""Seconds that a settlement takes at the bank."""


class Receipt(BaseModel):
    """One sale. Times are seconds on a clock that all processes of this machine share."""

    item_id: int
    fence: int | None
    worker: int
    began: float
    ended: float


class Move(BaseModel):
    """Pieces of one item that become pieces of another."""

    source: int
    target: int
    pieces: int = Field(gt=0)


class Report(BaseModel):
    """What was sold so far, and how much of that was settled."""

    sold: int
    settled: int


class Status(BaseModel):
    """Which process answers, and whether it is the one that settles."""

    worker: int
    leads: bool


class Shop:
    """The shop's data in an SQLite file, for all threads of this process.

    Args:
        path: the file; it is made when it is needed first.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._turn = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def stock(self, item_id: int) -> int:
        """How many of an item are left; none of an item that does not exist."""
        row = self.row("SELECT stock FROM items WHERE id = ?", item_id)
        return row[0] if row else 0

    def sell(self, item_id: int, stock: int, fence: int | None) -> bool:
        """Write the new stock and the sale, unless somebody wrote under a newer lock: whether it was written."""
        with self._transaction() as database:
            if not self._write(database, item_id, stock, fence):
                return False
            database.execute("INSERT INTO sales (item_id) VALUES (?)", (item_id,))
            return True

    def move(self, move: Move, source_fence: int, target_fence: int) -> bool:
        """Move stock, unless there is too little or somebody wrote under a newer lock: whether it was moved."""
        with self._transaction() as database:
            stock = dict(database.execute("SELECT id, stock FROM items WHERE id IN (?, ?)", (move.source, move.target)))
            if len(stock) < 2 or stock[move.source] < move.pieces:
                return False
            left, more = stock[move.source] - move.pieces, stock[move.target] + move.pieces
            if self._write(database, move.source, left, source_fence) and self._write(
                database, move.target, more, target_fence
            ):
                return True
            database.rollback()  # of one item it may have been written
            return False

    def report(self) -> Report:
        """What was sold and settled so far."""
        sold, settled = self.row("SELECT count(*), count(settlement) FROM sales") or (0, 0)
        return Report(sold=sold, settled=settled)

    def begin_count(self, item_id: int, fence: int) -> int:
        """Note who counts, and what there is to count."""
        with self._transaction() as database:
            database.execute("INSERT INTO counts VALUES (?, ?, ?, 'running')", (item_id, fence, os.getpid()))
        return self.stock(item_id)

    def end_count(self, item_id: int, counted: int, fence: int, *, fenced: bool) -> None:
        """Write what was counted, and what became of that."""
        with self._transaction() as database:
            written = self._write(database, item_id, counted, fence if fenced else None)
            outcome = "written" if written else "refused"
            database.execute("UPDATE counts SET outcome = ? WHERE item_id = ? AND fence = ?", (outcome, item_id, fence))

    def settle(self, term: int) -> None:
        """Settle what is not settled yet."""
        with self._transaction() as database:
            began = database.execute(
                "INSERT INTO settlements (term, worker, began) VALUES (?, ?, ?)", (term, os.getpid(), time.monotonic())
            )
            database.execute("UPDATE sales SET settlement = ? WHERE settlement IS NULL", (began.lastrowid,))
        time.sleep(BANK_DELAY)
        with self._transaction() as database:
            database.execute("UPDATE settlements SET ended = ? WHERE id = ?", (time.monotonic(), began.lastrowid))

    def restock(self, stock: int, *item_ids: int) -> None:
        """Begin anew with these items."""
        with self._transaction() as database:
            for item_id in item_ids:
                database.execute("INSERT OR REPLACE INTO items (id, stock) VALUES (?, ?)", (item_id, stock))
                database.execute("DELETE FROM sales WHERE item_id = ?", (item_id,))
                database.execute("DELETE FROM counts WHERE item_id = ?", (item_id,))

    def row(self, query: str, *values: object) -> tuple[Any, ...] | None:
        """The first row of a query."""
        return next(iter(self.rows(query, *values)), None)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        with self._turn:
            return self._open().execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        with self._turn:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _write(self, database: sqlite3.Connection, item_id: int, stock: int, fence: int | None) -> bool:
        if fence is None:
            database.execute("UPDATE items SET stock = ? WHERE id = ?", (stock, item_id))
            return True
        # Equal is good: a holder may write twice. A lower one lost the lock, and may not know it yet.
        written = database.execute(
            "UPDATE items SET stock = ?, lock_fence = ? WHERE id = ? AND lock_fence <= ?",
            (stock, fence, item_id, fence),
        )
        return written.rowcount == 1

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._turn:
            database = self._open()
            database.execute("BEGIN IMMEDIATE")
            with database:  # commits, or rolls back
                yield database

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            database = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(SCHEMA)
            self._connection = database
        return self._connection
