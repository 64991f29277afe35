"""Coroutines on another event loop than the one that serves a lock; whatever happens to either leaves no lease."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import (
    Coordination,
    Lock,
    LockHandle,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    WouldBlockError,
)
from grelmicro.coordination.loops import _Work, call_across
from grelmicro.errors import OutOfContextError
from grelmicro.lifecycle import AwaitedCancelledError
from grelmicro.providers.memory import MemoryProvider

LONG = 3600.0


@pytest.fixture
def micro() -> Iterator[Grelmicro]:
    """An app on a loop of its own, in a thread."""
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    micro.open()
    yield micro
    micro.close()


def lock_of(micro: Grelmicro, **settings: Any) -> Lock:
    return micro.coordination.lock("cart", **{"lease_duration": LONG, "auto_renew": True, **settings})


def served_by(micro: Grelmicro) -> asyncio.AbstractEventLoop:
    return micro.get_loop()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def becomes_free(micro: Grelmicro) -> None:
    async with asyncio.timeout(30):
        while await lock_of(micro).from_loop.locked():
            await asyncio.sleep(0.005)


class Gated:
    """Requests of a store that wait on its loop before or after they are carried out."""

    def __init__(self, micro: Grelmicro, monkeypatch: pytest.MonkeyPatch, *, after: bool = True) -> None:
        self.reached = threading.Event()
        self._loop = served_by(micro)
        self._open = asyncio.Event()
        backend = micro.coordination.lock_backend
        store = vars(backend)["store"]
        for name in ("acquire", "release"):
            monkeypatch.setattr(store, name, self._gated(getattr(store, name), after=after))
        monkeypatch.setattr(backend, "instant", lambda loop, name: None)

    def _gated(self, call: Callable[..., Coroutine[Any, Any, Any]], *, after: bool) -> Callable[..., Any]:
        async def gated(*args: Any, **options: Any) -> Any:
            answer = await call(*args, **options) if after else None
            self.reached.set()
            await self._open.wait()
            return answer if after else await call(*args, **options)

        return gated

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)


async def test_a_coroutine_uses_a_lock(micro: Grelmicro) -> None:
    lock, other = lock_of(micro), lock_of(micro)
    handle = await lock.from_loop.acquire(timeout=5)
    assert (await handle.extend()) is handle
    assert (await lock.from_loop.extend()).token == handle.token
    assert await lock.from_loop.owned()
    assert await lock.from_loop.locked()
    assert not await other.from_loop.owned()
    for refused in (other.from_loop.acquire_nowait(), asyncio.create_task(other.from_loop.acquire(timeout=0.01))):
        with pytest.raises(WouldBlockError):
            await refused
    with pytest.raises(LockReentrantError):
        await lock.from_loop.acquire()
    with pytest.raises(LockReentrantError):
        await lock.from_loop.acquire_nowait()
    await lock.from_loop.release()
    async with lock.from_loop as held:
        assert held.fencing_token > handle.fencing_token
        with pytest.raises(LockReentrantError):
            async with held:
                pass
    async with lock.from_loop.acquire(timeout=1) as held:
        assert held.valid
    assert not held.valid
    assert not held.lost
    with pytest.raises(LockNotOwnedError):
        await lock.from_loop.release()
    await held.wait_lost()


async def test_it_is_renewed_by_the_loop_that_serves_it(micro: Grelmicro) -> None:
    async with lock_of(micro, lease_duration=0.2).from_loop as held:
        expires = held.expires_in
        await eventually(lambda: held._handle.renew_at > held._handle._acquired_at + 0.2)
        assert held.valid
        assert expires <= 0.2


async def test_two_loops_exclude_each_other(micro: Grelmicro) -> None:
    lock, inside, most = lock_of(micro), 0, 0

    async def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            async with lock.from_loop:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

    async def several() -> None:
        await asyncio.gather(*(work() for _ in range(3)))

    elsewhere = asyncio.to_thread(asyncio.run, several())
    await asyncio.gather(elsewhere, several())
    assert most == 1


async def test_the_loop_that_serves_it_may_use_it_too(micro: Grelmicro) -> None:
    async def use() -> bool:
        async with lock_of(micro).from_loop as held:
            return held.valid

    assert await call_across(served_by(micro), use())
    await becomes_free(micro)


async def test_the_task_that_asks_is_the_holder(micro: Grelmicro) -> None:
    lock = lock_of(micro)
    held = await asyncio.create_task(lock.from_loop.acquire())
    assert held._handle.owner is asyncio.current_task()
    await lock.from_loop.release()


async def test_what_the_task_holds_is_not_waited_for_in_its_threads(micro: Grelmicro) -> None:
    async with lock_of(micro).from_loop as held:
        held.keep_around_threads()
        with pytest.raises(LockReentrantError):
            await asyncio.to_thread(lock_of(micro).from_thread.acquire)
        with pytest.raises(LockReentrantError):
            await lock_of(micro).from_loop.acquire()


@pytest.mark.parametrize("after", [True, False], ids=["granted", "asked"])
async def test_a_cancelled_acquisition_is_undone(
    micro: Grelmicro, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    with monkeypatch.context() as patched:
        gated = Gated(micro, patched, after=after)
        task = asyncio.create_task(lock_of(micro).from_loop.acquire())
        await asyncio.to_thread(gated.reached.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gated.open()
        await becomes_free(micro)


async def test_one_that_is_cancelled_before_it_begins_asks_nothing(micro: Grelmicro) -> None:
    hold = threading.Event()
    served_by(micro).call_soon_threadsafe(hold.wait, 30)
    task = asyncio.create_task(lock_of(micro).from_loop.acquire())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    served_by(micro).call_soon_threadsafe(lambda: None)
    hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await becomes_free(micro)


async def test_one_that_is_cancelled_when_it_was_granted_is_undone(
    micro: Grelmicro, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is here, and the task was not resumed yet."""
    granted, wake = threading.Event(), _Work._wake

    def wake_and_tell(work: "_Work[Any]") -> None:
        wake(work)
        granted.set()

    monkeypatch.setattr(_Work, "_wake", wake_and_tell)
    asking = threading.Event()
    served_by(micro).call_soon_threadsafe(asking.wait, 30)
    task = asyncio.create_task(lock_of(micro).from_loop.acquire())
    await asyncio.sleep(0)
    asking.set()
    assert granted.wait(30)  # while this loop stands still
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await becomes_free(micro)


