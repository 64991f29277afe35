"""The SQLite store keeps the contract."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.backends.sqlite import store as sqlite_store
from grelmicro.testing import MovableClock
from tests.contract.passing import PassingContract
from tests.contract.raising import RaisingContract


class TestSQLite(PassingContract, RaisingContract):
    """On a clock that is moved; the second store is another instance on the same file."""

    exact = True

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SQLiteStore]:
        async with SQLiteStore(tmp_path / "locks.db", clock=MovableClock()) as store:
            yield store

    @pytest.fixture
    async def other(self, store: SQLiteStore) -> AsyncIterator[SQLiteStore]:
        async with SQLiteStore(store.path, clock=store.clock) as other:
            yield other

    async def let_pass(self, store: SQLiteStore, seconds: float) -> None:
        assert isinstance(store.clock, MovableClock)
        await store.clock.advance(seconds)


class TestSQLiteInRealTime(PassingContract, RaisingContract):
    """On the host's clock."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SQLiteStore]:
        async with SQLiteStore(tmp_path / "locks.db") as store:
            yield store

    @pytest.fixture
    async def other(self, store: SQLiteStore) -> AsyncIterator[SQLiteStore]:
        async with SQLiteStore(store.path) as other:
            yield other

    async def let_pass(self, store: SQLiteStore, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TestSQLiteProbed(TestSQLiteInRealTime):
    """On a file system whose changes the operating system does not report, as far as it is known."""

    @pytest.fixture(autouse=True)
    def unreported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite_store, "check_place", lambda path: False)
