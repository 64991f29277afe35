"""The board: what the leader publishes and all workers show, in an SQLite file. Plain calls, for threads."""

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS terms (
    fence INTEGER PRIMARY KEY,
    worker INTEGER NOT NULL,
    began REAL NOT NULL,
    newest REAL NOT NULL,  -- when it published last
    refused INTEGER NOT NULL DEFAULT 0  -- what it wanted to publish when a newer term had begun
);
CREATE TABLE IF NOT EXISTS shares (
    symbol TEXT PRIMARY KEY,
    price REAL NOT NULL,
    owned INTEGER NOT NULL DEFAULT 0,
    lock_fence INTEGER NOT NULL DEFAULT 0  -- the fence of the lock under which `owned` was last written
);
"""

BEGIN_OR_GO_ON = """
INSERT INTO terms (fence, worker, began, newest) SELECT :fence, :worker, :now, :now
WHERE NOT EXISTS (SELECT 1 FROM terms WHERE fence > :fence)
ON CONFLICT (fence) DO UPDATE SET newest = :now
"""

PRICE = "INSERT INTO shares (symbol, price) VALUES (?, ?) ON CONFLICT DO UPDATE SET price = excluded.price"

TERMS_SHOWN = 12


class Board:
    """What all workers share.

    Args:
        path: the file; it is made when it is needed first.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def publish(self, fence: int, worker: int, prices: Mapping[str, float]) -> bool:
        """Write new prices, unless a newer term has begun: whether they were written."""
        with self._transaction() as database:
            values = {"fence": fence, "worker": worker, "now": time.time()}
            if not database.execute(BEGIN_OR_GO_ON, values).rowcount:
                database.execute("UPDATE terms SET refused = refused + 1 WHERE fence = ?", (fence,))
                return False
            database.executemany(PRICE, prices.items())
            return True

    def owned(self, symbol: str) -> int | None:
        """How many of a share the desk has; None of one that was never published."""
        with self._opened() as database:
            row = database.execute("SELECT owned FROM shares WHERE symbol = ?", (symbol,)).fetchone()
        return None if row is None else row["owned"]

    def own(self, symbol: str, owned: int, fence: int) -> bool:
        """Write how many the desk has, unless somebody wrote under a newer lock: whether it was written."""
        with self._transaction() as database:
            statement = "UPDATE shares SET owned = ?, lock_fence = ? WHERE symbol = ? AND lock_fence <= ?"
            return database.execute(statement, (owned, fence, symbol, fence)).rowcount == 1

    def seen(self) -> dict[str, object]:
        """All that the page shows of it; the newest terms come first."""
        with self._opened() as database:
            terms = database.execute("SELECT * FROM terms ORDER BY fence DESC LIMIT ?", (TERMS_SHOWN,)).fetchall()
            shares = database.execute("SELECT symbol, price, owned FROM shares ORDER BY symbol").fetchall()
        return {"terms": [dict(row) for row in terms], "shares": [dict(row) for row in shares]}

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=10, isolation_level=None)) as database:
            database.row_factory = sqlite3.Row
            database.executescript(SCHEMA)
            yield database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")
            with database:  # commits, or rolls back
                yield database
