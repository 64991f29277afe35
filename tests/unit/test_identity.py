"""What is stored as a holder is never used twice, and is known to its holder alone."""

import asyncio
import re
import threading
from uuid import UUID

import pytest

from grelmicro.coordination import Lock, LockHandle, LockNotOwnedError, TaskLock, WouldBlockError
from grelmicro.coordination.identity import this_task, this_thread
from grelmicro.leases.identity import mint
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_names_are_never_minted_twice() -> None:
    assert len({mint() for _ in range(1_000_000)}) == 1_000_000


def test_threads_never_mint_the_same_name() -> None:
    minted: list[str] = []

    def work() -> None:
        minted.extend(mint() for _ in range(10_000))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(minted)) == 80_000


async def test_a_holder_has_the_shape_worker_kind_name(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, worker="web-1")
        handle = await lock.acquire()
        assert re.fullmatch(r"web-1:task:[0-9a-f]{17,}", handle.token)
        await handle.release()

        def work() -> str:
            with lock.from_thread as held:
                return held.token

        assert re.fullmatch(r"web-1:thread:[0-9a-f]{17,}", await asyncio.to_thread(work))
        async with TaskLock("cart", backend=client, worker=UUID(int=5)) as held:
            assert held.token.startswith("00000000-0000-0000-0000-000000000005:task:")


async def test_a_worker_is_random_unless_it_is_given() -> None:
    assert Lock("cart").worker != Lock("cart").worker
    assert re.fullmatch("[0-9a-f]{16}", Lock("cart").worker)
    assert Lock("cart", worker="web-1").worker == "web-1"
    assert Lock("cart", worker=UUID(int=1)).worker == "00000000-0000-0000-0000-000000000001"


async def test_each_acquisition_has_a_holder_of_its_own(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, worker="web-1")
        tokens = set()
        for _ in range(20):
            async with lock as handle:
                tokens.add(handle.token)
        assert len(tokens) == 20


async def test_no_later_task_is_taken_for_one_that_ended(world: World) -> None:
    """Tasks are often made at the address of one that ended."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=3600)
        handle: list[LockHandle] = []

        async def holder() -> None:
            handle.append(await lock.acquire())

        async def stranger() -> int:
            for act in (lock.release, lock.extend):
                with pytest.raises(LockNotOwnedError):
                    await act()
            with pytest.raises(WouldBlockError):
                await lock.acquire_nowait()
            return id(asyncio.current_task())

        await asyncio.create_task(holder())
        ids = {await asyncio.create_task(stranger()) for _ in range(1000 if world.kind == "memory" else 100)}
        assert len(ids) < 100, "addresses are used again"
        assert handle[0].valid


async def test_no_later_thread_is_taken_for_one_that_ended(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=3600)

        def holder() -> None:
            lock.from_thread.acquire()

        def stranger() -> None:
            for act in (lock.from_thread.release, lock.from_thread.extend):
                with pytest.raises(LockNotOwnedError):
                    act()
            assert not lock.from_thread.owned()

        def one_after_another() -> set[int | None]:
            idents = set()
            for work in (holder, *[stranger] * 50):
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                idents.add(thread.ident)
            return idents

        assert len(await asyncio.to_thread(one_after_another)) < 51, "idents are used again"
        assert await lock.locked()


async def test_an_owner_has_ended_when_its_task_or_thread_has() -> None:
    task = asyncio.create_task(asyncio.sleep(0, this_task))
    owner = await asyncio.create_task(owner_of_itself())
    assert owner.done()
    assert not this_task().done()
    await task
    owners = []
    thread = threading.Thread(target=lambda: owners.append(this_thread()))
    thread.start()
    thread.join()
    assert owners[0].done()
    assert not this_thread().done()
    assert this_thread() is this_thread()


async def owner_of_itself() -> "asyncio.Task[object]":
    task = this_task()
    assert isinstance(task, asyncio.Task)
    return task


async def test_what_ended_tasks_left_held_is_forgotten(world: World, clock: MovableClock) -> None:
    """A lock that thousands of tasks use keeps nothing of those that ended."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=1)
        for _ in range(300):
            await asyncio.create_task(lock.acquire())
            await clock.advance(1.1)
        assert len(lock._held) <= 65
