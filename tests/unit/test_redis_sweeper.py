"""Locks on a Redis server whose lease ended by itself get a time to live while the service runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from redis.asyncio import Redis

from grelmicro import Grelmicro
from grelmicro.backends import sweeper
from grelmicro.backends.redis import RedisLockAdapter, RedisStore, table
from grelmicro.backends.sweeper import SWEEP_INTERVAL
from grelmicro.coordination import Coordination, TaskLock
from grelmicro.testing import MovableClock
from tests.helpers.worlds import PATIENCE
from tests.servers.fixtures import StartRedis
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def client(every_redis: RedisServer) -> AsyncIterator["Redis"]:
    """A client beside the store, on each version of the server."""
    async with Redis.from_url(every_redis.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def clock() -> MovableClock:
    """Says when a round is due."""
    return MovableClock()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each acquire begins a round unless one is under way, which makes no pauses."""
    monkeypatch.setattr(sweeper, "SWEEP_INTERVAL", 0.0)
    monkeypatch.setattr(sweeper, "SWEEP_PAUSE", 0.0)


async def lasting(client: "Redis", namespace: str) -> set[str]:
    """The names whose record has no time to live."""
    prefix = f"{namespace}:lease:"
    return {
        key.removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*", 1000) if await client.pttl(key) == -1
    }


async def until_lasting(client: "Redis", store: RedisStore, expected: set[str]) -> None:
    """Acquire `lock:now` until just these records have no time to live, which none of them gets meanwhile."""
    async with asyncio.timeout(PATIENCE):
        await store.acquire("lock:now", "h", 300.0)
        while (found := await lasting(client, store.namespace)) != expected:
            assert found >= expected
            await store.acquire("lock:now", "h", 300.0)
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("always")
async def test_expired_locks_get_a_time_to_live_and_nothing_else_does(
    every_redis: RedisServer, client: "Redis", namespace: str
) -> None:
    async with RedisStore(every_redis.url, namespace=namespace, retention=1000.0) as store:
        kept = {"lock:held", "tasklock:held", "leader:gone", "schedule:gone", "tasklock:data", "lock:foreign"}
        for name in ("lock:held", "tasklock:held"):
            await store.acquire(name, "h", 300.0)
        for name in ("leader:gone", "schedule:gone"):
            await store.acquire(name, "h", 0.001)
        await store.acquire("tasklock:data", "h", 0.001, data={"k": "v"})
        await client.set(f"{namespace}:lease:lock:foreign", "something else")
        expired: Mapping[Any, Any] = {"holder": "h", "fence": 1, "expires_at": 1}
        await client.hset(f"{namespace}-other:lease:lock:a", mapping=expired)
        for name in ("process:killed", "break:lock:a"):  # what they tell counts no more
            await store.acquire(name, "h", 0.001, data={"k": "v"})
        gone = [f"{kind}:{number}" for kind in ("lock", "tasklock") for number in range(700)]
        leases = await asyncio.gather(*(store.acquire(name, "h", 0.001) for name in gone))
        await until_lasting(client, store, kept | {"lock:now"})
        assert await lasting(client, f"{namespace}-other") == {"lock:a"}
        assert await client.hget(f"{namespace}:lease:leader:gone", "holder") == "h"
        assert 990_000 < await client.pttl(f"{namespace}:lease:{gone[0]}") <= 1_000_000
        again = await store.acquire(gone[0], "other", 300.0)
        assert again.fence == leases[0].fence + 1
        assert await client.pttl(f"{namespace}:lease:{gone[0]}") == -1, "it is held again"


@pytest.mark.usefixtures("always")
async def test_task_locks_per_request_do_not_fill_the_server(
    every_redis: RedisServer, client: "Redis", namespace: str
) -> None:
    backend = RedisLockAdapter(every_redis.url, namespace=namespace)
    store = backend.store
    assert isinstance(store, RedisStore)
    async with Grelmicro(uses=[Coordination(lock=backend)]):
        for number in range(20):
            async with TaskLock(f"export:{number}", min_hold_duration=0.01):
                pass
        await until_lasting(client, store, {"lock:now"})


