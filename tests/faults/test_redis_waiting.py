"""Waiting on Redis: woken by messages over one connection, and not stuck when they do not come."""

import asyncio
import logging
from collections.abc import AsyncIterator
from time import monotonic

import pytest
from redis.asyncio import Redis

from grelmicro.backends.hints import TEST_INTERVAL
from grelmicro.backends.redis import RedisStore
from grelmicro.backends.redis.server import RedisServer
from grelmicro.coordination import Lock, LockHandle
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartRedis
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.usefixtures("nothing_left")

LEASE = 300.0
"""Seconds: if anything waited for its end, the test would hang."""


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def waiter(proxy: Proxy, namespace: str) -> AsyncIterator[LockAdapter]:
    """Of a process that waits, by way of the proxy."""
    async with LockAdapter(RedisStore(proxy.url, namespace=namespace)) as backend:
        yield backend


@pytest.fixture
async def holder(redis_url: str, namespace: str) -> AsyncIterator[LockAdapter]:
    """Of a process that holds."""
    async with LockAdapter(RedisStore(redis_url, namespace=namespace)) as backend:
        yield backend


def lock_on(backend: LockAdapter, name: str = "cart") -> Lock:
    return Lock(name, backend=backend, lease_duration=LEASE)


async def hand_over(held: LockHandle, waiting: "asyncio.Task[LockHandle]") -> float:
    """Seconds from a release until the next one has it."""
    begun = monotonic()
    await held.release()
    handle = await asyncio.wait_for(waiting, 30.0)
    took = monotonic() - begun
    await handle.release()
    return took


async def is_marked(backend: LockAdapter) -> bool:
    record = await backend.read("lock:cart")
    return record is not None and record.waited


async def until_marked(backend: LockAdapter) -> None:
    """Until the other process has said that it waits."""
    while not await is_marked(backend):
        await asyncio.sleep(0.002)


async def test_a_release_before_the_subscription_is_not_missed(
    waiter: LockAdapter, holder: LockAdapter, proxy: Proxy
) -> None:
    """The subscription takes a while, and in that time it is released."""
    for turn in range(10):
        name = f"cart:{turn}"
        held = await lock_on(holder, name).acquire()
        subscribe = proxy.hold_request(b"\r\nSUBSCRIBE\r\n")
        waiting = asyncio.create_task(lock_on(waiter, name).acquire())
        await subscribe.struck()
        await asyncio.sleep(0.02)
        await held.release()
        assert not waiting.done()
        subscribe.release()
        handle = await asyncio.wait_for(waiting, 5.0)
        await handle.release()


async def test_the_releases_of_another_process_are_heard_at_once(
    waiter: LockAdapter, holder: LockAdapter, proxy: Proxy
) -> None:
    took = []
    for _ in range(30):
        held = await lock_on(holder).acquire()
        before = proxy.requests
        waiting = asyncio.create_task(lock_on(waiter).acquire())
        await until_marked(holder)
        await asyncio.sleep(0.02)
        took.append(await hand_over(held, waiting))
        assert proxy.requests - before <= 6, "it does not poll"
    assert sorted(took)[15] < 5.0


async def test_a_connection_for_messages_that_is_killed_is_replaced(
    waiter: LockAdapter, holder: LockAdapter, redis_url: str
) -> None:
    async with Redis.from_url(redis_url) as client:
        for _ in range(3):
            held = await lock_on(holder).acquire()
            waiting = asyncio.create_task(lock_on(waiter).acquire())
            await until_marked(holder)
            await client.client_kill_filter(_type="pubsub")
            await hand_over(held, waiting)

    def trusted() -> bool:
        return all(isinstance(b.store, RedisStore) and b.store._get_open().hints.trusted for b in (waiter, holder))

    await eventually(trusted, "messages come again")
    held = await lock_on(holder).acquire()
    waiting = asyncio.create_task(lock_on(waiter).acquire())
    await until_marked(holder)
    await hand_over(held, waiting)


