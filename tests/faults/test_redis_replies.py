"""Requests and replies that are lost, late, cut or cancelled on their way to and from a Redis server."""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic

import pytest
from redis.asyncio import Redis

from grelmicro.backends.redis import RedisStore
from grelmicro.backends.redis.server import RedisServer
from grelmicro.coordination import Lock, LockHandle, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError
from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
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
async def mine(proxy: Proxy, namespace: str) -> AsyncIterator[LockAdapter]:
    """Of this process, whose connections go through the proxy."""
    server = RedisServer.at({"command_timeout": 2.0}, url=proxy.url)
    async with LockAdapter(RedisStore(server, namespace=namespace)) as backend:
        # From now on the server knows the scripts: a request that is lost or late is one that does something.
        lease = await backend.acquire("lock:warm", "h", LEASE)
        await backend.renew(lease, LEASE)
        assert isinstance(backend.store, RedisStore)
        passed = await backend.store.pass_on(lease, "i", LEASE)
        assert passed is not None
        await backend.release(passed)
        yield backend


@pytest.fixture
async def theirs(redis_url: str, namespace: str) -> AsyncIterator[LockAdapter]:
    """Of another process, with good connections."""
    async with LockAdapter(RedisStore(redis_url, namespace=namespace)) as backend:
        yield backend


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator["Redis"]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def lock_on(backend: LockAdapter, name: str = "cart") -> Lock:
    return Lock(name, backend=backend, lease_duration=LEASE)


async def taken(lock: Lock, patience: float = 10.0) -> LockHandle:
    """Taken soon, long before any lease ends."""
    return await asyncio.wait_for(lock.acquire(), patience)


# Replies


@pytest.mark.parametrize("then", ["reset", "silent"])
async def test_an_acquire_whose_reply_was_lost_does_not_wait_for_itself(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy, then: str
) -> None:
    fences = [(await taken(lock_on(theirs))).fencing_token]
    await theirs.store.release(await anyone(theirs))
    lost = proxy.drop_reply(b"lock:cart", "reset" if then == "reset" else "silent")
    begun = monotonic()
    with pytest.raises(OutcomeUnknownError, match="acquiring 'lock:cart'"):
        await lock_on(mine).acquire()
    await lost.struck()
    again = await taken(lock_on(mine))
    assert monotonic() - begun < LEASE / 10
    fences.append(again.fencing_token)
    assert fences[1] in (fences[0] + 1, fences[0] + 2), "the lost grant used one fence"
    await again.release()
    assert (await taken(lock_on(theirs))).fencing_token == fences[1] + 1


async def anyone(backend: LockAdapter) -> Lease:
    """The lease of whoever has the lock."""
    record = await backend.read("lock:cart")
    assert record is not None
    return record


