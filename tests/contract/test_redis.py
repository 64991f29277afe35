"""The Redis store keeps the contract, on every version of Redis and Valkey that is found."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from grelmicro.backends.redis import RedisStore
from tests.contract.passing import PassingContract
from tests.contract.raising import RaisingContract
from tests.servers.redis import RedisServer


class TestRedis(PassingContract, RaisingContract):
    """The second store has connections of its own, as another process has."""

    @pytest.fixture
    async def store(self, every_redis: RedisServer, namespace: str) -> AsyncIterator[RedisStore]:
        async with RedisStore(every_redis.url, namespace=namespace) as store:
            yield store

    @pytest.fixture
    async def other(self, store: RedisStore, every_redis: RedisServer) -> AsyncIterator[RedisStore]:
        async with RedisStore(every_redis.url, namespace=store.namespace) as other:
            yield other

    async def let_pass(self, store: RedisStore, seconds: float) -> None:
        await asyncio.sleep(seconds)
