"""A handle guards a block of its own: `async with await lock.acquire(timeout=2)`."""

import asyncio
import logging

import pytest

from grelmicro.coordination import Lock, LockLostError, LockTimeoutError
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World


async def test_the_block_ends_with_a_release(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with await Lock("cart", backend=client).acquire(timeout=5) as held:
            assert held.valid
            with pytest.raises(LockTimeoutError):
                await Lock("cart", backend=other).acquire(timeout=0)
        assert not await Lock("cart", backend=other).locked()


async def test_what_the_block_raises_stays_first(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        with pytest.raises(ValueError, match="the work failed") as raised:
            async with await Lock("cart", backend=client, lease_duration=10).acquire():
                await clock.advance(20)
                raise ValueError("the work failed")
        assert "its lease ran out" in "".join(raised.value.__notes__)


async def test_a_block_that_outlives_its_lease_is_told_and_logged(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with world.client() as client:
        with pytest.raises(LockLostError):
            async with await Lock("cart", backend=client, lease_duration=10).acquire():
                await clock.advance(20)
    assert "lost lock:cart: its lease ran out" in caplog.text


async def test_a_renewed_block_is_cancelled_when_its_lease_is_lost(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        began = asyncio.Event()

        async def guarded() -> None:
            async with await Lock("cart", backend=client, lease_duration=9, auto_renew=True).acquire() as held:
                began.set()
                assert await other.release(held.lease)
                await asyncio.Event().wait()

        work = asyncio.create_task(guarded())
        await began.wait()
        for _ in range(40):
            await clock.advance(0.5)
            await asyncio.sleep(0.005)
        with pytest.raises(LockLostError):
            await work
        assert work.cancelling() == 0
