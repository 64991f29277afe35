"""Several locks in threads: the same as in tasks, through the event loop that serves them."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from grelmicro.coordination import (
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    MultiLock,
    ThreadMultiLockHandle,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.threads import _Work
from grelmicro.errors import OutOfContextError
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import request_lost
from tests.helpers.worlds import World, eventually, pass_by
from tests.unit.test_multilock import free, locks


async def test_a_thread_holds_all_of_them(real_world: World) -> None:
    async with real_world.client() as client, real_world.client() as other:
        multi = MultiLock(*locks(client, "b", "a"))
        loop = asyncio.get_running_loop()

        def others_see() -> list[str]:
            return asyncio.run_coroutine_threadsafe(free(other, "a", "b"), loop).result(20)

        def work() -> None:
            with multi.from_thread as held:
                assert [handle.name for handle in held.handles] == ["b", "a"]
                assert (held.name, held.valid, held.lost) == ("a, b", True, False)
                assert held.expires_in > 3000
                held.raise_if_lost()
                held.handles[0].extend()
                assert others_see() == []
            with multi.from_thread.acquire(timeout=20) as held:
                assert held.valid
            again = multi.from_thread.acquire(timeout=0)
            again.release()
            assert others_see() == ["a", "b"]
            with pytest.raises(LockNotOwnedError, match="are released already"):
                again.release()

        await asyncio.to_thread(work)


async def test_threads_with_opposite_orders_never_wait_for_each_other(real_world: World) -> None:
    async with real_world.client() as client:
        multis = [MultiLock(*locks(client, *order)) for order in ("ab", "ba")]
        inside = 0

        def work(multi: MultiLock) -> None:
            nonlocal inside
            for _ in range(5):
                with multi.from_thread.acquire(timeout=50) as held:
                    inside += 1
                    assert inside == 1
                    assert held.valid
                    inside -= 1

        await asyncio.gather(*(asyncio.to_thread(work, multis[number % 2]) for number in range(4)))
        assert await free(client, "a", "b") == ["a", "b"]


async def test_refusals_are_the_threads(world: World) -> None:
    async with world.client() as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b"))
        theirs = await locks(other, "b")[0].acquire()

        def work() -> None:
            with pytest.raises(LockTimeoutError, match="Lock 'b'"):
                multi.from_thread.acquire(timeout=0)

        await asyncio.to_thread(work)
        assert await free(other, "a") == ["a"]
        await theirs.release()

        def reenter() -> None:
            with multi.from_thread, pytest.raises(LockReentrantError):
                multi.from_thread.acquire()

        await asyncio.to_thread(reenter)
        assert await free(other, "a", "b") == ["a", "b"]


async def test_what_the_block_raises_stays_first(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b"))

        def work() -> None:
            with multi.from_thread:
                store.suffer("release", request_lost)
                raise ValueError("the work failed")

        with pytest.raises(ValueError, match="the work failed") as caught:
            await asyncio.to_thread(work)
        assert ["'lock:b'" in note for note in caught.value.__notes__] == [True]
        await clock.advance(1)
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b") == ["a", "b"]


async def test_a_loss_is_told_at_the_end(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b", lease_duration=9, auto_renew=True))
        began: asyncio.Future[ThreadMultiLockHandle] = asyncio.get_running_loop().create_future()
        told = threading.Event()

        def work() -> None:
            with multi.from_thread as held:
                loop.call_soon_threadsafe(began.set_result, held)
                told.wait(30)
                assert held.lost

        loop = asyncio.get_running_loop()
        working = asyncio.create_task(asyncio.to_thread(work))
        held = await began
        assert await other.release(held.handles[0]._handle.lease)
        await pass_by(clock, client, 4)
        told.set()
        with pytest.raises(LockLostError, match="lock 'a' cannot be kept until its block ended"):
            await working
        assert await free(other, "a", "b") == ["a", "b"]


@pytest.mark.parametrize("moment", ["while it waits", "when it has them"])
async def test_a_thread_that_is_interrupted_leaves_nothing_held(
    world: World, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As an interrupt of the main thread comes, at that moment."""
    async with world.client() as client, world.client() as other:
        theirs = await locks(other, "b")[0].acquire()
        multi = MultiLock(*locks(client, "a", "b"))

        async def come() -> None:
            await eventually(lambda: "lock:b" in client.queues.lines, "it waits")
            if moment == "when it has them":
                await theirs.release()

        def interrupted(work: _Work[object]) -> object:
            asyncio.run_coroutine_threadsafe(come(), loop).result(20)
            if moment == "when it has them":
                work.wait_for_its_end()
            raise KeyboardInterrupt

        def work() -> None:
            with pytest.raises(KeyboardInterrupt):
                multi.from_thread.acquire()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(_Work, "wait", interrupted)
        await asyncio.to_thread(work)
        await eventually(lambda: not client._background, "everything is given back")
        if not theirs.released:
            await theirs.release()
        assert await free(other, "a", "b") == ["a", "b"]


async def test_the_loop_itself_is_refused_at_once(world: World) -> None:
    async with world.client() as client:
        multi = MultiLock(*locks(client, "a"))
        held = await multi.acquire()
        uses: list[Callable[[], object]] = [
            multi.from_thread.acquire,
            multi.from_thread.__enter__,
            held.from_thread.release,
        ]
        for use in uses:
            with pytest.raises(OutOfContextError, match="which would wait for itself"):
                use()
        await held.release()


async def test_a_closed_backend_is_refused(world: World) -> None:
    client = world.client()
    multi = MultiLock(*locks(client, "a", "b"))
    async with client:
        held = await asyncio.to_thread(multi.from_thread.acquire)
    for use in (multi.from_thread.acquire, held.release, lambda: held.__exit__(None, None, None)):
        with pytest.raises(OutOfContextError, match="LockAdapter is not open"):
            await asyncio.to_thread(use)
    failed = ValueError("the work failed")
    held.__exit__(ValueError, failed, None)
    assert len(failed.__notes__) == 1


async def test_a_block_may_end_in_another_thread_than_it_began_in(world: World) -> None:
    async with world.client() as client:
        multi = MultiLock(*locks(client, "a", "b")).from_thread
        await asyncio.to_thread(multi.__enter__)
        await asyncio.to_thread(multi.__exit__, None, None, None)
        assert await free(client, "a", "b") == ["a", "b"]
        with pytest.raises(LockNotOwnedError, match="cannot be released at the end of its block"):
            await asyncio.to_thread(multi.__exit__, None, None, None)
