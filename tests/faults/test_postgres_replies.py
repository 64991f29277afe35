"""Requests to PostgreSQL that arrive late or not at all, and replies that are lost."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.backends.postgres import connections as postgres_connections
from grelmicro.backends.postgres.connections import OwnConnections
from grelmicro.backends.postgres.store import CONNECTIONS, RENEWAL_CONNECTIONS
from grelmicro.coordination import Lock, LockHandle
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError, LockTimeoutError, OutcomeUnknownError
from grelmicro.leases import Lease
from tests.helpers.postgres import TABLE, fetchval, stranger, with_settings
from tests.helpers.worlds import eventually
from tests.servers.proxy import Proxy

LONG = 3600.0
"""A lease that does not end by itself within a test."""

LIMIT = 2.0
"""Seconds after which the clients here give a request up."""


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


@pytest.fixture
async def proxy(postgres_url: str, _nothing_left: None) -> AsyncIterator[Proxy]:
    async with Proxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
async def client(proxy: Proxy, postgres_url: str) -> AsyncIterator[LockAdapter]:
    """A client behind the proxy, but for its hints; it has asked for everything once."""
    async with LockAdapter(PostgresStore(proxy.url, listen_url=postgres_url, command_timeout=LIMIT)) as client:
        lease = await client.acquire("lock:warm", "warm", LONG)
        await client.acquire("lock:warm", "other", LONG)
        await client.renew(lease, LONG)
        await client.renew_many([(lease, LONG)])
        await client.release(lease)
        await client.release(await client.acquire("lock:warm", "warm", LONG))
        yield client


@pytest.fixture
async def healthy(client: LockAdapter, postgres_url: str) -> AsyncIterator[LockAdapter]:
    """Another client, with nothing in its way."""
    async with LockAdapter(PostgresStore(postgres_url)) as healthy:
        yield healthy


async def taken_soon(healthy: LockAdapter, name: str, patience: float = 5.0) -> Lease:
    """The lease, which somebody else gets long before it would have ended."""
    until = time.monotonic() + patience
    while not (lease := await healthy.acquire(name, "healthy", LONG)).granted_to("healthy"):
        assert time.monotonic() < until, f"it is still held after {patience:g} s"
        await asyncio.sleep(0.02)
    return lease


@pytest.mark.parametrize("then", ["reset", "silent"])
@pytest.mark.parametrize("known", [True, False], ids=["known name", "new name"])
async def test_an_acquire_whose_reply_is_lost_is_undone(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy, then: str, known: bool
) -> None:
    first = None
    if known:
        first = await client.acquire("lock:cart", "before", LONG)
        await client.release(first)
    fault = proxy.drop_reply(b"lost-holder", then="reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError, match="acquiring 'lock:cart', which is undone in the background"):
        await client.acquire("lock:cart", "lost-holder", LONG)
    await fault.answered()
    lease = await taken_soon(healthy, "lock:cart")
    assert first is None or lease.fence == first.fence + 2  # exactly one was lost
    assert await healthy.release(lease)
    assert (await client.acquire("lock:cart", "again", LONG)).fence == lease.fence + 1


async def test_an_acquire_never_waits_for_itself(client: LockAdapter, proxy: Proxy) -> None:
    lock = Lock("cart", backend=client, lease_duration=LONG)
    await (await lock.acquire()).release()
    proxy.drop_reply(b"lock:cart")
    with pytest.raises(OutcomeUnknownError):
        await lock.acquire()
    began = time.monotonic()
    async with lock:
        assert time.monotonic() - began < 5.0


async def test_an_acquire_that_arrives_after_its_undo_is_not_granted(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy
) -> None:
    await client.release(await client.acquire("lock:cart", "before", LONG))
    held = proxy.hold_request(b"late-holder")
    with pytest.raises(OutcomeUnknownError):
        await client.acquire("lock:cart", "late-holder", LONG)
    lease = await taken_soon(healthy, "lock:cart")
    await healthy.release(lease)
    await eventually(lambda: not client._background, "the undo is done")
    held.release()
    await asyncio.sleep(0.5)
    record = await healthy.read("lock:cart")
    assert record is not None
    assert (record.holder, record.fence) == ("", lease.fence)


@pytest.mark.parametrize("name", ["lock:cart", "lock:new"])
async def test_an_acquire_that_arrives_too_late_is_not_granted_by_any_statement(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy, name: str
) -> None:
    if name == "lock:cart":
        await client.release(await client.acquire(name, "before", LONG))
    held = proxy.hold_request(b"late-holder")
    with pytest.raises(TimeoutError):
        await client.store.acquire(name, "late-holder", LONG, waiting=True)
    held.release()
    await held.answered()
    await asyncio.sleep(0.2)
    record = await healthy.read(name)
    assert record is None or record.holder == ""


async def test_an_undo_is_final_only_when_the_acquire_can_take_no_effect(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy
) -> None:
    await client.release(await client.acquire("lock:cart", "before", LONG))
    held = proxy.hold_request(b"late-holder")
    asked = asyncio.create_task(client.store.acquire("lock:cart", "late-holder", LONG))
    await held.struck()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    undo = Lease("lock:cart", "late-holder", 0)
    with pytest.raises(OutcomeUnknownError, match="may still be on its way"):
        await client.store.release(undo)
    held.release()
    await held.answered()
    assert await until_final(client, undo) is True
    await taken_soon(healthy, "lock:cart")
    assert await client.store.release(undo) is False


async def until_final(client: LockAdapter, undo: Lease) -> bool:
    """Repeat an undo until its answer counts."""
    until = time.monotonic() + 10.0
    while True:
        try:
            return await client.store.release(undo)
        except OutcomeUnknownError:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("operation", ["renew", "renew_many", "release"])
async def test_what_may_be_repeated_is_repeated_and_tells_the_truth(
    client: LockAdapter, proxy: Proxy, operation: str
) -> None:
    lease = await client.acquire("lock:cart", "own-holder", LONG)
    for then in ("reset", "silent"):
        proxy.drop_reply(b"own-holder", then="reset" if then == "reset" else "silent")
        if operation == "renew":
            renewed = await client.renew(lease, LONG)
            assert renewed is not None
            assert renewed.fence == lease.fence
        elif operation == "renew_many":
            assert [each.fence for each in await client.renew_many([(lease, LONG)])] == [lease.fence]
        else:
            assert await client.release(lease) is True
            assert await client.release(lease) is False
            lease = await client.acquire("lock:cart", "own-holder", LONG)


async def test_a_release_that_was_cancelled_is_finished_in_the_background(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy
) -> None:
    handle = await Lock("cart", backend=client, lease_duration=LONG).acquire()
    proxy.delay(replies=1.0)
    releasing = asyncio.create_task(handle.release())
    await asyncio.sleep(0.1)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    await taken_soon(healthy, "lock:cart", 2.0)


async def test_a_release_that_cannot_know_says_so(client: LockAdapter, healthy: LockAdapter, proxy: Proxy) -> None:
    lease = await client.acquire("lock:cart", "own-holder", LONG)
    fault = proxy.drop_reply(b"own-holder", then="silent")
    releasing = asyncio.create_task(client.release(lease))
    await fault.answered()
    await taken_soon(healthy, "lock:cart")
    with pytest.raises(OutcomeUnknownError, match="it was released or had expired, and was taken again"):
        await releasing


async def test_a_cancelled_release_wakes_who_waits_in_this_process(client: LockAdapter, proxy: Proxy) -> None:
    lock = Lock("cart", backend=client, lease_duration=LONG)
    held = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0.1)
    fault = proxy.drop_reply(held.token.encode(), then="silent")
    releasing = asyncio.create_task(client.release(held.lease))
    await fault.answered()
    releasing.cancel()
    async with asyncio.timeout(5.0):  # without a hint it would look again after 10
        await (await waiting).release()


async def test_a_renewal_of_what_expired_meanwhile_is_no_renewal(client: LockAdapter, proxy: Proxy) -> None:
    lease = await client.acquire("lock:cart", "own-holder", 0.6)
    held = proxy.hold_request(b"own-holder")
    renewal = asyncio.create_task(client.renew(lease, LONG))
    await held.struck()
    await asyncio.sleep(0.7)
    held.release()
    assert await renewal is None


async def test_a_late_release_does_not_harm_the_next_holder(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy
) -> None:
    lease = await client.acquire("lock:cart", "own-holder", 0.5)
    held = [proxy.hold_request(b"own-holder") for _ in range(2)]
    releasing = asyncio.create_task(client.release(lease))
    await asyncio.sleep(0.6)
    next_lease = await taken_soon(healthy, "lock:cart")
    with pytest.raises(OutcomeUnknownError):
        await releasing
    for each in held:
        each.release()
    await asyncio.sleep(0.3)
    assert await healthy.renew(next_lease, LONG) is not None


async def test_a_black_hole_ends_every_call_in_time_and_nothing_is_orphaned(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy
) -> None:
    held = await client.acquire("lock:held", "own-holder", LONG)
    lock = Lock("cart", backend=client, lease_duration=LONG)
    await (await lock.acquire()).release()
    proxy.black_hole()
    began = time.monotonic()
    with pytest.raises(OutcomeUnknownError) as unknown:
        await lock.acquire(timeout=1.0)
    assert not isinstance(unknown.value, LockTimeoutError)
    for call in (client.read("lock:held"), client.renew(held, LONG), client.release(held)):
        with pytest.raises((OutcomeUnknownError, BackendUnavailableError)):
            await call
    assert time.monotonic() - began < 1.0 + 4 * LIMIT + 4.0
    await proxy.heal()
    await taken_soon(healthy, "lock:cart", 3.0)
    await eventually(lambda: not client._background, "what was given up is settled", 20.0)
    assert await client.read("lock:held") is not None
    assert isinstance(client.store, PostgresStore)
    requests, renewals = client.store._get_open().connections
    assert isinstance(requests, OwnConnections)
    assert isinstance(renewals, OwnConnections)
    await eventually(lambda: (requests._free, renewals._free) == (CONNECTIONS, RENEWAL_CONNECTIONS), "all are back")


async def test_a_connection_that_a_firewall_forgot_is_found_out_before_it_is_relied_on(
    client: LockAdapter, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "IDLE", 0.0)
    fault = proxy.drop_reply(b"SELECT 1\0", then="silent")
    lease = await client.acquire("lock:cart", "own-holder", LONG)
    await fault.struck()
    assert lease.granted_to("own-holder")
    assert await client.release(lease) is True


async def test_at_no_byte_does_a_broken_request_leave_a_lease_without_an_end(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy, postgres_url: str
) -> None:
    for number in range(1, 260, 7):
        proxy.cut_after(number, b"cut-holder")
        with suppress(BackendUnavailableError, OutcomeUnknownError):
            await client.release(await client.acquire("lock:cut", f"cut-holder-{number}", LONG))
        await proxy.heal()
    await eventually(lambda: not client._background, "all are undone", 20.0)
    assert await fetchval(postgres_url, f"SELECT count(*) FROM {TABLE} WHERE holder <> ''") == 0
    assert (await taken_soon(healthy, "lock:cut")).live


async def test_a_slow_server_costs_time_and_nothing_else(client: LockAdapter, proxy: Proxy) -> None:
    proxy.delay(requests=0.2, replies=0.2)
    lease = await client.acquire("lock:cart", "own-holder", LONG)
    assert lease.granted_to("own-holder")
    assert await client.renew(lease, LONG) is not None
    assert await client.release(lease) is True


async def test_a_server_whose_clock_jumps_grants_at_once(client: LockAdapter) -> None:
    assert isinstance(client.store, PostgresStore)
    late = client.store._get_open().table._late
    for jump in (-3600.0, 3600.0):
        late._ahead += jump  # as if the server's clock had jumped the other way since
        began = time.monotonic()
        lease = await client.acquire(f"lock:{jump}", "own-holder", LONG)
        assert lease.granted_to("own-holder")
        assert time.monotonic() - began < 1.5
        assert abs(late.server_time() - time.time()) < 5.0


async def test_waiters_poll_while_messages_are_swallowed_and_are_woken_again(
    proxy: Proxy, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    proxy.swallow_pushes()
    async with PostgresStore(proxy.url) as store, PostgresStore(postgres_url) as other:
        async with store.watch("lock:cart") as waiter:
            assert not waiter.pushes
        await eventually(lambda: "a message to itself did not come" in caplog.text, "it is told")
        assert "within 3 s: behind a pooler, listen_url= has to lead to the server itself" in caplog.text
        async with LockAdapter(store) as client, LockAdapter(other) as holder:
            mine = Lock("cart", backend=client, lease_duration=LONG, retry_interval=0.05)
            theirs = Lock("cart", backend=holder, lease_duration=LONG)
            handle = await theirs.acquire()
            waiting = asyncio.create_task(mine.acquire(timeout=20))
            await asyncio.sleep(0.2)
            await handle.release()
            await (await asyncio.wait_for(waiting, 5.0)).release()
            await proxy.heal()
            proxy.reset()
            async with store.watch("lock:cart") as waiter:
                await eventually(lambda: waiter.pushes, "hints are believed again", 30.0)


async def test_a_release_before_the_subscription_is_there_is_not_missed(proxy: Proxy, postgres_url: str) -> None:
    proxy.delay(replies=0.3)
    async with (
        LockAdapter(PostgresStore(postgres_url, listen_url=proxy.url)) as client,
        LockAdapter(PostgresStore(postgres_url)) as holder,
    ):
        waits = []
        for number in range(8):
            mine = Lock(f"cart{number}", backend=client, lease_duration=LONG)
            handle = await Lock(f"cart{number}", backend=holder, lease_duration=LONG).acquire()
            waiting = asyncio.create_task(mine.acquire(timeout=30))
            await asyncio.sleep(0.1)
            await handle.release()
            released = time.monotonic()
            await (await waiting).release()
            waits.append(time.monotonic() - released)
        assert max(waits) < 3.0


async def test_a_connection_that_dies_between_two_calls_is_replaced(
    client: LockAdapter, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    name = "killed here"
    async with PostgresStore(with_settings(postgres_url, application_name=name)) as store:
        lease = await store.acquire("lock:cart", "own-holder", LONG)
        for _ in range(5):
            async with store.watch("lock:cart") as waiter:  # one that is killed while it connects is in trouble
                await eventually(lambda: waiter.pushes, "it listens")
            async with stranger(postgres_url) as connection:
                await connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", name
                )
            await asyncio.sleep(0.1)
            assert (await store.acquire("lock:cart", "own-holder", LONG)).fence == lease.fence
            assert await store.renew(lease, LONG) is not None
        assert await store.release(lease)
    assert caplog.text == ""  # one that can be made anew at once is no news


@pytest.mark.parametrize("then", ["reset", "silent"])
async def test_a_lease_that_is_passed_on_gets_there_though_the_reply_is_lost(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy, then: str
) -> None:
    held = await Lock("cart", backend=client, lease_duration=LONG, worker="first").acquire()
    waiter = await heir_of(client)
    fault = proxy.drop_reply(b"heir:task:", then="reset" if then == "reset" else "silent")
    with pytest.raises(OutcomeUnknownError):
        await held.release()
    await fault.answered()
    handle = await asyncio.wait_for(waiter, 10.0)
    assert handle.fencing_token == held.fencing_token + 2  # one was lost on the way
    await eventually(lambda: not client._background, "what was lost is undone")
    record = await healthy.read("lock:cart")
    assert record is not None
    assert record.granted_to(handle.token)
    await handle.release()
    await taken_soon(healthy, "lock:cart")


async def test_a_lease_that_is_passed_on_too_late_is_not_passed_on(
    client: LockAdapter, healthy: LockAdapter, proxy: Proxy
) -> None:
    held = await Lock("cart", backend=client, lease_duration=LONG, worker="first").acquire()
    waiter = await heir_of(client)
    request = proxy.hold_request(b"heir:task:")
    with pytest.raises(OutcomeUnknownError):
        await held.release()
    handle = await asyncio.wait_for(waiter, 10.0)
    await eventually(lambda: not client._background, "everything is undone")
    request.release()
    await asyncio.sleep(0.5)
    record = await healthy.read("lock:cart")
    assert record is not None
    assert record.granted_to(handle.token)
    assert handle.valid


async def heir_of(client: LockAdapter) -> "asyncio.Task[LockHandle]":
    """Somebody who waits for what the client has, and would take it from there."""
    lock = Lock("cart", backend=client, lease_duration=LONG, worker="heir")
    waiter = asyncio.create_task(lock.acquire())
    lines = client.queues.lines
    await eventually(lambda: "lock:cart" in lines and lines["lock:cart"].offer, "it sleeps")
    return waiter
