"""A block ends its lease however its body ends, and the body's own error stays the one that is raised."""

import asyncio

import pytest

from grelmicro.coordination import (
    Lock,
    LockLostError,
    OutcomeUnknownError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import request_lost
from tests.helpers.worlds import World, eventually

LONG = 3600.0


async def test_a_block_left_after_its_app_closed_leaves_the_bodys_error_first(world: World) -> None:
    async def work() -> None:
        client = world.client()
        await client.__aenter__()
        async with Lock("cart", backend=client):
            await client.__aexit__(None, None, None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await work()
    assert ["not open" in note for note in caught.value.__notes__] == [True]


async def test_a_lease_lost_in_a_block_is_an_error_at_its_end(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=10)

        async def work(error: Exception | None) -> None:
            async with lock:
                await clock.advance(11)
                if error is not None:
                    raise error

        with pytest.raises(LockLostError, match="cannot be kept until its block ended: its lease ran out"):
            await work(None)
        failure = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as caught:
            await work(failure)
        assert caught.value is failure
        assert ["its lease ran out" in note for note in failure.__notes__] == [True]


async def test_a_failed_release_leaves_the_bodys_error_first(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:

        async def work(error: Exception | None) -> None:
            async with Lock("cart", backend=client):
                store.suffer("release", request_lost)
                if error is not None:
                    raise error

        with pytest.raises(OutcomeUnknownError):
            await work(None)
        failure = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as caught:
            await work(failure)
        assert caught.value is failure
        assert len(failure.__notes__) == 1
        await eventually(lambda: not client._background, "the release is repeated")


async def test_a_block_whose_lease_was_released_inside_ends_quietly(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client)
        async with lock as handle:
            await handle.release()
        async with lock:
            await lock.release()
            again = await lock.acquire()
        assert again.released

        def work() -> None:
            with lock.from_thread as held:
                held.release()

        await asyncio.to_thread(work)
        assert not lock._held


async def test_a_block_whose_lease_was_lost_inside_ends_what_was_acquired_after_that(
    world: World, clock: MovableClock
) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=10)
        async with lock as lost:
            await clock.advance(11)
            again = await lock.acquire()
        assert lost.lost
        assert again.released


async def test_a_block_inside_one_that_was_lost_ends_its_own_lease(world: World, clock: MovableClock) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=10)
        with pytest.raises(LockLostError):
            async with lock as outer:
                await clock.advance(11)
                async with lock as inner:
                    assert inner.valid
                assert inner.released
                assert outer.lost
        assert not lock._blocks
        assert not lock._held
