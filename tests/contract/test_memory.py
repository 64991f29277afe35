"""The memory store keeps the contract."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.testing import LeaseStoreContract, MovableClock


class TestMemory(LeaseStoreContract):
    """On a clock that is moved."""

    exact = True

    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        async with MemoryStore(clock=MovableClock()) as store:
            yield store

    async def let_pass(self, store: MemoryStore, seconds: float) -> None:
        assert isinstance(store.clock, MovableClock)
        await store.clock.advance(seconds)


class TestMemoryInRealTime(LeaseStoreContract):
    """On the machine's clock."""

    @pytest.fixture
    async def store(self) -> AsyncIterator[MemoryStore]:
        async with MemoryStore() as store:
            yield store

    async def let_pass(self, store: MemoryStore, seconds: float) -> None:
        await asyncio.sleep(seconds)