@pytest.mark.parametrize("then", ["reset", "silent"])
async def test_what_an_unheard_grant_took_is_free_for_others_soon(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy, then: str
) -> None:
    proxy.drop_reply(b"lock:cart", "reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError):
        await lock_on(mine).acquire(timeout=5)
    await taken(lock_on(theirs))


@pytest.mark.parametrize("then", ["reset", "silent"])
async def test_a_lease_whose_passing_on_was_not_answered_goes_to_the_waiter_all_the_same(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy, then: str
) -> None:
    held = await lock_on(mine).acquire()
    waiting = asyncio.create_task(lock_on(mine).acquire())
    await eventually(lambda: offered(mine), "it offers to take it")
    proxy.drop_reply(held.token.encode(), "reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError, match="releasing 'lock:cart'"):
        await held.release()
    async with asyncio.timeout(LEASE / 10):
        handle = await waiting
        assert handle.fencing_token in (held.fencing_token + 1, held.fencing_token + 2)
        await handle.release()
        await taken(lock_on(theirs))


def offered(backend: LockAdapter) -> bool:
    """Whether the first who waits in this process offers to take what is given back."""
    line = backend.queues.lines.get("lock:cart")
    return line is not None and line.offer is not None


async def test_a_lease_that_is_passed_on_too_late_goes_to_nobody(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy
) -> None:
    held = await mine.acquire("lock:cart", "first-holder", LEASE)
    late = proxy.hold_request(b"late-holder")
    assert isinstance(mine.store, RedisStore)
    with pytest.raises(OutcomeUnknownError):
        await mine.store.pass_on(held, "late-holder", LEASE)
    late.release()
    await late.answered()
    record = await theirs.read("lock:cart")
    assert record is not None
    assert record.holder == "first-holder"
    assert await mine.store.release(Lease("lock:cart", "late-holder", 0)) is False
    assert await mine.release(held)


@pytest.mark.parametrize("then", ["reset", "silent"])
async def test_a_release_whose_reply_was_lost_is_done(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy, then: str
) -> None:
    handle = await lock_on(mine).acquire()
    proxy.drop_reply(b"lock:cart", "reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError, match="releasing 'lock:cart'"):
        await handle.release()
    await taken(lock_on(theirs))


@pytest.mark.parametrize("then", ["reset", "silent"])
async def test_a_renewal_whose_reply_was_lost_loses_nothing(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy, then: str
) -> None:
    handle = await lock_on(mine).acquire()
    proxy.drop_reply(b"lock:cart", "reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError, match="renewing 'lock:cart'"):
        await handle.extend()
    assert handle.valid
    await handle.extend()
    lease = await anyone(mine)
    proxy.drop_reply(b"lock:cart", "reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError, match="renewing 1 leases"):
        await mine.renew_many([(lease, LEASE)])
    assert len(await mine.renew_many([(lease, LEASE)])) == 1
    assert (await anyone(theirs)).fence == handle.fencing_token
    await handle.release()


async def test_a_read_whose_reply_was_lost_is_no_answer(mine: LockAdapter, proxy: Proxy) -> None:
    await lock_on(mine).acquire()
    proxy.drop_reply(b"lock:cart")
    with pytest.raises(BackendUnavailableError, match="reading 'lock:cart'.*ended the connection"):
        await anyone(mine)
    assert (await anyone(mine)).live


async def test_the_next_request_gets_its_own_reply_and_not_a_late_one(mine: LockAdapter, proxy: Proxy) -> None:
    proxy.delay(replies=0.05)
    for number in range(20):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mine.acquire(f"lock:{number}", "h", LEASE), 0.02)
        lease = await mine.acquire(f"lock:{number}:next", f"h{number}", LEASE)
        assert lease.granted_to(f"h{number}")
        assert lease.name == f"lock:{number}:next"
    proxy.delay()


# Requests


async def test_a_request_that_arrives_after_its_undo_is_undone_again(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy
) -> None:
    held = proxy.hold_request(b"lock:cart")
    acquire = asyncio.create_task(lock_on(mine).acquire())
    await held.struck()
    acquire.cancel()
    await asyncio.wait({acquire})
    await asyncio.sleep(0.1)  # the first undo has found nothing
    held.release()
    await held.answered()
    record = await theirs.read("lock:cart")
    assert record is not None, "it was granted after all"
    await taken(lock_on(theirs))


async def test_a_request_that_arrives_long_after_its_time_takes_nothing(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy
) -> None:
    held = proxy.hold_request(b"lock:cart")
    # Without the adapter there is no undo: the server alone refuses it.
    with pytest.raises(OutcomeUnknownError, match="did not answer within 2 s"):
        await mine.store.acquire("lock:cart", "h", LEASE)
    await asyncio.sleep(0.3)
    held.release()
    await held.answered()
    assert await theirs.read("lock:cart") is None


async def test_a_request_that_is_slow_but_in_time_is_granted(mine: LockAdapter, proxy: Proxy) -> None:
    proxy.delay(requests=0.2, replies=0.2)
    assert (await mine.store.acquire("lock:cart", "h", LEASE)).granted_to("h")
    proxy.delay()


async def test_a_clock_that_was_set_costs_one_more_request(proxy: Proxy, redis_url: str, namespace: str) -> None:
    """To this process it is the same whether its clock stands still, or the server's is set forward."""
    server = RedisServer.at({"command_timeout": 0.3}, url=proxy.url)
    async with RedisStore(server, namespace=namespace, clock=MovableClock()) as store:
        await store.acquire("lock:warm", "h", LEASE)
        await asyncio.sleep(0.5)
        before = proxy.requests
        assert (await store.acquire("lock:cart", "h", LEASE)).granted_to("h")
        assert proxy.requests - before == 2
        assert (await store.acquire("lock:next", "h", LEASE)).granted_to("h")
        assert proxy.requests - before == 3


@pytest.mark.parametrize("place", ["request", "whole exchange"])
async def test_at_no_byte_can_a_cut_leave_a_lease_without_an_end(
    mine: LockAdapter, proxy: Proxy, client: "Redis", namespace: str, place: str
) -> None:
    match = b"lock:cut" if place == "request" else None
    failed = 0
    for number in range(1, 320, 7):
        proxy.reset()  # so that connecting is part of it
        proxy.cut_after(number, match)
        name = f"lock:cut{number}"
        try:
            lease = await mine.store.acquire(name, "h", LEASE)
            assert lease.granted_to("h")
        except (OutcomeUnknownError, BackendUnavailableError):
            failed += 1
        stored = await client.hgetall(f"{namespace}:lease:{name}")
        assert not stored or {"holder", "fence", "expires_at"} <= stored.keys()
        assert await client.pttl(f"{namespace}:lease:{name}") in (-1, -2)
        await proxy.heal()
    assert failed > 20


# Cancellation


async def test_a_cancelled_release_is_done(mine: LockAdapter, theirs: LockAdapter, proxy: Proxy) -> None:
    handle = await lock_on(mine).acquire()
    proxy.delay(replies=0.5)
    release = asyncio.create_task(handle.release())
    await asyncio.sleep(0.05)
    release.cancel()
    with pytest.raises(asyncio.CancelledError):
        await release
    proxy.delay()
    await taken(lock_on(theirs))


async def test_a_cancelled_release_wakes_who_waits_in_this_process(mine: LockAdapter, proxy: Proxy) -> None:
    held = await lock_on(mine).acquire()
    waiting = asyncio.create_task(lock_on(mine).acquire())
    await asyncio.sleep(0.1)
    fault = proxy.drop_reply(match=held.token.encode(), then="silent")
    releasing = asyncio.create_task(held.release())
    await fault.answered()
    releasing.cancel()
    async with asyncio.timeout(5.0):  # without a hint it would look again after 10
        await (await waiting).release()


async def test_a_cancelled_acquire_is_undone(mine: LockAdapter, theirs: LockAdapter, proxy: Proxy) -> None:
    proxy.delay(replies=0.05)
    for number in range(20):
        acquire = asyncio.create_task(lock_on(mine).acquire())
        await asyncio.sleep(0.006 * number)
        acquire.cancel()
        await asyncio.wait({acquire})
        if not acquire.cancelled():
            await acquire.result().release()
    proxy.delay()
    await taken(lock_on(theirs))


# Outages


async def test_a_silent_outage_during_an_acquire_is_unknown_and_undone(
    mine: LockAdapter, theirs: LockAdapter, proxy: Proxy
) -> None:
    await mine.read("lock:cart")
    proxy.delay(replies=30.0)
    with pytest.raises(OutcomeUnknownError):
        await lock_on(mine).acquire(timeout=0.5)
    record = await theirs.read("lock:cart")
    assert record is not None
    assert record.live, "it was granted, and nobody heard of it"
    await asyncio.sleep(1.0)
    proxy.delay()
    await taken(lock_on(theirs))


async def test_a_server_that_is_down_is_never_taken_for_a_busy_lock(start_redis: StartRedis, namespace: str) -> None:
    server = start_redis()
    async with LockAdapter(RedisStore(server.url, namespace=namespace)) as backend:
        await asyncio.to_thread(server.kill)
        begun = monotonic()
        for attempt in (lock_on(backend).acquire_nowait(), lock_on(backend).acquire(timeout=1)):
            with pytest.raises(BackendUnavailableError, match="cannot be used"):
                await attempt
        with pytest.raises(BackendUnavailableError):
            async with TaskLock("report", backend=backend):
                pass
        assert monotonic() - begun < 5.0
        await asyncio.to_thread(server.start)
        async with lock_on(backend):
            pass


async def test_a_paused_server_delays_and_loses_nothing(start_redis: StartRedis, namespace: str) -> None:
    server = start_redis()
    async with LockAdapter(RedisStore(server.url, namespace=namespace)) as backend:
        lock = Lock("cart", backend=backend, lease_duration=6.0, auto_renew=True)
        async with lock as handle:
            server.pause()
            await asyncio.sleep(2.5)
            server.resume()
            await asyncio.sleep(2.5)
            assert handle.valid
            handle.raise_if_lost()


async def test_auto_renewal_survives_connections_that_are_killed(
    mine: LockAdapter, theirs: LockAdapter, client: "Redis"
) -> None:
    lock = Lock("cart", backend=mine, lease_duration=3.0, auto_renew=True)
    async with lock as handle:
        for _ in range(20):
            await client.client_kill_filter(_type="normal", skipme=True)
            await client.client_kill_filter(_type="pubsub")
            await asyncio.sleep(0.25)
            assert handle.valid
    await eventually(lambda: not handle.valid, "it was released")
    await taken(lock_on(theirs))
