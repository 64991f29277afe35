"""A file that another process keeps locked: how long those who ask for a lock wait, and what is left of it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic

import pytest

from grelmicro.backends.sqlite import SQLiteLockAdapter, lane
from grelmicro.coordination import Lock, LockHandle
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError, WouldBlockError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
async def lock(path: Path) -> AsyncIterator[Lock]:
    async with SQLiteLockAdapter(path) as backend:
        yield Lock("cart", backend=backend)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else can write to the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        yield


async def is_free(lock: Lock) -> bool:
    async with asyncio.timeout(30.0):
        async with lock:
            return True


async def test_one_try_waits_for_the_file_and_not_for_the_lock(lock: Lock, path: Path) -> None:
    with locked(path):
        tries = [asyncio.ensure_future(lock.acquire(timeout=0)), asyncio.ensure_future(lock.acquire_nowait())]
        await asyncio.wait(tries, timeout=0.3)
        assert not any(each.done() for each in tries)
    held, busy = await asyncio.gather(*tries, return_exceptions=True)
    assert isinstance(held, LockHandle)
    assert isinstance(busy, WouldBlockError)


@pytest.mark.parametrize("kind", ["acquire", "acquire_nowait"])
async def test_one_try_ends_with_the_limit_of_the_store(
    lock: Lock, path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "BUSY_TIMEOUT", 0.3)
    with locked(path):
        began = monotonic()
        with pytest.raises(BackendUnavailableError, match="kept it locked"):
            await (lock.acquire(timeout=0) if kind == "acquire" else lock.acquire_nowait())
        assert monotonic() - began > 0.2
    assert await is_free(lock)


async def test_a_short_wait_ends_in_its_time_and_takes_nothing(lock: Lock, path: Path) -> None:
    with locked(path):
        began = monotonic()
        with pytest.raises(OutcomeUnknownError):
            await lock.acquire(timeout=0.7)
        assert monotonic() - began < lane.BUSY_TIMEOUT - 1
    assert await is_free(lock)
