"""Contender: the bare floor, the fewest statements that take and give a lease. It cannot wait, and checks nothing."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiosqlite
import asyncpg
import kubernetes_asyncio.client as kubernetes
import redis.asyncio
from asyncpg.prepared_stmt import PreparedStatement
from kubernetes_asyncio.config import new_client_from_config
from redis.commands.core import AsyncScript

from benchmarks.measure import Guard, Measurements
from benchmarks.package import namespace_and_kubeconfig
from benchmarks.serve import arguments, serve

LEASE = 60
HOLDER = "floor"

SQLITE_TABLE = """
CREATE TABLE IF NOT EXISTS floor (name TEXT PRIMARY KEY, holder TEXT, until REAL, fence INTEGER NOT NULL) WITHOUT ROWID
"""
SQLITE_TAKE = """
INSERT INTO floor (name, holder, until, fence) VALUES (:name, :holder, :until, 1)
ON CONFLICT (name) DO UPDATE SET holder = :holder, until = :until, fence = fence + 1
WHERE holder IS NULL OR until < :now RETURNING fence
"""
SQLITE_GIVE = "UPDATE floor SET holder = NULL, until = NULL WHERE name = :name AND holder = :holder RETURNING fence"

REDIS_TAKE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return nil end
local fence = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence
"""
REDIS_GIVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return nil end
return redis.call('DEL', KEYS[1])
"""

POSTGRES_TABLE = """
CREATE TABLE IF NOT EXISTS floor (name text PRIMARY KEY, holder text, until timestamptz, fence bigint NOT NULL)
"""
POSTGRES_TAKE = f"""
INSERT INTO floor VALUES ($1, $2, clock_timestamp() + interval '{LEASE} s', 1)
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until = excluded.until, fence = floor.fence + 1
WHERE floor.holder IS NULL OR floor.until < clock_timestamp() RETURNING fence
"""
POSTGRES_GIVE = "UPDATE floor SET holder = NULL, until = NULL WHERE name = $1 AND holder = $2 RETURNING fence"

Make = Callable[[str], Guard]


class MemoryFloor:
    """The lock of the standard library, which alone is able to wait."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock

    async def acquire(self) -> object:
        """Take it."""
        return await self._lock.acquire()

    async def release(self) -> object:
        """Give it back."""
        self._lock.release()
        return None


class SQLiteFloor:
    """One statement to take a lease, one to give it back."""

    def __init__(self, connection: aiosqlite.Connection, name: str) -> None:
        self._connection = connection
        self._name = name

    async def acquire(self) -> object:
        """Take it; an error when that fails, since nobody else should have it."""
        now = time.time()
        values = {"name": self._name, "holder": HOLDER, "until": now + LEASE, "now": now}
        return await self._only_row(SQLITE_TAKE, values)

    async def release(self) -> object:
        """Give it back."""
        return await self._only_row(SQLITE_GIVE, {"name": self._name, "holder": HOLDER})

    async def _only_row(self, statement: str, values: dict[str, object]) -> object:
        async with self._connection.execute(statement, values) as cursor:
            return expected(self._name, await cursor.fetchone())


class RedisFloor:
    """One script to take a lease, one to give it back."""

    def __init__(self, take: AsyncScript, give: AsyncScript, name: str) -> None:
        self._take, self._give = take, give
        self._name = name

    async def acquire(self) -> object:
        """Take it; an error when that fails, since nobody else should have it."""
        keys = [f"floor:{self._name}", f"floor-fence:{self._name}"]
        return expected(self._name, await self._take(keys=keys, args=[HOLDER, LEASE * 1000]))

    async def release(self) -> object:
        """Give it back."""
        return expected(self._name, await self._give(keys=[f"floor:{self._name}"], args=[HOLDER]))