async def test_messages_of_a_demoted_server_are_not_relied_on(start_redis: StartRedis, namespace: str) -> None:
    """Its name leads to the promoted server from then on, and the connection for messages stays where it is."""
    demoted, promoted = start_redis(), start_redis()
    async with Proxy(demoted.url) as proxy, LockAdapter(RedisStore(proxy.url, namespace=namespace)) as waiter:
        assert isinstance(waiter.store, RedisStore)
        hints = waiter.store._get_open().hints
        async with waiter.watch("lock:cart") as waiting:
            await eventually(lambda: waiting.pushes, "messages come")
            demoted.ask("REPLICAOF 127.0.0.1 1")
            proxy.lead_to(promoted.url)
            begun = monotonic()
            woken = asyncio.create_task(waiting.wait(LEASE))
            with pytest.raises(BackendUnavailableError, match="it is a replica"):
                await waiter.acquire("lock:other", "h", LEASE)
            assert not hints.trusted, "from the answer on"
            assert await asyncio.wait_for(woken, 10.0) is True, "the waiter asks"
            while not waiting.pushes:
                await asyncio.sleep(0.01)
            assert monotonic() - begun < TEST_INTERVAL - 5.0
            promoted.ask(f"PUBLISH {namespace}:lease:lock:cart x")
            assert await asyncio.wait_for(waiting.wait(LEASE), 10.0) is True


async def test_messages_that_are_swallowed_are_not_relied_on(
    holder: LockAdapter, proxy: Proxy, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    proxy.swallow_pushes()
    async with LockAdapter(RedisStore(proxy.url, namespace=namespace)) as waiter:
        for _ in range(5):
            held = await lock_on(holder).acquire()
            waiting = asyncio.create_task(lock_on(waiter).acquire())
            await asyncio.sleep(0.05)
            await hand_over(held, waiting)
        await eventually(lambda: "they poll meanwhile" in caplog.text, "it is warned about")


async def test_the_lease_of_a_holder_that_does_nothing_more_ends_for_those_who_wait(
    waiter: LockAdapter, holder: LockAdapter
) -> None:
    await holder.store.acquire("lock:cart", "gone", 1.5)
    begun = monotonic()
    order: list[int] = []

    async def wait(number: int) -> None:
        async with await lock_on(waiter).acquire(timeout=60):
            order.append(number)

    await asyncio.gather(wait(1), wait(2), wait(3))
    assert order == [1, 2, 3]
    assert 1.0 < monotonic() - begun < 30


async def test_thousands_of_names_use_few_connections(start_redis: StartRedis, namespace: str) -> None:
    server = start_redis(appendonly="no", maxclients=20)
    address = RedisServer.at({"command_timeout": 30.0}, url=server.url)
    async with (
        LockAdapter(RedisStore(address, namespace=namespace)) as holder,
        LockAdapter(RedisStore(RedisServer.at({"max_connections": 3}, url=server.url), namespace=namespace)) as waiter,
        Redis.from_url(server.url) as client,
    ):
        names = [f"cart:{number}" for number in range(1000)]
        held = await asyncio.gather(*(lock_on(holder, name).acquire() for name in names))
        waiting = [asyncio.create_task(lock_on(waiter, name).acquire()) for name in names]
        async with asyncio.timeout(50):
            while len(await client.pubsub_channels()) < 1000:
                await asyncio.sleep(0.05)
        assert len(await client.client_list(_type="pubsub")) == 2, "one a process"
        assert (await client.info("clients"))["connected_clients"] <= 20
        await asyncio.gather(*(handle.release() for handle in held))
        got = await asyncio.wait_for(asyncio.gather(*waiting), 50)
        await asyncio.gather(*(handle.release() for handle in got))
        await eventually(lambda: not waiter.queues.lines, "nothing is kept per name")


async def test_a_thousand_who_wait_for_one_name_ask_like_one(
    waiter: LockAdapter, holder: LockAdapter, proxy: Proxy
) -> None:
    held = await lock_on(holder).acquire()
    before = proxy.requests
    waiting = [asyncio.create_task(lock_on(waiter).acquire(timeout=60)) for _ in range(1000)]
    await until_marked(holder)
    await asyncio.sleep(1.0)
    assert proxy.requests - before <= 5
    for task in waiting[1:]:
        task.cancel()
    await hand_over(held, waiting[0])
    await asyncio.wait(waiting)
