"""Waiting on each server: what many waiters cost, and how late a hand-over is when messages are late or do not come."""

import asyncio
import logging
from collections.abc import AsyncIterator
from random import Random
from time import monotonic

import pytest
from redis.asyncio import Redis

from grelmicro.coordination import Coordination, Lock, LockHandle
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.turns import LOCAL_RUN
from grelmicro.coordination.wait import SAFETY_POLL
from tests.helpers.matrix import further
from tests.helpers.postgres import fetchval
from tests.helpers.stores import TroubledStore
from tests.helpers.worlds import eventually
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.usefixtures("nothing_left")

LEASE = 300.0
"""Seconds: if anything waited for its end, the test would hang."""

PROMPT = SAFETY_POLL / 2
"""Seconds: a hand-over that takes less was not found by the poll of those who rely on messages."""


# Kubernetes has its own: test_kubernetes_waiting.py.
@pytest.fixture(params=["postgres", *further("redis")])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    async with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
async def holder(url: str) -> AsyncIterator[LockAdapter]:
    """Of a process that holds."""
    async with client_of(url) as backend:
        yield backend


def client_of(url: str) -> LockAdapter:
    backend = Coordination.from_url(url).lock_backend
    assert isinstance(backend, LockAdapter)
    return backend


def lock_on(backend: LockAdapter, name: str = "cart") -> Lock:
    return Lock(name, backend=backend, lease_duration=LEASE, retry_interval=0.2)


async def until_marked(backend: LockAdapter, name: str = "cart") -> None:
    """Until the other process has said that it waits."""
    while (record := await backend.read(f"lock:{name}")) is None or not record.waited:
        await asyncio.sleep(0.002)


async def hand_over(held: LockHandle, waiting: "asyncio.Task[LockHandle]") -> float:
    """Seconds from a release until the next one has it."""
    begun = monotonic()
    await held.release()
    handle = await asyncio.wait_for(waiting, 30.0)
    took = monotonic() - begun
    await handle.release()
    return took


def waiting_for(backend: LockAdapter, name: str = "cart") -> asyncio.Task[LockHandle]:
    return asyncio.create_task(lock_on(backend, name).acquire())


async def test_a_busy_process_lets_another_one_in(url: str, holder: LockAdapter) -> None:
    """However long its own line and each of its turns are."""
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            async with lock_on(holder):
                turns += 1
                await asyncio.sleep(0.05)

    async with client_of(url) as waiter:
        workers = [asyncio.create_task(work()) for _ in range(5)]
        try:
            await eventually(lambda: turns > 2, "they are at work")
            for _ in range(4):
                before = turns
                handle = await asyncio.wait_for(waiting_for(waiter), 30.0)
                # On a busy machine it may come too late once or twice; the pauses for it grow.
                assert turns - before <= 3 * LOCAL_RUN + 2
                await handle.release()
                await asyncio.sleep(0.1)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
            await eventually(lambda: not holder._background, "what was cut off is undone")


async def test_those_who_wait_in_one_process_ask_one_after_the_other(url: str, holder: LockAdapter) -> None:
    """While another process holds it, they cost what one waiter costs; then each costs one request."""
    store = TroubledStore(client_of(url).store)
    async with LockAdapter(store) as waiter:
        held = await lock_on(holder).acquire()
        order: list[int] = []

        async def work(number: int) -> None:
            async with lock_on(waiter):
                order.append(number)

        working = [asyncio.create_task(work(number)) for number in range(500)]
        await until_marked(holder)
        await asyncio.sleep(1.0)
        assert store.calls.total() <= 4, store.calls
        assert store.calls["watch"] == 1
        await held.release()
        await asyncio.wait_for(asyncio.gather(*working), 50)
        assert order == list(range(500))
        # Who is woken may ask once in vain, because the release is still under way or the message was for another one.
        assert store.calls["acquire"] <= 2 * 500 + 4, store.calls
        assert store.calls["release"] == 500


async def listening(url: str) -> int:
    """Connections to the server on which messages arrive."""
    if not url.startswith("redis"):
        listens = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        return int(await fetchval(url, listens))
    async with Redis.from_url(url) as client:
        return len(await client.client_list(_type="pubsub"))


async def test_all_that_waits_on_one_store_shares_one_connection(url: str, holder: LockAdapter) -> None:
    names = [f"cart:{number}" for number in range(200)]
    async with Coordination.from_url(url) as coordination:
        backend = coordination.lock_backend
        assert isinstance(backend, LockAdapter)
        held = await asyncio.gather(*(lock_on(holder, name).acquire() for name in names))
        role = await holder.acquire("leader:job", "another", LEASE)
        leader = coordination.leaderelection("job")
        service = asyncio.create_task(leader())
        waiting = [waiting_for(backend, name) for name in names]
        for name in names:
            await until_marked(holder, name)
        while (record := await holder.read("leader:job")) is None or not record.waited:
            await asyncio.sleep(0.002)
        assert await listening(url) == 2, "that of the holder, and that of those who wait"
        begun = monotonic()
        await holder.release(role)
        await asyncio.gather(*(handle.release() for handle in held))
        got = await asyncio.wait_for(asyncio.gather(*waiting), 30.0)
        await asyncio.wait_for(leader.wait_for_leader(), 30.0)
        assert monotonic() - begun < PROMPT
        await asyncio.gather(*(handle.release() for handle in got))
        service.cancel()
        await asyncio.wait({service})


async def test_messages_that_never_came_are_told_once_and_not_waited_for(
    holder: LockAdapter, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    proxy.swallow_pushes()
    async with client_of(proxy.url) as waiter:
        await eventually(lambda: "they poll meanwhile" in caplog.text, "it is told")
        took = []
        for _ in range(10):
            held = await lock_on(holder).acquire()
            waiting = waiting_for(waiter)
            await until_marked(holder)
            took.append(await hand_over(held, waiting))
        assert max(took) < 2.0, "it polls five times a second, also while the next test of the messages goes on"
        assert caplog.text.count("they poll meanwhile") == 1


@pytest.mark.slow
async def test_messages_that_come_no_more_cost_one_poll(holder: LockAdapter, proxy: Proxy) -> None:
    """Nothing tells a waiter that they fail since a moment ago, so it looks for itself in time."""
    async with client_of(proxy.url) as waiter:
        held = await lock_on(holder).acquire()
        waiting = waiting_for(waiter)
        await until_marked(holder)
        proxy.swallow_pushes()
        took = await hand_over(held, waiting)
        assert proxy.swallowed, "there was a message"
        assert took < SAFETY_POLL + 3.0


async def test_late_subscriptions_miss_no_release(holder: LockAdapter, proxy: Proxy) -> None:
    """Each lock is released at another moment while its waiter asks, subscribes, and asks again."""
    moments = Random(11)
    async with client_of(proxy.url) as waiter:
        proxy.delay(requests=0.05, replies=0.05)

        async def pass_on(name: str) -> float:
            held = await lock_on(holder, name).acquire()
            waiting = waiting_for(waiter, name)
            await asyncio.sleep(moments.random() * 0.6)
            return await hand_over(held, waiting)

        took = [each for _ in range(5) for each in await asyncio.gather(*(pass_on(f"cart:{n}") for n in range(20)))]
        await proxy.heal()
    assert len(took) == 100
    assert max(took) < PROMPT, sorted(took)[-5:]
