"""Cancelled anywhere, requests to PostgreSQL leave no lease, no connection and no task behind."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

import asyncpg
import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.backends.postgres.connections import OwnConnections
from grelmicro.backends.postgres.store import CONNECTIONS, RENEWAL_CONNECTIONS
from grelmicro.coordination import Lock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.leases import Lease
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.postgres import TABLE, fetchval, stranger
from tests.helpers.worlds import eventually

LONG = 3600.0
"""A lease that does not end by itself within a test."""

MOST_SUSPENSIONS = 40
"""More than any operation here needs: whatever suspends more often runs in circles."""

Operation = Callable[[PostgresStore, Lease], Coroutine[Any, Any, object]]

OPERATIONS: dict[str, Operation] = {
    "acquire": lambda store, lease: store.acquire("lock:cart", "victim", LONG),
    "acquire held": lambda store, lease: store.acquire("lock:held", "victim", LONG, waiting=True),
    "acquire new": lambda store, lease: store.acquire("lock:new", "victim", LONG),
    "renew": lambda store, lease: store.renew(lease, LONG),
    "renew many": lambda store, lease: store.renew_many([(lease, LONG)]),
    "release": lambda store, lease: store.release(lease),
    "read": lambda store, lease: store.read("lock:held"),
}


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


def connections_of(store: PostgresStore) -> list[OwnConnections]:
    """The connections for ordinary requests, and those for renewals."""
    return [each for each in store._get_open().connections if isinstance(each, OwnConnections)]


def all_are_back(store: PostgresStore) -> bool:
    """Whether no connection is in use."""
    return [each._free for each in connections_of(store)] == [CONNECTIONS, RENEWAL_CONNECTIONS]


@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
@pytest.mark.parametrize("fresh", [True, False], ids=["new connection", "used connection"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_at_each_suspension(operation: str, fresh: bool, when: When, postgres_url: str) -> None:
    act = OPERATIONS[operation]
    async with PostgresStore(postgres_url) as store, PostgresStore(postgres_url) as other:
        lease = await other.acquire("lock:held", "a", LONG)
        if not fresh:
            for warm in OPERATIONS.values():
                await warm(store, lease)
        for at in range(1, MOST_SUSPENSIONS):
            await other.release(Lease("lock:cart", "victim", 0))
            await other.release(Lease("lock:held", "a", 0))
            async with stranger(postgres_url) as connection:
                await connection.execute(f"DELETE FROM {TABLE} WHERE name = 'lock:new'")
            lease = await other.acquire("lock:held", "a", LONG)
            if fresh:
                for connections in connections_of(store):
                    for link in connections._idle:
                        link.raw.terminate()
            task = asyncio.create_task(wrap(act(store, lease), at, when))
            began = time.monotonic()
            await asyncio.wait({task}, timeout=3.0)
            assert task.done()
            assert time.monotonic() - began < 1.0
            if not task.cancelled():
                assert task.exception() is None
                if task.result() < at:
                    break
            await eventually(partial(all_are_back, store), "every connection is back")
            assert await store.read("lock:held") is not None
        else:
            raise AssertionError("it runs in circles")
        assert at > 1
        assert connections_of(store)[0]._server.prepares  # no statement was prepared by halves


async def wrap(work: Coroutine[Any, Any, object], at: int, when: When) -> int:
    """Await `work` while it is cancelled at its suspension number `at`; how often it was suspended."""
    task = asyncio.current_task()
    assert task is not None
    suspended = Suspended(work, at, when, task.cancel)
    await suspended
    return suspended.suspensions


@pytest.mark.parametrize("borrowed", [False, True], ids=["own connections", "a pool"])
async def test_many_cancelled_acquires_leak_nothing(borrowed: bool, postgres_url: str) -> None:
    random = Random(7)
    async with asyncpg.create_pool(postgres_url, min_size=2, max_size=2) as pool:
        store = PostgresStore(pool=pool, listen_url=postgres_url) if borrowed else PostgresStore(postgres_url)
        async with LockAdapter(store) as client:
            holder = Lock("busy", backend=client, lease_duration=LONG)
            async with holder:
                for number in range(300):
                    name = "busy" if number % 3 == 0 else f"cart{number % 5}"
                    lock = Lock(name, backend=client, lease_duration=LONG)
                    task = asyncio.create_task(lock.acquire(timeout=0.05))
                    await asyncio.sleep(random.random() * 0.01)
                    task.cancel()
                    done = (await asyncio.gather(task, return_exceptions=True))[0]
                    if not isinstance(done, BaseException):
                        await done.release()
            began = time.monotonic()
        assert time.monotonic() - began < 3.0
        assert pool.get_idle_size() == pool.get_size()
    held = await fetchval(postgres_url, f"SELECT array_agg(name) FROM {TABLE} WHERE holder <> ''")
    assert held is None


async def test_an_undo_is_quick(postgres_url: str) -> None:
    async with LockAdapter(PostgresStore(postgres_url)) as client:
        await client.release(await client.acquire("lock:cart", "before", LONG))
        for _ in range(10):
            task = asyncio.create_task(client.acquire("lock:cart", "victim", LONG))
            for _ in range(2):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            began = time.monotonic()
            await eventually(lambda: not client._background, "it is undone")
            assert time.monotonic() - began < 1.0
            assert await fetchval(postgres_url, f"SELECT count(*) FROM {TABLE} WHERE holder <> ''") == 0


async def test_a_connection_whose_caller_is_cancelled_is_kept_for_the_next_one(postgres_url: str) -> None:
    async with PostgresStore(postgres_url) as store:
        requests = connections_of(store)[0]
        for number in range(40):
            for link in requests._idle:
                link.raw.terminate()
            task = asyncio.create_task(store.read("lock:cart"))
            await asyncio.sleep(0.0002 * number)
            task.cancel()
            await asyncio.wait({task})
            await eventually(partial(all_are_back, store), "every connection is back")
            gc.collect()
        assert await store.read("lock:cart") is None


async def test_a_cancelled_opening_leaves_no_connection(postgres_url: str) -> None:
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    for at in range(1, MOST_SUSPENSIONS * 5):
        store = PostgresStore(postgres_url)
        task = asyncio.create_task(wrap(store.__aenter__(), at, in_flight))
        await asyncio.wait({task}, timeout=5.0)
        assert task.done()
        if not task.cancelled():
            await store.__aexit__(None, None, None)
            if task.result() < at:
                break
        until = time.monotonic() + 5.0
        while await fetchval(postgres_url, count):
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
    else:
        raise AssertionError("it runs in circles")