class PostgresFloor:
    """One prepared statement to take a lease, one to give it back, on one connection."""

    def __init__(self, take: PreparedStatement, give: PreparedStatement, name: str) -> None:
        self._take, self._give = take, give
        self._name = name

    async def acquire(self) -> object:
        """Take it; an error when that fails, since nobody else should have it."""
        return expected(self._name, await self._take.fetchval(self._name, HOLDER))

    async def release(self) -> object:
        """Give it back."""
        return expected(self._name, await self._give.fetchval(self._name, HOLDER))


class KubernetesFloor:
    """One PUT to take a Lease, one to give it back, by the client library's own methods."""

    def __init__(self, leases: kubernetes.CoordinationV1Api, namespace: str, name: str) -> None:
        self._leases = leases
        self._namespace = namespace
        self._name = f"floor-{name}"
        self._lease: kubernetes.V1Lease | None = None

    async def acquire(self) -> object:
        """Take it; an error when that fails, since nobody else should have it."""
        return await self._put(HOLDER)

    async def release(self) -> object:
        """Give it back."""
        return await self._put("")

    async def _put(self, holder: str) -> object:
        if self._lease is None:
            empty = kubernetes.V1Lease(metadata=kubernetes.V1ObjectMeta(name=self._name), spec=kubernetes.V1LeaseSpec())
            self._lease = await self._leases.create_namespaced_lease(self._namespace, empty)
        self._lease.spec.holder_identity = holder
        self._lease.spec.lease_duration_seconds = LEASE
        self._lease = await self._leases.replace_namespaced_lease(self._name, self._namespace, self._lease)
        return self._lease


def expected(name: str, answer: object) -> object:
    """The answer, which should say that something was done."""
    if answer is None:
        raise RuntimeError(f"{name} was not in the state that it should be in")
    return answer


@asynccontextmanager
async def in_memory(place: str) -> AsyncIterator[Make]:
    """Locks of this process."""
    locks: dict[str, asyncio.Lock] = {}
    yield lambda name: MemoryFloor(locks.setdefault(name, asyncio.Lock()))


@asynccontextmanager
async def in_sqlite(place: str) -> AsyncIterator[Make]:
    """A connection with the settings that the store uses too."""
    async with aiosqlite.connect(place, isolation_level=None) as connection:
        await connection.execute("PRAGMA journal_mode = WAL")
        await connection.execute("PRAGMA synchronous = NORMAL")
        await connection.execute(SQLITE_TABLE)
        yield lambda name: SQLiteFloor(connection, name)


@asynccontextmanager
async def in_redis(place: str) -> AsyncIterator[Make]:
    """A client as its users have it."""
    async with redis.asyncio.from_url(place) as client:
        take, give = client.register_script(REDIS_TAKE), client.register_script(REDIS_GIVE)
        yield lambda name: RedisFloor(take, give, name)


@asynccontextmanager
async def in_postgres(place: str) -> AsyncIterator[Make]:
    """One connection, and what is prepared on it."""
    connection = await asyncpg.connect(place)
    try:
        await connection.execute(POSTGRES_TABLE)
        take, give = await connection.prepare(POSTGRES_TAKE), await connection.prepare(POSTGRES_GIVE)
        yield lambda name: PostgresFloor(take, give, name)
    finally:
        await connection.close()


@asynccontextmanager
async def in_kubernetes(place: str) -> AsyncIterator[Make]:
    """A client as its users have it."""
    namespace, kubeconfig = namespace_and_kubeconfig(place)
    async with await new_client_from_config(kubeconfig) as client:
        leases = kubernetes.CoordinationV1Api(client)
        guards: dict[str, KubernetesFloor] = {}
        yield lambda name: guards.setdefault(name, KubernetesFloor(leases, namespace, name))


FLOORS: dict[str, Callable[[str], AbstractAsyncContextManager[Make]]] = {
    "memory": in_memory,
    "sqlite": in_sqlite,
    "redis": in_redis,
    "postgres": in_postgres,
    "kubernetes": in_kubernetes,
}


async def main() -> None:
    """Open the store, and be measured."""
    given = arguments()
    async with FLOORS[given.store](given.place) as make:
        await serve(Measurements(make, make, Counter()))


if __name__ == "__main__":
    asyncio.run(main())
