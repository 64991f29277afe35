"""The connections of the Redis store: few, bounded in number and time, dropped unless every reply was read."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest
from redis.asyncio import Redis

from grelmicro.backends.redis import RedisStore
from grelmicro.backends.redis.request import connect
from grelmicro.backends.redis.server import RedisServer
from grelmicro.coordination import Lock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutcomeUnknownError, OutOfContextError
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartRedis
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.usefixtures("nothing_left")


IMPATIENT_S = 0.3
"""Seconds after which a request ends of which a test waits for the end."""


@contextmanager
def impatient(store: RedisStore) -> Iterator[None]:
    """Requests end early within the block; those before it and after it have the time of a busy machine."""
    connections = store._get_open().connections
    usual, connections._limit = connections._limit, IMPATIENT_S
    try:
        yield
    finally:
        connections._limit = usual


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: Proxy, namespace: str) -> AsyncIterator[RedisStore]:
    """By way of the proxy, with two connections and a short patience."""
    server = RedisServer.at({"max_connections": 2, "command_timeout": 1.5}, url=proxy.url)
    async with RedisStore(server, namespace=namespace) as store:
        yield store


@pytest.fixture
async def other(redis_url: str, namespace: str) -> AsyncIterator[RedisStore]:
    """Of a process with a good connection."""
    async with RedisStore(redis_url, namespace=namespace) as other:
        yield other


async def test_many_requests_share_few_connections(store: RedisStore, proxy: Proxy) -> None:
    leases = await asyncio.gather(*(store.acquire(f"lock:{number}", "h", 30.0) for number in range(200)))
    assert all(lease.granted_to("h") for lease in leases)
    assert proxy.connections <= 4


async def test_a_request_that_gets_no_connection_says_so_in_time(store: RedisStore, proxy: Proxy) -> None:
    await store.acquire("lock:held", "h", 30.0)
    proxy.black_hole()
    begun = monotonic()
    requests = [store.acquire(f"lock:{number}", "h", 30.0) for number in range(20)]
    with impatient(store):
        answers = await asyncio.gather(*requests, return_exceptions=True)
    assert monotonic() - begun < 5.0
    told = [str(answer) for answer in answers if isinstance(answer, BackendUnavailableError)]
    assert any(
        "all 2 connections to redis://" in text and "within 0.3 s: raise max_connections" in text for text in told
    )
    assert all(isinstance(answer, CoordinationBackendError) for answer in answers)
    proxy.reset()
    await proxy.heal()
    assert (await store.acquire("lock:c", "h", 30.0)).granted_to("h")


async def test_a_deadline_that_passes_before_anything_was_sent_says_so(store: RedisStore, proxy: Proxy) -> None:
    async with LockAdapter(store) as client:
        slow = [proxy.hold_request(f"lock:slow{number}".encode()) for number in range(2)]
        asked = [asyncio.create_task(client.acquire(f"lock:slow{number}", "h", 30.0)) for number in range(2)]
        for fault in slow:
            await fault.struck()
        with pytest.raises(
            BackendUnavailableError, match=r"all 2 connections to redis://.* within 0\.\d+ s: raise max"
        ):
            await Lock("cart", backend=client).acquire(timeout=0.8)
        assert not client._background  # there is nothing to undo
        for fault in slow:
            fault.release()
        await asyncio.gather(*asked)


async def test_renewals_have_a_connection_of_their_own(store: RedisStore, proxy: Proxy) -> None:
    lease = await store.acquire("lock:held", "h", 30.0)
    faults = [proxy.hold_request(f"lock:slow{number}".encode()) for number in range(2)]
    slow = [asyncio.create_task(store.acquire(f"lock:slow{number}", "h", 30.0)) for number in range(2)]
    for fault in faults:
        await fault.struck()
    for _ in range(20):
        assert await store.renew(lease, 30.0) is not None
        assert len(await store.renew_many([(lease, 30.0)])) == 1
    assert not any(task.done() for task in slow), "all that while, no other connection was free"
    many = await asyncio.gather(*(store.renew(lease, 30.0) for _ in range(50)))
    assert None not in many
    for fault in faults:
        fault.release()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_silent_server_ends_a_request_in_time(store: RedisStore, proxy: Proxy) -> None:
    lease = await store.acquire("lock:a", "h", 30.0)
    proxy.black_hole()
    for request, error in (
        (store.acquire("lock:b", "h", 30.0), OutcomeUnknownError),
        (store.renew(lease, 30.0), OutcomeUnknownError),
        (store.renew_many([(lease, 30.0)]), OutcomeUnknownError),
        (store.release(lease), OutcomeUnknownError),
        (store.read("lock:a"), BackendUnavailableError),
    ):
        begun = monotonic()
        with impatient(store), pytest.raises(CoordinationBackendError) as failure:
            await request
        assert monotonic() - begun < 5.0
        # The first request is sent over the connection that is there; for the next ones none can be made.
        assert type(failure.value) in (error, BackendUnavailableError)
        assert "within 0.3 s" in str(failure.value)
    proxy.reset()
    await proxy.heal()
    assert (await store.acquire("lock:c", "h", 30.0)).granted_to("h")


async def test_a_server_that_cannot_be_reached_is_unavailable_at_once(store: RedisStore, proxy: Proxy) -> None:
    lease = await store.acquire("lock:a", "h", 30.0)
    await proxy.refuse()
    proxy.reset()
    await asyncio.sleep(0.05)
    begun = monotonic()
    for request in (store.acquire("lock:b", "h", 30.0), store.renew(lease, 30.0), store.release(lease)):
        with pytest.raises(
            BackendUnavailableError, match=r"redis://127\.0\.0\.1:\d+/0 cannot be used: .*check that it"
        ):
            await request
    assert monotonic() - begun < 0.5
    await proxy.heal()
    assert await store.renew(lease, 30.0) is not None


async def test_opening_without_a_server_fails_and_leaves_nothing(proxy: Proxy, namespace: str) -> None:
    await proxy.refuse()
    store = RedisStore(proxy.url, namespace=namespace)
    with pytest.raises(BackendUnavailableError, match="opening RedisStore"):
        await store.__aenter__()
    assert not store.is_open
    await proxy.heal()
    async with store:
        assert (await store.acquire("lock:a", "h", 30.0)).granted_to("h")


async def test_an_idle_connection_that_the_server_closed_is_not_used(
    store: RedisStore, proxy: Proxy, redis_url: str, namespace: str
) -> None:
    await asyncio.gather(*(store.acquire(f"lock:{number}", "h", 30.0) for number in range(10)))
    async with Redis.from_url(redis_url) as client:
        for round_number in range(3):
            await client.client_kill_filter(_type="normal", skipme=True)
            await asyncio.sleep(0.05)
            assert (await store.acquire(f"lock:killed{round_number}", "h", 30.0)).granted_to("h")
            proxy.reset()  # which the client sees as an error of the connection, not as its end
            await asyncio.sleep(0.05)
            assert (await store.acquire(f"lock:reset{round_number}", "h", 30.0)).granted_to("h")


async def test_only_the_first_of_the_connections_that_were_dropped_silently_costs_a_request(
    store: RedisStore, proxy: Proxy
) -> None:
    await asyncio.gather(*(store.acquire(f"lock:{number}", "h", 30.0) for number in range(10)))
    assert proxy.open >= 3, "two for requests, and one for hints"
    proxy.forget()
    with impatient(store), pytest.raises(OutcomeUnknownError, match="did not answer within 0.3 s"):
        await store.acquire("lock:first", "h", 30.0)
    for number in range(4):
        assert (await store.acquire(f"lock:next{number}", "h", 30.0)).granted_to("h")


async def test_a_cancelled_request_without_a_reply_costs_the_idle_connections_as_well(
    store: RedisStore, proxy: Proxy
) -> None:
    await asyncio.gather(*(store.acquire(f"lock:{number}", "h", 30.0) for number in range(10)))
    proxy.forget()
    with impatient(store), pytest.raises(TimeoutError):
        async with asyncio.timeout(IMPATIENT_S / 3):
            await store.acquire("lock:first", "h", 30.0)
    connections = store._get_open().connections
    await eventually(lambda: not connections._idle, "they are closed once the reply did not come in time")
    assert (await store.acquire("lock:next", "h", 30.0)).granted_to("h")


async def test_the_system_looks_after_idle_connections(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        for server in (RedisServer.at({}, url=redis_url), RedisServer.of_client(client, {})):
            connection = server.connection()
            await connect(connection)
            try:
                assert connection._writer is not None
                made = connection._writer.get_extra_info("socket")
                assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
                assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
                assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
            finally:
                await connection.disconnect()
        kept = Redis(socket_keepalive=False)
        assert RedisServer.of_client(kept, {}).options["socket_keepalive"] is False, "as the application wants it"
        await kept.aclose()


# Cancellation


@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
@pytest.mark.parametrize("fresh", [False, True], ids=["idle connection", "new connection"])
async def test_a_cancelled_request_leaves_no_reply_to_the_next_one(
    store: RedisStore, proxy: Proxy, when: When, fresh: bool
) -> None:
    async def attempt(name: str, at: int) -> int:
        """Cancel an acquire at a suspension; how many it had."""
        if fresh:
            proxy.reset()
            await asyncio.sleep(0.01)
        cancelled: list[asyncio.Task[object]] = []
        suspended = Suspended(store.acquire(name, "h", 30.0), at, when, lambda: [task.cancel() for task in cancelled])

        async def run() -> object:
            return await suspended

        cancelled.append(asyncio.create_task(run()))
        await asyncio.wait(cancelled)
        return suspended.suspensions

    at = 1
    while await attempt(f"lock:{at}", at) >= at:
        # Mixed up, a reply would be the record of another name and holder.
        for number in range(4):
            lease = await store.acquire(f"lock:next{at}:{number}", f"h{number}", 30.0)
            assert lease.granted_to(f"h{number}")
            assert lease.name == f"lock:next{at}:{number}"
            assert await store.release(lease) is True
        at += 1
    assert at > 1, "it was never cancelled"
    await eventually(lambda: proxy.open <= 4, "no connection leaks")


async def test_a_thousand_cancelled_requests_leak_nothing(store: RedisStore, proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(store.acquire(f"lock:first:{number}", "h", 30.0) for number in range(10)))
    before = proxy.connections
    proxy.delay(replies=0.002)
    for batch in range(50):
        tasks = [asyncio.create_task(store.acquire(f"lock:{batch}:{number}", "h", 0.01)) for number in range(20)]
        for number, task in enumerate(tasks):
            loop.call_later(number * 0.0005, task.cancel)
        await asyncio.wait(tasks)
    proxy.delay()
    assert (await store.acquire("lock:last", "h", 30.0)).granted_to("h")
    await asyncio.gather(*(store.acquire(f"lock:last:{number}", "h", 30.0) for number in range(10)))
    assert proxy.connections == before, "a connection outlives those who are cancelled"


async def test_closing_is_not_cut_short_by_cancellation(proxy: Proxy, namespace: str) -> None:
    store = RedisStore(proxy.url, namespace=namespace)
    await store.__aenter__()
    await store.acquire("lock:a", "h", 30.0)
    proxy.delay(replies=0.05)
    closing = asyncio.create_task(store.__aexit__(None, None, None))
    await asyncio.sleep(0)
    for _ in range(10):
        closing.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not store.is_open
    assert "grelmicro-redis" not in {task.get_name() for task in asyncio.all_tasks()}, "it had ended by then"
    await eventually(lambda: proxy.open == 0, "every connection is closed")


async def test_a_dead_server_does_not_hold_up_closing(proxy: Proxy, namespace: str) -> None:
    for trouble in (proxy.black_hole, proxy.reset):
        store = RedisStore(proxy.url, namespace=namespace)
        await store.__aenter__()
        await asyncio.gather(*(store.acquire(f"lock:{number}", "h", 30.0) for number in range(10)))
        trouble()
        begun = monotonic()
        await store.__aexit__(None, None, None)
        assert monotonic() - begun < 3.0
        proxy.reset()
        await proxy.heal()


async def test_a_closed_store_says_so(store: RedisStore) -> None:
    await store.__aexit__(None, None, None)
    with pytest.raises(OutOfContextError, match="RedisStore is not open"):
        await store.acquire("lock:a", "h", 30.0)
    await store.__aenter__()


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with a certificate for localhost that has signed itself."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    return tmp_path


async def test_an_encrypted_connection_checks_the_server(
    start_redis: StartRedis, certificate: Path, unused_tcp_port_factory: Callable[[], int]
) -> None:
    port = unused_tcp_port_factory()
    start_redis(
        tls_port=port,
        tls_cert_file=str(certificate / "cert.pem"),
        tls_key_file=str(certificate / "key.pem"),
        tls_auth_clients="no",
    )
    trusted = f"rediss://localhost:{port}?ssl_ca_certs={certificate / 'cert.pem'}"
    async with RedisStore(trusted) as store:
        lease = await store.acquire("lock:a", "h", 30.0)
        async with store.watch("lock:a") as waiter:
            assert waiter.pushes
        assert await store.release(lease) is True
    for refused in (
        f"rediss://localhost:{port}",
        f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate / 'cert.pem'}",
    ):
        with pytest.raises(BackendUnavailableError, match="(?i)certificate"):
            await RedisStore(refused).__aenter__()
    async with RedisStore(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none") as store:
        assert (await store.acquire("lock:a", "h", 30.0)).granted_to("h")
