"""A handle guards one block, and only while it is held: else a body would run without a lock and nobody would know."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from grelmicro.coordination import (
    Lock,
    LockHandle,
    LockNotOwnedError,
    LockReentrantError,
    MultiLock,
    MultiLockHandle,
    TaskLock,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World

Handle = LockHandle | MultiLockHandle


def a_lock(client: LockAdapter) -> Lock:
    return Lock("cart", backend=client, lease_duration=10)


def a_renewed_lock(client: LockAdapter) -> Lock:
    return Lock("cart", backend=client, lease_duration=10, auto_renew=True)


def two_locks(client: LockAdapter) -> MultiLock:
    return MultiLock(a_lock(client), Lock("stock", backend=client, lease_duration=10))


Kind = Callable[[LockAdapter], Lock | MultiLock]
every_kind = pytest.mark.parametrize("kind", [a_lock, a_renewed_lock, two_locks])


@every_kind
async def test_no_block_begins_under_what_was_released(world: World, kind: Kind) -> None:
    async with world.client() as client:
        held: Handle = await kind(client).acquire()
        await held.release()
        with pytest.raises(LockNotOwnedError, match="is released; acquire it again"):
            async with held:
                pytest.fail("the body runs")


@every_kind
async def test_no_block_begins_under_what_was_lost(world: World, clock: MovableClock, kind: Kind) -> None:
    async with world.client() as client, world.client() as other:
        held: Handle = await kind(client).acquire()
        for lease in [held.lease] if isinstance(held, LockHandle) else [part.lease for part in held.handles]:
            assert await other.release(lease)
        await clock.advance(11)
        with pytest.raises(LockNotOwnedError, match="cannot be used to guard a block"):
            async with held:
                pytest.fail("the body runs")


@every_kind
async def test_a_block_in_a_block_of_the_same_handle_is_refused(world: World, kind: Kind) -> None:
    async with world.client() as client:
        async with await kind(client).acquire() as held:
            with pytest.raises(LockReentrantError, match="guards a block already"):
                async with held:
                    pytest.fail("the body runs")
            assert held.valid, "the outer block still has it"
        assert held.released


@every_kind
async def test_the_handle_of_a_locks_own_block_guards_no_other(world: World, kind: Kind) -> None:
    async with world.client() as client:
        async with kind(client) as held:
            with pytest.raises(LockReentrantError):
                async with held:
                    pytest.fail("the body runs")
            assert held.valid
        assert held.released


async def test_the_handle_of_a_task_locks_block_guards_no_other(world: World) -> None:
    async with world.client() as client:
        lock = TaskLock("report", backend=client, lease_duration=10)
        async with lock as held:
            with pytest.raises(LockReentrantError):
                async with held:
                    pytest.fail("the body runs")
            assert held.valid


@every_kind
async def test_another_task_is_refused_as_well(world: World, kind: Kind) -> None:
    async with world.client() as client, await kind(client).acquire() as held:

        async def enter(block: AbstractAsyncContextManager[object]) -> None:
            async with block:
                pytest.fail("the body runs")

        with pytest.raises(LockReentrantError):
            await asyncio.create_task(enter(held))
        assert held.valid


@every_kind
async def test_blocks_of_threads_keep_the_same_rules(world: World, kind: Kind) -> None:
    async with world.client() as client:
        lock = kind(client).from_thread

        def work() -> None:
            with lock.acquire() as held:
                with pytest.raises(LockReentrantError), held:
                    pytest.fail("the body runs")
                assert held.valid
            with pytest.raises(LockNotOwnedError), held:
                pytest.fail("the body runs")
            with lock as held:
                with pytest.raises(LockReentrantError), held:
                    pytest.fail("the body runs")
                assert held.valid

        await asyncio.to_thread(work)
