"""Records that are replaced by an older copy: a process hands out no fence at or below one that it has seen."""

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from redis.asyncio import Redis

from grelmicro import Grelmicro
from grelmicro.backends.kubernetes import KubernetesStore, lease_name
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.postgres import PostgresStore
from grelmicro.backends.redis import RedisStore
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.coordination import LeaderElection, Lock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.coordination.passing import Offer
from grelmicro.task import Tasks
from tests.helpers.postgres import stranger
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartRedis
from tests.servers.kubernetes import Namespace

pytestmark = pytest.mark.usefixtures("nothing_left")

LEASE = 300.0


async def take(backend: LockAdapter) -> int:
    """The fence of a lock that is taken and given back."""
    async with Lock("cart", backend=backend, lease_duration=LEASE) as held:
        return held.fencing_token


async def rise(backend: LockAdapter, put_back: Callable[[], Awaitable[object]], other: LockAdapter) -> None:
    """Take it a few times, have an older copy put back, and take it again, also by another store of this process."""
    fences = [await take(backend) for _ in range(5)]
    await put_back()
    fences.append(await take(backend))
    fences.append(await take(backend))
    await put_back()
    fences.append(await take(other))
    await put_back()
    held = await Lock("cart", backend=backend, lease_duration=LEASE).acquire()
    fences.append(held.fencing_token)
    await held.extend()
    await held.release()
    assert fences == sorted(set(fences))


# Redis


async def test_a_key_that_is_restored(start_redis: StartRedis, caplog: pytest.LogCaptureFixture) -> None:
    server = start_redis()
    key = "grelmicro:lease:lock:cart"
    async with (
        LockAdapter(RedisStore(server.url)) as backend,
        LockAdapter(RedisStore(server.url)) as other,
        Redis.from_url(server.url) as client,
    ):
        await take(backend)
        copy = await client.dump(key)
        assert copy is not None

        async def put_back() -> None:
            await client.restore(key, 0, copy, replace=True)

        await rise(backend, put_back, other)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2, "one for each"
    assert "its records were replaced by an older copy" in warnings[0]


async def test_a_server_that_loads_its_last_snapshot(start_redis: StartRedis) -> None:
    server = start_redis(appendonly="no", enable_debug_command="yes", save="3600 1")
    async with (
        LockAdapter(RedisStore(server.url)) as backend,
        LockAdapter(RedisStore(server.url)) as other,
        Redis.from_url(server.url) as client,
    ):
        await take(backend)
        await client.save()

        async def put_back() -> None:
            execute: Callable[..., Awaitable[object]] = client.execute_command
            await execute("DEBUG", "RELOAD", "NOSAVE")

        await rise(backend, put_back, other)


# PostgreSQL


async def test_a_table_that_is_restored(postgres_url: str) -> None:
    async with (
        LockAdapter(PostgresStore(postgres_url)) as backend,
        LockAdapter(PostgresStore(postgres_url)) as other,
        stranger(postgres_url) as client,
    ):
        await take(backend)
        await client.execute("CREATE TABLE copy AS SELECT * FROM grelmicro_leases")

        async def put_back() -> None:
            async with client.transaction():
                await client.execute("TRUNCATE grelmicro_leases")
                await client.execute("INSERT INTO grelmicro_leases SELECT * FROM copy")

        await rise(backend, put_back, other)


async def test_what_is_passed_on_has_a_new_fence_too(postgres_url: str) -> None:
    """Who has it gives it back to who waits in one request, under a fence that another one saw."""
    async with (
        LockAdapter(PostgresStore(postgres_url)) as backend,
        LockAdapter(PostgresStore(postgres_url)) as other,
        stranger(postgres_url) as client,
    ):
        held = await backend.acquire("lock:cart", "a", LEASE)
        await client.execute("CREATE TABLE copy AS SELECT * FROM grelmicro_leases")
        await other.release(held)
        seen = await other.acquire("lock:cart", "b", LEASE)
        await other.release(seen)
        await client.execute("TRUNCATE grelmicro_leases")
        await client.execute("INSERT INTO grelmicro_leases SELECT * FROM copy")
        async with backend.watch("lock:cart") as waiter:
            offer = Offer("c", LEASE, waiter)
            line, place = backend.queues.join("lock:cart")
            line.offer = offer
            assert await backend.release(held)
            assert await offer.settle() is None, "the waiter asks the store"
            backend.queues.leave("lock:cart", line, place)
        await eventually(lambda: not backend._background, "it was given back")
        assert (await backend.acquire("lock:cart", "c", LEASE)).fence > seen.fence


# SQLite


async def test_a_file_that_is_restored(tmp_path: Path) -> None:
    path, copy = tmp_path / "locks.db", tmp_path / "copy.db"

    def put(source: Path, target: Path) -> None:
        with closing(sqlite3.connect(source)) as reading, closing(sqlite3.connect(target)) as writing:
            reading.backup(writing)

    async def put_back() -> None:
        put(copy, path)

    async with LockAdapter(SQLiteStore(path)) as backend, LockAdapter(SQLiteStore(path)) as other:
        await take(backend)
        put(path, copy)
        await rise(backend, put_back, other)
        last = await take(backend)
    put(copy, path)
    async with LockAdapter(SQLiteStore(path)) as backend:
        assert await take(backend) > last, "opened anew, too"


# Kubernetes


async def test_a_lease_that_is_deleted_and_taken_again_within_a_second(kubernetes_namespace: Namespace) -> None:
    cluster = Cluster.at(kubeconfig=kubernetes_namespace.kubeconfig())
    key = lease_name("grelmicro", "lock:cart")
    fences = []
    async with LockAdapter(KubernetesStore(cluster)) as backend, LockAdapter(KubernetesStore(cluster)) as other:
        for _ in range(5):
            for each in (backend, other):
                fences.append(await take(each))
                kubernetes_namespace.delete(key)
    for _ in range(3):
        async with LockAdapter(KubernetesStore(cluster)) as backend:
            fences.append(await take(backend))
        kubernetes_namespace.delete(key)
    assert fences == sorted(set(fences))


async def test_terms_of_a_lease_that_is_deleted_and_taken_again(kubernetes_namespace: Namespace) -> None:
    cluster = Cluster.at(kubeconfig=kubernetes_namespace.kubeconfig())
    fences = []
    for _ in range(5):
        leader = LeaderElection("feed", backend=LeaderElectionAdapter(KubernetesStore(cluster)))
        async with Grelmicro(uses=[Tasks(tasks=[leader])]):
            await leader.wait_for_leader()
            fences.append(leader.guard().fence)
        kubernetes_namespace.delete(lease_name("grelmicro", "leader:feed"))
    assert fences == sorted(set(fences))
