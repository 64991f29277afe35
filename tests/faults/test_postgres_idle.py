"""A PostgreSQL server that ends sessions which are idle (`idle_session_timeout`)."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest

from grelmicro.backends.postgres import PostgresStore
from grelmicro.coordination import Lock
from grelmicro.coordination.adapters import LockAdapter
from tests.helpers.postgres import with_settings
from tests.helpers.worlds import eventually

LONG = 3600.0
"""A lease that does not end by itself within a test."""

IDLE = 0.15
"""Seconds after which the server ends a session that is idle."""


@pytest.fixture(autouse=True)
def _nothing_left(nothing_left: None) -> None:
    """No test leaves a task behind."""


@pytest.fixture
def url(postgres_url: str) -> str:
    """The database, in sessions that are ended soon."""
    return with_settings(postgres_url, idle_session_timeout=f"{IDLE * 1000:.0f}ms")


@pytest.fixture(params=["own connections", "a pool"])
async def client(
    request: pytest.FixtureRequest, url: str, postgres_url: str, _nothing_left: None
) -> AsyncIterator[LockAdapter]:
    async with AsyncExitStack() as stack:
        if request.param == "a pool":
            pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=0, max_size=2))
            store = PostgresStore(pool=pool, listen_url=postgres_url)
        else:
            store = PostgresStore(url, listen_url=postgres_url)
        yield await stack.enter_async_context(LockAdapter(store))


def stand_still(seconds: float) -> None:
    """Keep the event loop from running."""
    time.sleep(seconds)


async def hold_the_loop_up(steps: int) -> None:
    """Let the server end all sessions before the event loop can learn of it, which then takes so many steps."""
    stand_still(2 * IDLE)
    for _ in range(steps):
        await asyncio.sleep(0)


@pytest.mark.parametrize("steps", range(6))
async def test_a_session_that_ends_when_a_request_comes_is_replaced(client: LockAdapter, steps: int) -> None:
    for _ in range(3):
        lease = await client.acquire("lock:cart", "a", LONG)
        await hold_the_loop_up(steps)
        assert await client.release(lease)
        await hold_the_loop_up(steps)


async def test_a_listening_session_that_ends_is_replaced_quietly(
    url: str, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="grelmicro")
    async with (
        LockAdapter(PostgresStore(postgres_url, listen_url=url)) as client,
        LockAdapter(PostgresStore(postgres_url)) as other,
    ):
        held = await other.acquire("lock:cart", "other", LONG)
        waiting = asyncio.create_task(Lock("cart", backend=client, lease_duration=LONG).acquire())
        await eventually(lambda: caplog.text.count("the connection for hints ended, and is made anew") >= 3, "it ends")
        async with client.watch("lock:cart") as waiter:
            await eventually(lambda: waiter.pushes, "hints come")
        await other.release(held)
        async with asyncio.timeout(5.0):
            await (await waiting).release()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