async def test_a_coroutine_that_is_closed_leaves_nothing_behind(micro: Grelmicro) -> None:
    async with lock_of(micro).from_loop.acquire() as held:
        waiting = lock_of(micro).from_loop.acquire(timeout=LONG)
        waiting.send(None)
        closed = threading.Event()
        served_by(micro).call_soon_threadsafe(closed.wait, 30)
        waiting.close()
        closed.set()
    assert not held.valid
    await becomes_free(micro)


async def test_a_waiter_that_is_cancelled_leaves_the_queue(micro: Grelmicro) -> None:
    held = await asyncio.create_task(lock_of(micro).from_loop.acquire())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await lock_of(micro).from_loop.acquire()
    with pytest.raises(LockTimeoutError):
        await lock_of(micro).from_loop.acquire(timeout=0.01)
    with anyio.move_on_after(0.05) as scope:
        await lock_of(micro).from_loop.acquire()
    assert scope.cancelled_caught
    await held.release()
    await (await lock_of(micro).from_loop.acquire(timeout=0)).release()


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_cancelled_release_is_finished_first(
    micro: Grelmicro, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    held = await lock_of(micro).from_loop.acquire()
    gated = Gated(micro, monkeypatch, after=False)
    waits = count_waits(monkeypatch)
    ended: list[BaseException] = []
    scope = anyio.CancelScope()

    async def release() -> None:
        with scope:
            try:
                await held.release()
            except BaseException as error:
                ended.append(error)
                raise

    task = asyncio.create_task(release())
    await asyncio.to_thread(gated.reached.wait, 30)
    for _ in range(5):
        (scope if how == "scope" else task).cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert ended == []
    gated.open()
    await asyncio.wait({task}, timeout=30)
    assert [type(error) for error in ended] == [asyncio.CancelledError]
    assert held._handle.released
    assert len(waits) < 8  # else a scope that cancels again and again keeps this loop busy


def count_waits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The waits for calls on another loop that begin from now on."""
    waits: list[object] = []
    wait = _Work.wait_for_its_end

    async def counted(work: "_Work[Any]") -> None:
        waits.append(work)
        await wait(work)

    monkeypatch.setattr(_Work, "wait_for_its_end", counted)
    return waits


@pytest.mark.parametrize("how", ["plain", "with"])
async def test_a_loss_cancels_the_body_on_its_own_loop(micro: Grelmicro, how: str) -> None:
    lock = lock_of(micro)
    cancelled: list[asyncio.AbstractEventLoop] = []
    block = lock.from_loop if how == "plain" else lock.from_loop.acquire()
    with pytest.raises(LockLostError, match="taken away"):
        async with block as held:
            served_by(micro).call_soon_threadsafe(held._handle.lose, "it was taken away")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(asyncio.get_running_loop())
                assert held.lost
                raise
    assert cancelled == [asyncio.get_running_loop()]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.01)


async def test_a_loss_just_before_the_block_cancels_it(micro: Grelmicro, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LockHandle, "guard_block", lambda handle: handle.lose("it was taken away"))
    with pytest.raises(LockLostError):
        async with lock_of(micro).from_loop:
            await asyncio.sleep(60)


async def test_a_loss_and_a_cancellation_at_once_are_a_cancellation(micro: Grelmicro) -> None:
    async def hold() -> None:
        async with lock_of(micro).from_loop as held:
            held._handle.lose("it was taken away")
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    with pytest.raises((asyncio.CancelledError, LockLostError)):
        await task
    assert task.cancelled()


async def test_a_loss_at_the_end_of_the_block_cancels_nothing_later(micro: Grelmicro) -> None:
    for count in range(20):
        with pytest.raises(LockLostError):
            async with micro.coordination.lock(f"cart:{count}", auto_renew=True).from_loop as held:
                held._handle.lose("it was taken away")  # the task is told in the next turn of its loop
        await asyncio.sleep(0.001)


async def test_one_that_is_not_renewed_is_seen_to_be_lost_at_its_end(micro: Grelmicro) -> None:
    with pytest.raises(LockLostError):
        async with lock_of(micro, auto_renew=False, lease_duration=0.05).from_loop as held:
            await held.wait_lost()
            with pytest.raises(LockLostError):
                held.raise_if_lost()
    with pytest.raises(LockNotOwnedError):
        await held.extend()


async def test_the_error_of_the_body_stays(micro: Grelmicro) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        async with lock_of(micro, auto_renew=False).from_loop as held:
            held._handle.lose("it was taken away")
            raise ZeroDivisionError
    assert "taken away" in caught.value.__notes__[0]


async def test_an_app_that_closes_is_an_error_and_no_hang() -> None:
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    await asyncio.to_thread(micro.open)
    lock = lock_of(micro)
    ended: list[BaseException] = []

    async def wait() -> None:
        await lock_of(micro).from_loop.acquire()

    with pytest.raises(LockLostError, match="its backend was closed"):
        async with lock.from_loop:
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.05)
            closing = asyncio.create_task(asyncio.to_thread(micro.close))
            try:
                await asyncio.sleep(60)
            finally:
                await closing
                ended += [error for error in await asyncio.gather(waiting, return_exceptions=True) if error]
    assert [type(error) for error in ended] == [OutOfContextError]
    for use in (lock.from_loop.acquire, lock.from_loop.acquire_nowait, lock.from_loop.locked, lock.from_loop.owned):
        with pytest.raises(OutOfContextError):
            await use()


async def test_a_handle_outlives_its_app_as_an_error() -> None:
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    await asyncio.to_thread(micro.open)
    with pytest.raises(OutOfContextError):
        async with lock_of(micro, auto_renew=False).from_loop as held:
            await asyncio.to_thread(micro.close)
    with pytest.raises(OutOfContextError):
        await held.extend()
    await asyncio.to_thread(micro.open)
    other = micro.coordination.lock("other", auto_renew=False)
    with pytest.raises(ZeroDivisionError) as caught:
        async with other.from_loop:
            await asyncio.to_thread(micro.close)
            raise ZeroDivisionError
    assert "not open" in caught.value.__notes__[0]


async def test_a_loop_that_dies_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose thread ends without closing anything."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    began = threading.Event()

    async def work() -> None:
        began.set()
        await asyncio.sleep(60)

    monkeypatch.setattr("grelmicro.coordination.loops.LOOK", 0.05)
    task = asyncio.create_task(call_across(loop, work()))
    await asyncio.to_thread(began.wait, 30)
    loop.call_soon_threadsafe(loop.stop)
    with pytest.raises(OutOfContextError, match="stopped during the call"):
        await asyncio.wait_for(task, 30)
    thread.join()
    with pytest.raises(OutOfContextError, match="does not run"):
        await call_across(loop, work())
    for left in asyncio.all_tasks(loop):
        left.cancel()
    await asyncio.to_thread(loop.run_until_complete, asyncio.sleep(0))
    loop.close()


async def test_what_a_loop_cancels_by_itself_is_no_cancellation_of_the_caller(micro: Grelmicro) -> None:
    async def work() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with pytest.raises(AwaitedCancelledError):
        await call_across(served_by(micro), work())


def run_and_desert(work: Callable[[], Coroutine[Any, Any, object]], until: Callable[[], bool]) -> object:
    """Run `work` on a new loop until a condition, and close that loop under it; the task."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # it would tell of a task that was destroyed
    task = loop.create_task(work())
    loop.run_until_complete(eventually(until))
    loop.close()
    return task


@pytest.mark.parametrize("kept", [True, False], ids=["task kept", "task collected"])
def test_a_holder_whose_loop_closes_leaves_no_lease(micro: Grelmicro, kept: bool) -> None:
    entered: list[bool] = []

    async def hold() -> None:
        async with lock_of(micro, lease_duration=0.3).from_loop as held:
            entered.append(held.valid)
            await asyncio.Event().wait()

    task = run_and_desert(hold, lambda: bool(entered))
    if not kept:
        del task
        gc.collect()
    with lock_of(micro).from_thread.acquire(timeout=30):
        pass


@pytest.mark.parametrize("kept", [True, False], ids=["task kept", "task collected"])
def test_an_asker_whose_loop_closes_leaves_no_lease(
    micro: Grelmicro, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    with monkeypatch.context() as patched:
        gated = Gated(micro, patched)

        async def ask() -> None:
            await lock_of(micro).from_loop.acquire()

        task = run_and_desert(ask, gated.reached.is_set)
        if not kept:
            del task
            gc.collect()
        gated.open()
    with lock_of(micro).from_thread.acquire(timeout=30):
        pass
