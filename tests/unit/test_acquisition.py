"""What `acquire()` returns is awaited, entered, or given to what takes a coroutine."""

import asyncio
import gc
import inspect
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from grelmicro.clock import SYSTEM_CLOCK
from grelmicro.coordination import Lock, LockHandle, MultiLock, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import LockNotOwnedError, LockReentrantError, LockTimeoutError, WouldBlockError
from tests.helpers.worlds import World

Acquire = Callable[[LockAdapter], Any]

KINDS: list[Acquire] = [
    lambda client: Lock("cart", backend=client).acquire(),
    lambda client: Lock("cart", backend=client).acquire(timeout=1),
    lambda client: Lock("cart", backend=client).acquire_nowait(),
    lambda client: MultiLock(Lock("cart", backend=client), Lock("stock", backend=client)).acquire(timeout=1),
]


@pytest.fixture(params=["memory", "sqlite"])
async def client(request: pytest.FixtureRequest, tmp_path: Path, nothing_left: None) -> AsyncIterator[LockAdapter]:
    """Leases of a store that answers at once, and of one that does not."""
    async with World(request.param, tmp_path, SYSTEM_CLOCK).client() as client:
        yield client


async def is_locked(client: LockAdapter) -> bool:
    return await Lock("cart", backend=client).locked()


@pytest.mark.parametrize("acquire", KINDS)
async def test_it_is_entered_without_an_await(client: LockAdapter, acquire: Acquire) -> None:
    async with acquire(client) as held:
        assert held.valid
        assert await is_locked(client)
        with pytest.raises(LockReentrantError, match="guards a block already"):
            await held.__aenter__()
    assert not await is_locked(client)


@pytest.mark.parametrize("acquire", KINDS)
async def test_a_block_that_raises_gives_it_back(client: LockAdapter, acquire: Acquire) -> None:
    with pytest.raises(ZeroDivisionError):
        async with acquire(client):
            raise ZeroDivisionError
    assert not await is_locked(client)


async def test_a_busy_lock_is_not_entered(client: LockAdapter) -> None:
    async with Lock("cart", backend=client).acquire() as held:
        with pytest.raises(LockTimeoutError):
            async with Lock("cart", backend=client).acquire(timeout=0.01):
                pytest.fail("it is held")
        with pytest.raises(WouldBlockError):
            async with Lock("cart", backend=client).acquire_nowait():
                pytest.fail("it is held")
        assert held.valid


async def test_a_cancelled_wait_to_enter_takes_nothing(client: LockAdapter) -> None:
    held = await Lock("cart", backend=client).acquire()

    async def enter() -> None:
        async with Lock("cart", backend=client).acquire():
            pytest.fail("it is held")

    waiter = asyncio.create_task(enter())
    await asyncio.sleep(0.01)  # whether it waits already or not, it takes nothing
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await held.release()
    assert not await is_locked(client)


async def test_a_handle_that_was_released_in_its_block_is_not_released_again(client: LockAdapter) -> None:
    async with Lock("cart", backend=client).acquire() as held:
        await held.release()
    with pytest.raises(LockNotOwnedError):
        await held.release()


async def in_a_task(work: Coroutine[Any, Any, LockHandle]) -> LockHandle:
    return await asyncio.create_task(work)


async def in_a_group(work: Coroutine[Any, Any, LockHandle]) -> LockHandle:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
    return task.result()


async def gathered(work: Coroutine[Any, Any, LockHandle]) -> LockHandle:
    return (await asyncio.gather(work))[0]


TAKERS: list[Callable[[Coroutine[Any, Any, LockHandle]], Awaitable[LockHandle]]] = [
    in_a_task,
    in_a_group,
    gathered,
    asyncio.shield,
    asyncio.ensure_future,
    lambda work: asyncio.wait_for(work, 10),
]


@pytest.mark.parametrize("take", TAKERS)
async def test_what_takes_a_coroutine_takes_it(
    client: LockAdapter, take: Callable[[Coroutine[Any, Any, LockHandle]], Awaitable[LockHandle]]
) -> None:
    lock = Lock("cart", backend=client)
    held = await take(lock.acquire())
    assert held.owner is asyncio.current_task()
    await lock.release()


async def test_a_task_group_of_anyio_takes_it_and_cancels_it(client: LockAdapter) -> None:
    lock = Lock("cart", backend=client)
    async with anyio.create_task_group() as group:
        group.start_soon(lock.acquire)
    assert await is_locked(client)
    with anyio.move_on_after(0.05) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(Lock("cart", backend=client).acquire)
    assert scope.cancelled_caught


def test_a_run_takes_it() -> None:
    async def lock() -> Lock:
        return Lock("cart")

    work = asyncio.run(lock()).acquire(timeout=0)
    with pytest.raises(RuntimeError, match="no app is open"):
        asyncio.run(work)


async def test_its_state_can_be_looked_at(client: LockAdapter) -> None:
    held = await Lock("cart", backend=client).acquire()
    work = Lock("cart", backend=client).acquire()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CREATED
    waiter = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    assert inspect.getcoroutinestate(work) == inspect.CORO_SUSPENDED
    assert "Lock.acquire" in repr(waiter)
    assert waiter.get_stack()
    await held.release()
    await (await waiter).release()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


NEVER_AWAITED: list[tuple[str, Callable[[LockAdapter], object]]] = [
    ("Lock.acquire", lambda client: Lock("cart", backend=client).acquire()),
    ("Lock.acquire_nowait", lambda client: Lock("cart", backend=client).acquire_nowait()),
    ("Lock.extend", lambda client: Lock("cart", backend=client).extend()),
    ("Lock.release", lambda client: Lock("cart", backend=client).release()),
    ("Lock.owned", lambda client: Lock("cart", backend=client).owned()),
    ("TaskLock.refresh", lambda client: TaskLock("cart", backend=client).refresh()),
    ("MultiLock.acquire", lambda client: MultiLock(Lock("cart", backend=client)).acquire()),
]


@pytest.mark.parametrize(("name", "call"), NEVER_AWAITED)
async def test_one_that_is_never_awaited_is_named_as_the_method(
    client: LockAdapter, name: str, call: Callable[[LockAdapter], object]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(client)
        gc.collect()
    assert [str(each.message) for each in caught] == [f"coroutine '{name}' was never awaited"]
    assert not await is_locked(client)


async def test_one_that_is_closed_does_nothing(client: LockAdapter) -> None:
    Lock("cart", backend=client).acquire().close()
    assert not await is_locked(client)


async def test_it_belongs_to_the_task_that_called_it(client: LockAdapter) -> None:
    lock = Lock("cart", backend=client)
    work = lock.acquire(timeout=1)

    async def enter() -> None:
        async with work as held:
            assert held.owner is not asyncio.current_task()

    await asyncio.create_task(enter())
    assert not await is_locked(client)
