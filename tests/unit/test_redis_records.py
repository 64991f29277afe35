"""What the Redis store keeps: a lease's record, its fence and time to live; and what else may be at its key."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from time import time
from typing import Any

import pytest
from redis.asyncio import Redis

from grelmicro.backends.redis import RedisStore
from grelmicro.errors import BackendUnavailableError, SettingsValidationError
from grelmicro.leases import Lease
from tests.servers.fixtures import StartRedis
from tests.servers.redis import RedisServer


@pytest.fixture
async def client(every_redis: RedisServer) -> AsyncIterator["Redis"]:
    """A client beside the store, on each version of the server."""
    async with Redis.from_url(every_redis.url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def store(every_redis: RedisServer, namespace: str) -> AsyncIterator[RedisStore]:
    async with RedisStore(every_redis.url, namespace=namespace) as store:
        yield store


def key(store: RedisStore, name: str) -> str:
    return f"{store.namespace}:lease:{name}"


async def test_a_lease_is_one_hash_that_tells_everything(store: RedisStore, client: "Redis") -> None:
    before = time() * 1e6
    lease = await store.acquire("leader:main", "h", 30.0, data={"pod": "ü"})
    assert await client.keys(f"{store.namespace}*") == [key(store, "leader:main")]
    stored = await client.hgetall(key(store, "leader:main"))
    assert stored["holder"] == "h"
    assert before - 1e6 < int(stored["fence"]) < before + 5e6
    assert int(stored["expires_at"]) - int(stored["renewed_at"]) == 30_000_000
    assert stored["acquired_at"] == stored["renewed_at"]
    assert stored["transitions"] == "0"
    assert json.loads(stored["data"]) == {"pod": "ü"}
    assert lease.fence == int(stored["fence"])


async def test_times_are_exact_to_the_microsecond(store: RedisStore) -> None:
    for ttl in (0.000_001, 0.000_123, 1.234_567, 10 * 365 * 86_400.0):
        lease = await store.acquire("lock:a", "h", ttl)
        assert lease.granted_to("h")
        assert lease.remaining == pytest.approx(ttl, abs=5e-7)
        await store.release(lease)


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), 1e12, True])
async def test_a_duration_that_is_none_is_refused(store: RedisStore, ttl: float) -> None:
    with pytest.raises(SettingsValidationError, match="ttl should be a number of seconds"):
        await store.acquire("lock:a", "h", ttl)
    assert await store.read("lock:a") is None


# Time to live


@pytest.mark.parametrize(
    ("name", "data", "dropped"),
    [
        ("lock:a", None, True),
        ("tasklock:a", None, True),
        ("tasklock:a", {"k": "v"}, False),
        ("leader:a", None, False),
        ("schedule:a", None, False),
    ],
)
async def test_only_a_free_lock_without_data_has_a_time_to_live(
    every_redis: RedisServer, client: "Redis", namespace: str, name: str, data: dict[str, str] | None, dropped: bool
) -> None:
    async with RedisStore(every_redis.url, namespace=namespace, retention=1000.0) as store:
        lease = await store.acquire(name, "h", 30.0, data=data)
        assert await client.pttl(key(store, name)) == -1
        await store.renew(lease, 60.0)
        assert await client.pttl(key(store, name)) == -1
        await store.release(lease)
        left = await client.pttl(key(store, name))
        assert 990_000 < left <= 1_000_000 if dropped else left == -1
        again = await store.acquire(name, "other", 30.0)
        assert again.fence == lease.fence + 1
        assert await client.pttl(key(store, name)) == -1, "it is held again"


async def test_data_that_is_taken_away_at_the_end_does_not_keep_the_record(store: RedisStore, client: "Redis") -> None:
    lease = await store.acquire("lock:a", "h", 30.0, data={"k": "v"})
    await store.release(lease, data={})
    assert await client.pttl(key(store, "lock:a")) > 0
    lease = await store.acquire("lock:a", "h", 30.0)
    await store.release(lease, data={"k": "v"})
    assert await client.pttl(key(store, "lock:a")) == -1


async def test_a_record_that_was_dropped_repeats_no_fence(every_redis: RedisServer, namespace: str) -> None:
    async with RedisStore(every_redis.url, namespace=namespace, retention=0.02) as store:
        fences = []
        for _ in range(3):
            lease = await store.acquire("lock:a", "h", 30.0)
            fences.append(lease.fence)
            await store.release(lease)
            await asyncio.sleep(0.05)
            assert await store.read("lock:a") is None
        assert fences == sorted(set(fences))


async def test_closing_vacates_what_a_crashed_holder_left(
    every_redis: RedisServer, client: "Redis", namespace: str
) -> None:
    async with RedisStore(every_redis.url, namespace=namespace, retention=1000.0) as store:
        crashed = await store.acquire("lock:crashed", "h", 0.05)
        live = await store.acquire("lock:live", "h", 300.0)
        await client.set(key(store, "lock:foreign"), "something else")
        await asyncio.sleep(0.1)
    assert await client.hget(key(store, "lock:crashed"), "holder") is None
    assert await client.hget(key(store, "lock:crashed"), "fence") == str(crashed.fence)
    assert await client.pttl(key(store, "lock:crashed")) > 0
    assert await client.hget(key(store, "lock:live"), "fence") == str(live.fence)
    assert await client.pttl(key(store, "lock:live")) == -1


# Loss


async def test_a_lease_whose_record_vanished_is_lost(store: RedisStore, client: "Redis") -> None:
    first = await store.acquire("lock:a", "h", 300.0)
    second = await store.acquire("lock:b", "h", 300.0)
    await client.delete(key(store, "lock:a"))
    assert await store.renew(first, 300.0) is None
    assert [lease.name for lease in await store.renew_many([(first, 300.0), (second, 300.0)])] == ["lock:b"]
    assert await store.release(first) is False
    assert await client.exists(key(store, "lock:a")) == 0, "nothing of that makes a record"
    assert (await store.acquire("lock:a", "other", 300.0)).fence > first.fence


async def test_something_else_at_the_key_is_told_and_left_alone(store: RedisStore, client: "Redis") -> None:
    held = await store.acquire("lock:held", "h", 300.0)
    for name in ("lock:a", "lock:held"):
        await client.set(key(store, name), "something else")
    for request in (store.acquire("lock:a", "h", 30.0), store.read("lock:a")):
        with pytest.raises(BackendUnavailableError, match="'lock:a'.*holds something else than a lease") as refusal:
            await request
        assert refusal.value.__cause__ is None
    assert await store.renew(held, 30.0) is None, "it is lost"
    assert await store.release(held) is False
    assert await store.renew_many([(held, 30.0)]) == []
    await store.acquire("lock:b", "h", 30.0)
    assert [lease.name async for lease in store.scan()] == ["lock:b"]
    assert await client.get(key(store, "lock:a")) == "something else"


@pytest.mark.parametrize(
    "foreign",
    [
        {"some": "thing"},
        {"holder": "x", "fence": "", "expires_at": "soon"},
        {"holder": "x", "fence": "1e3", "expires_at": "nan"},
        {"holder": "h", "fence": "-inf"},
    ],
)
async def test_a_hash_of_another_kind_is_no_lease(store: RedisStore, client: "Redis", foreign: dict[Any, Any]) -> None:
    await client.hset(key(store, "lock:a"), mapping=foreign)
    assert await store.renew(Lease("lock:a", "h", 1), 30.0) is None
    lease = await store.acquire("lock:a", "h", 30.0)
    assert lease.granted_to("h")
    assert lease.fence > 1e15
    assert await store.release(lease) is True


# Fences


async def test_fences_rise_by_one_on_one_server(store: RedisStore) -> None:
    fences = []
    for _ in range(20):
        lease = await store.acquire("lock:a", "h", 30.0)
        fences.append(lease.fence)
        await store.release(lease)
    assert fences == list(range(fences[0], fences[0] + 20))


async def test_a_record_of_another_incarnation_goes_on_from_the_clock(store: RedisStore, client: "Redis") -> None:
    lease = await store.acquire("lock:a", "h", 300.0)
    # As after a restart from a snapshot, which may be older than the fences that were given since.
    await client.hset(key(store, "lock:a"), mapping={"incarnation": "0" * 40, "fence": lease.fence - 5})
    restored = Lease("lock:a", "h", lease.fence - 5)
    renewed = await store.renew(restored, 300.0)
    assert renewed is not None, "the lease itself goes on"
    assert await client.hget(key(store, "lock:a"), "incarnation") == "0" * 40, "and is still one of before"
    assert (await store.acquire("lock:a", "h", 300.0)).fence == lease.fence - 5
    await store.release(restored)
    next_one = await store.acquire("lock:a", "other", 300.0)
    assert next_one.fence > lease.fence
    await store.release(next_one)
    assert (await store.acquire("lock:a", "other", 300.0)).fence == next_one.fence + 1


async def test_a_fence_never_falls_behind_a_clock_that_was_set_back(store: RedisStore, client: "Redis") -> None:
    await store.acquire("lock:a", "h", 300.0)
    far = 8_000_000_000_000_000
    await client.hset(key(store, "lock:a"), mapping={"incarnation": "0" * 40, "fence": far, "expires_at": 1})
    assert (await store.acquire("lock:a", "h", 300.0)).fence == far + 1


async def test_fences_rise_for_a_user_who_may_not_know_the_server(start_redis: StartRedis, namespace: str) -> None:
    server = start_redis(user=["default on nopass ~* &* +@all -info"])
    async with RedisStore(server.url, namespace=namespace) as store:
        fences = []
        for _ in range(5):
            lease = await store.acquire("lock:a", "h", 30.0)
            fences.append(lease.fence)
            await store.release(lease)
        assert all(later > earlier + 1 for earlier, later in pairwise(fences)), "each from the clock"


# The mark of those who wait


async def waiter_of(store: RedisStore, client: "Redis", name: str) -> str | None:
    waiter = await client.hget(key(store, name), "waiter")
    assert waiter is None or isinstance(waiter, str)
    return waiter


async def test_who_waits_is_marked_until_it_gets_it(
    store: RedisStore, client: "Redis", every_redis: RedisServer, namespace: str
) -> None:
    async with (
        RedisStore(every_redis.url, namespace=namespace) as second,
        RedisStore(every_redis.url, namespace=namespace) as third,
    ):
        lease = await store.acquire("lock:a", "h", 300.0)
        assert not (await second.acquire("lock:a", "b", 300.0)).waited
        assert not await waiter_of(store, client, "lock:a"), "it only asked"
        assert not (await second.acquire("lock:a", "b", 300.0, waiting=True)).waited, "nobody but itself waits"
        assert (await store.acquire("lock:a", "h", 300.0)).waited
        renewed = await store.renew(lease, 300.0)
        assert renewed is not None
        assert renewed.waited
        await store.release(lease)
        theirs = await second.acquire("lock:a", "b", 300.0)
        assert not theirs.waited
        assert not await waiter_of(store, client, "lock:a")
        # Two who wait are several, also for each of them.
        for other in (store, third):
            await other.acquire("lock:a", "c", 300.0, waiting=True)
        assert await waiter_of(store, client, "lock:a") == "*"
        await second.release(theirs)
        assert (await store.acquire("lock:a", "c", 300.0)).waited
        assert await waiter_of(store, client, "lock:a") == "*"


async def test_a_mark_grows_old(store: RedisStore, client: "Redis", every_redis: RedisServer, namespace: str) -> None:
    async def age(seconds: float) -> None:
        waited_at = int(await client.hget(key(store, "lock:a"), "waited_at") or 0)
        await client.hset(key(store, "lock:a"), "waited_at", str(waited_at - round(seconds * 1e6)))

    async with RedisStore(every_redis.url, namespace=namespace) as second:
        await store.acquire("lock:a", "h", 300.0)
        await second.acquire("lock:a", "b", 300.0, waiting=True)
        marked_at = await client.hget(key(store, "lock:a"), "waited_at")
        await second.acquire("lock:a", "b", 300.0, waiting=True)
        assert await client.hget(key(store, "lock:a"), "waited_at") == marked_at, "it is fresh"
        await age(2.0)
        await second.acquire("lock:a", "b", 300.0, waiting=True)
        assert int(await client.hget(key(store, "lock:a"), "waited_at") or 0) >= int(marked_at or 0)
        await age(13.0)
        assert not (await store.acquire("lock:a", "h", 300.0)).waited
        await store.acquire("lock:a", "c", 300.0, waiting=True)
        assert await waiter_of(store, client, "lock:a") not in ("", "*", None), "the old one counts no more"


async def test_a_message_is_sent_only_when_another_process_waits(
    store: RedisStore, client: "Redis", every_redis: RedisServer, namespace: str
) -> None:
    async with (
        RedisStore(every_redis.url, namespace=namespace) as second,
        client.pubsub(ignore_subscribe_messages=True) as messages,
    ):
        await messages.subscribe(key(store, "lock:a"))
        await messages.get_message(timeout=1.0)

        async def heard() -> int:
            await client.publish(key(store, "lock:a"), "end")
            number = 0
            while True:
                message = await messages.get_message(timeout=5.0)
                if message is not None and message["data"] == "end":
                    return number
                number += message is not None

        lease = await store.acquire("lock:a", "h", 300.0)
        await store.acquire("lock:a", "b", 300.0, waiting=True)  # in the same process
        await store.renew(lease, 100.0)
        await store.release(lease)
        assert await heard() == 0
        lease = await store.acquire("lock:a", "h", 300.0)
        await second.acquire("lock:a", "b", 300.0, waiting=True)
        await store.renew(lease, 400.0)
        assert await heard() == 0, "it was not shortened"
        await store.renew(lease, 100.0)
        assert await heard() == 1
        await store.release(lease)
        assert await heard() == 1
        assert await store.release(lease) is False
        assert await heard() == 0


# Names


async def test_names_are_found_whatever_is_in_them(store: RedisStore, client: "Redis") -> None:
    names = ["lock:*", "lock:[a]", "lock:\\", "lock:?", "lock:a^", "lock:{x}y", "lock:}{", "lock:a{}b", "lock:ü"]
    for name in names:
        await store.acquire(name, "h", 30.0)
    await client.set(f"{store.namespace}x:lease:lock:*", "of another namespace")
    for name in names:
        assert [lease.name async for lease in store.scan(name)] == [name]
    assert [lease.name async for lease in store.scan("lock:")] == sorted(names)


async def test_a_scan_of_many_names_is_in_order_and_complete(store: RedisStore) -> None:
    names = [f"lock:{number:05}" for number in range(2500)]
    await asyncio.gather(*(store.acquire(name, "h", 300.0) for name in names))
    assert [lease.name async for lease in store.scan("lock:")] == names


# Opening


async def test_a_policy_that_could_drop_leases_is_warned_about(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_redis(maxmemory="50mb", maxmemory_policy="allkeys-lru")
    async with RedisStore(server.url):
        pass
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "drops any key when its memory is full (maxmemory-policy allkeys-lru)" in warning
    assert "noeviction" in warning


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"maxmemory": "50mb", "maxmemory_policy": "noeviction"},
        {"maxmemory": "50mb", "maxmemory_policy": "volatile-lru"},
        {"maxmemory_policy": "allkeys-lru"},
        {"maxmemory": "50mb", "maxmemory_policy": "allkeys-lru", "user": ["default on nopass ~* &* +@all -info"]},
    ],
)
async def test_others_are_not(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture, settings: dict[str, str]
) -> None:
    async with RedisStore(start_redis(**settings).url):
        pass
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
