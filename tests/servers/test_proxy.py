"""The proxy does to connections what it says, between real clients and real servers."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic

import asyncpg
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.helpers.worlds import eventually
from tests.servers.fixtures import Outside
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import Proxy
from tests.servers.redis import RedisServer


class Speaker:
    """A client of either kind that counts: the number of its calls that reached the server is in the server."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    async def count(self, timeout: float = 5.0) -> int:
        """Count one more, on a connection that stays open."""
        raise NotImplementedError

    async def counted(self) -> int:
        """What the server knows."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave."""
        raise NotImplementedError


class RedisSpeaker(Speaker):
    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self._client = Redis.from_url(url, retry=Retry(NoBackoff(), 0), protocol=2)

    async def count(self, timeout: float = 5.0) -> int:
        async with asyncio.timeout(timeout):
            return int(await self._client.incr(self.name))

    async def counted(self) -> int:
        return int(await self._client.get(self.name) or 0)

    async def close(self) -> None:
        await self._client.aclose()


class PostgresSpeaker(Speaker):
    COUNT = """
        INSERT INTO counts VALUES ($1, 1) ON CONFLICT (name) DO UPDATE SET number = counts.number + 1 RETURNING number
    """

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None

    async def connection(self) -> "asyncpg.Connection[asyncpg.Record]":
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self.url, timeout=5.0)
            await self._connection.execute("CREATE TABLE IF NOT EXISTS counts (name text PRIMARY KEY, number int)")
        return self._connection

    async def count(self, timeout: float = 5.0) -> int:
        async with asyncio.timeout(timeout):
            connection = await self.connection()
            return int(await connection.fetchval(self.COUNT, self.name))

    async def counted(self) -> int:
        connection = await self.connection()
        return await connection.fetchval("SELECT number FROM counts WHERE name = $1", self.name) or 0

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.terminate()


LOST = (OSError, RedisConnectionError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)
SILENT = (TimeoutError, RedisTimeoutError)


@pytest.fixture(params=["redis", "postgres"])
def speaking(request: pytest.FixtureRequest) -> tuple[str, type[Speaker]]:
    """Where a server is, and a client for it."""
    server = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(server, RedisServer | PostgresServer | Outside)
    return server.url, RedisSpeaker if request.param == "redis" else PostgresSpeaker


@pytest.fixture
async def proxy(speaking: tuple[str, type[Speaker]]) -> AsyncIterator[Proxy]:
    async with Proxy(speaking[0]) as proxy:
        yield proxy


@pytest.fixture
async def client(speaking: tuple[str, type[Speaker]], proxy: Proxy, namespace: str) -> AsyncIterator[Speaker]:
    """A client behind the proxy that has counted once."""
    speaker = speaking[1](proxy.url, namespace)
    assert await speaker.count() == 1
    yield speaker
    await speaker.close()


@pytest.fixture
async def direct(speaking: tuple[str, type[Speaker]], namespace: str) -> AsyncIterator[Speaker]:
    """A client with a connection of its own to the server."""
    speaker = speaking[1](speaking[0], namespace)
    yield speaker
    await speaker.close()


async def becomes(question: Callable[[], Awaitable[int]], number: int) -> None:
    """Wait until the answer is so."""
    async with asyncio.timeout(10.0):
        while await question() != number:
            await asyncio.sleep(0.01)


async def test_without_trouble_everything_passes_and_is_counted(client: Speaker, proxy: Proxy) -> None:
    before = (proxy.requests, proxy.replies, proxy.bytes_sent, proxy.bytes_received)
    assert await client.count() == 2
    assert (proxy.requests, proxy.replies) == (before[0] + 1, before[1] + 1)
    assert proxy.bytes_sent > before[2]
    assert proxy.bytes_received > before[3]
    assert (proxy.connections, proxy.open) == (1, 1)
    await client.close()
    await eventually(lambda: proxy.open == 0, "the proxy has let go of the server")


