"""Contender: the bare floor, the fewest statements that take and give a lease. It cannot wait, and checks nothing."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiosqlite

from benchmarks.measure import Guard, Measurements
from benchmarks.serve import arguments, serve

LEASE = 60.0

TABLE = """
CREATE TABLE IF NOT EXISTS floor (name TEXT PRIMARY KEY, holder TEXT, until REAL, fence INTEGER NOT NULL) WITHOUT ROWID
"""
TAKE = """
INSERT INTO floor (name, holder, until, fence) VALUES (:name, :holder, :until, 1)
ON CONFLICT (name) DO UPDATE SET holder = :holder, until = :until, fence = fence + 1
WHERE holder IS NULL OR until < :now RETURNING fence
"""
GIVE = "UPDATE floor SET holder = NULL, until = NULL WHERE name = :name AND holder = :holder RETURNING fence"


class MemoryFloor:
    """The lock of the standard library, which alone is able to wait."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock

    async def acquire(self) -> object:
        """Take it."""
        return await self._lock.acquire()

    async def release(self) -> object:
        """Give it back."""
        self._lock.release()
        return None


class SQLiteFloor:
    """One statement to take a lease, one to give it back."""

    def __init__(self, connection: aiosqlite.Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    async def acquire(self) -> object:
        """Take it; an error when that fails, since nobody else should have it."""
        now = time.time()
        values = {"name": self._name, "holder": "floor", "until": now + LEASE, "now": now}
        return await self._only_row(TAKE, values)

    async def release(self) -> object:
        """Give it back."""
        return await self._only_row(GIVE, {"name": self._name, "holder": "floor"})

    async def _only_row(self, statement: str, values: dict[str, object]) -> object:
        async with self._connection.execute(statement, values) as cursor:
            row = await cursor.fetchone()
        if row is None:
            raise RuntimeError(f"{self._name} was not in the state that it should be in")
        return row


@asynccontextmanager
async def sqlite_connection(file: str) -> AsyncIterator[aiosqlite.Connection]:
    """A connection with the settings that the store uses too."""
    async with aiosqlite.connect(file, isolation_level=None) as connection:
        await connection.execute("PRAGMA journal_mode = WAL")
        await connection.execute("PRAGMA synchronous = NORMAL")
        await connection.execute(TABLE)
        yield connection


async def main() -> None:
    """Open the store, and be measured."""
    given = arguments()
    if given.store == "memory":
        locks: dict[str, asyncio.Lock] = {}

        def in_memory(name: str) -> Guard:
            return MemoryFloor(locks.setdefault(name, asyncio.Lock()))

        await serve(Measurements(in_memory, in_memory, Counter()))
        return
    async with sqlite_connection(given.file) as connection:

        def in_file(name: str) -> Guard:
            return SQLiteFloor(connection, name)

        await serve(Measurements(in_file, in_file, Counter()))


if __name__ == "__main__":
    asyncio.run(main())