@pytest.mark.usefixtures("always")
async def test_a_record_that_was_swept_and_dropped_repeats_no_fence(
    every_redis: RedisServer, client: "Redis", namespace: str
) -> None:
    async with RedisStore(every_redis.url, namespace=namespace, retention=0.01) as store:
        fences = []
        for _ in range(3):
            fences.append((await store.acquire("lock:a", "h", 0.001)).fence)
            async with asyncio.timeout(PATIENCE):
                while await client.exists(f"{namespace}:lease:lock:a"):
                    await store.acquire("lock:now", "h", 300.0)
                    await asyncio.sleep(0.02)
        assert fences == sorted(set(fences))


async def test_a_round_is_due_once_in_an_interval_and_goes_on_a_part_at_a_time(
    every_redis: RedisServer, client: "Redis", namespace: str, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "random", lambda: 0.5)
    monkeypatch.setattr(sweeper, "SWEEP_PAUSE", 1000.0)
    monkeypatch.setattr(table, "SWEEP_PAGE", 10)
    async with RedisStore(every_redis.url, namespace=namespace, clock=clock) as store:
        names = {f"lock:{number:03}" for number in range(300)}
        await asyncio.gather(*(store.acquire(name, "h", 0.001) for name in names))
        await clock.advance(SWEEP_INTERVAL * 0.4)
        await store.acquire("lock:now", "h", 300.0)
        await asyncio.sleep(0.1)
        assert await lasting(client, namespace) == names | {"lock:now"}
        await clock.advance(SWEEP_INTERVAL * 0.2)
        async with asyncio.timeout(PATIENCE):
            while (first := await lasting(client, namespace)) == names | {"lock:now"}:
                await store.acquire("lock:now", "h", 300.0)
                await asyncio.sleep(0.02)
        assert len(first) > 250, "a part of them"
        await clock.advance(SWEEP_INTERVAL * 2)
        await store.acquire("lock:now", "h", 300.0)
        await asyncio.sleep(0.1)
        assert await lasting(client, namespace) == first, "a round that is under way is the only one"
        rounds = [task for task in asyncio.all_tasks() if task.get_name() == "grelmicro-sweeper"]
        assert len(rounds) == 1


@pytest.mark.usefixtures("always")
async def test_a_user_who_may_not_search_still_acquires(
    start_redis: StartRedis, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis(user=["default on nopass ~* &* +@all -scan"])
    caplog.set_level(logging.DEBUG, logger="grelmicro")
    async with RedisStore(server.url, namespace=namespace) as store, asyncio.timeout(PATIENCE):
        while "old records were left as they are" not in caplog.text:
            assert (await store.acquire("lock:a", "h", 300.0)).granted_to("h")
            await asyncio.sleep(0.02)
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


@pytest.mark.usefixtures("always")
async def test_a_server_that_is_gone_ends_the_round_and_the_next_one_goes_on(
    start_redis: StartRedis, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "SWEEP_PAUSE", 0.05)
    monkeypatch.setattr(table, "SWEEP_PAGE", 1)
    server = start_redis()
    caplog.set_level(logging.DEBUG, logger="grelmicro")
    async with RedisStore(server.url, namespace=namespace) as store:
        await asyncio.gather(*(store.acquire(f"lock:{number}", "h", 0.001) for number in range(200)))
        await store.acquire("lock:now", "h", 300.0)
        server.kill()
        async with asyncio.timeout(PATIENCE):
            while "old records were left as they are" not in caplog.text:
                await asyncio.sleep(0.02)
        server.start()
        monkeypatch.setattr(sweeper, "SWEEP_PAUSE", 0.0)
        async with Redis.from_url(server.url, decode_responses=True) as client:
            await until_lasting(client, store, {"lock:now"})