async def test_a_reply_is_lost_with_its_connection(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    fault = proxy.drop_reply(client.name.encode())
    with pytest.raises(LOST):
        await client.count()
    await fault.answered()
    assert await direct.counted() == 2
    assert await client.count() == 3


async def test_a_reply_is_lost_in_silence(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    fault = proxy.drop_reply(re.compile(client.name.encode()[:-1] + rb"\w"), then="silent")
    task = asyncio.create_task(client.count(timeout=0.5))
    await fault.answered()
    assert await direct.counted() == 2
    with pytest.raises(SILENT):
        await task
    assert (proxy.requests > 0, proxy.connections) == (True, 1)


async def test_only_the_request_that_fits_suffers(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    fault = proxy.drop_reply(b"somebody else")
    assert await client.count() == 2
    with pytest.raises(TimeoutError):
        await fault.struck(patience=0.05)


async def test_a_held_request_arrives_after_its_client_has_gone(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    held = proxy.hold_request(client.name.encode())
    with pytest.raises(SILENT):
        await client.count(timeout=0.2)
    await held.struck()
    await client.close()
    assert await direct.count() == 2
    held.release()
    await held.answered()
    assert await direct.counted() == 3
    await eventually(lambda: proxy.open == 0, "the connection of the held request has ended")


async def test_a_held_request_is_answered_when_its_client_waits(client: Speaker, proxy: Proxy) -> None:
    held = proxy.hold_request()
    task = asyncio.create_task(client.count())
    await held.struck()
    held.release()
    assert await task == 2


async def test_a_request_is_cut_in_the_middle(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    before = proxy.requests
    fault = proxy.cut_after(9)
    with pytest.raises(LOST):
        await client.count()
    await fault.struck()
    assert proxy.requests == before + 1
    assert await direct.count() == 2


async def test_each_direction_is_delayed(client: Speaker, proxy: Proxy) -> None:
    for delays in ({"requests": 0.15}, {"replies": 0.15}):
        proxy.delay(**delays)
        start = monotonic()
        await client.count()
        assert monotonic() - start >= 0.15
    await proxy.heal()
    assert await client.count() == 4


async def test_connections_are_reset(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    held = proxy.hold_request()
    task = asyncio.create_task(client.count())
    await held.struck()
    proxy.reset()
    with pytest.raises(LOST):
        await task
    assert await client.count() == 2
    assert proxy.connections == 2


async def test_a_black_hole_swallows_until_it_heals(client: Speaker, direct: Speaker, proxy: Proxy) -> None:
    proxy.black_hole()
    with pytest.raises(SILENT):
        await client.count(timeout=0.2)
    with pytest.raises(SILENT):
        await client.count(timeout=0.2)  # on a new connection
    assert await direct.counted() == 1
    await proxy.heal()
    await becomes(direct.counted, 2)  # the late request
    assert await client.count() == 3


async def test_a_black_hole_hides_the_end_of_a_connection(redis_server: RedisServer, namespace: str) -> None:
    async with Proxy(redis_server.url) as proxy, Redis.from_url(redis_server.url) as direct:

        async def known() -> int:
            return [client["name"] for client in await direct.client_list()].count(namespace)

        async with Redis.from_url(proxy.url, client_name=namespace) as client:
            await client.ping()
            proxy.black_hole()
        await asyncio.sleep(0.1)
        assert await known() == 1
        await proxy.heal()
        await becomes(known, 0)


async def test_new_connections_are_refused_and_old_ones_stay(
    client: Speaker, speaking: tuple[str, type[Speaker]], proxy: Proxy
) -> None:
    await proxy.refuse()
    assert await client.count() == 2
    other = speaking[1](proxy.url, client.name)
    with pytest.raises(LOST):
        await other.count()
    await proxy.heal()
    assert await other.count() == 3
    await other.close()


async def test_messages_of_redis_are_swallowed_and_replies_are_not(redis_server: RedisServer, namespace: str) -> None:
    async with (
        Proxy(redis_server.url) as proxy,
        Redis.from_url(proxy.url, protocol=2) as client,
        client.pubsub() as channel,
    ):
        await channel.subscribe(namespace)
        assert await channel.get_message(timeout=5.0) is not None
        proxy.swallow_pushes(b"secret")
        await client.publish(namespace, "secret")
        await client.publish(namespace, "other")
        message = await channel.get_message(timeout=5.0)
        assert message is not None
        assert (message["data"], proxy.swallowed) == (b"other", 1)
        proxy.swallow_pushes()
        await client.publish(namespace, "other")
        await channel.ping()
        pong = await channel.get_message(timeout=5.0)
        assert pong is not None
        assert (pong["type"], proxy.swallowed) == ("pong", 2)
        await proxy.heal()
        await client.publish(namespace, "other")
        assert await channel.get_message(timeout=5.0) is not None


async def test_notifications_of_postgres_are_swallowed_and_replies_are_not(
    postgres_server: PostgresServer, namespace: str
) -> None:
    heard: list[str] = []
    async with Proxy(postgres_server.url) as proxy:
        connection = await asyncpg.connect(proxy.url)
        try:
            await connection.add_listener(namespace, lambda _connection, _pid, _channel, payload: heard.append(payload))
            proxy.swallow_pushes(b"secret")
            for payload in ("secret", "other"):
                await connection.execute("SELECT pg_notify($1, $2)", namespace, payload)
            await eventually(lambda: heard, "the other is heard")
            assert (heard, proxy.swallowed) == (["other"], 1)
        finally:
            await connection.close()
