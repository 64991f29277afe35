"""Threads use a lock through the event loop that serves it; whatever interrupts them leaves no lease behind."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from grelmicro.coordination import (
    Lock,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    MultiLock,
    TaskLock,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.threads import _Work, call
from grelmicro.errors import OutcomeUnknownError, OutOfContextError
from grelmicro.lifecycle import AwaitedCancelledError
from tests.helpers.stores import Gate, reply_lost, silence
from tests.helpers.worlds import World, eventually

LONG = 3600.0


async def test_a_plain_thread_uses_a_lock(world: World) -> None:
    async with world.client() as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        theirs = Lock("cart", backend=other)

        def work() -> tuple[int, bool]:
            handle = lock.from_thread.acquire(timeout=5)
            asyncio.run_coroutine_threadsafe(refused(), loop).result(5)
            handle.extend()
            lock.from_thread.extend()
            lock.from_thread.release()
            with lock.from_thread as again:
                return again.fencing_token - handle.fencing_token, again.valid

        async def refused() -> None:
            with pytest.raises(WouldBlockError):
                await theirs.acquire_nowait()

        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(work) == (1, True)
        await theirs.acquire_nowait()


async def test_each_thread_is_a_holder_of_its_own(real_world: World) -> None:
    async with real_world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        held, tried = threading.Event(), threading.Event()

        def holder() -> None:
            with lock.from_thread:
                held.set()
                tried.wait(30)

        def stranger() -> None:
            held.wait(30)
            with pytest.raises(WouldBlockError):
                lock.from_thread.acquire_nowait()
            with pytest.raises(LockTimeoutError):
                lock.from_thread.acquire(timeout=0.01)
            for act in (lock.from_thread.release, lock.from_thread.extend):
                with pytest.raises(LockNotOwnedError):
                    act()
            assert not lock.from_thread.owned()
            assert lock.from_thread.locked()

        holding = asyncio.create_task(asyncio.to_thread(holder))
        await asyncio.to_thread(stranger)
        tried.set()
        await holding


async def test_the_loop_itself_is_refused_at_once(world: World) -> None:
    async with world.client() as client:
        lock, tasklock = Lock("cart", backend=client), TaskLock("cart", backend=client)
        handle = await lock.acquire()
        uses: list[Callable[[], object]] = [
            lock.from_thread.acquire,
            lock.from_thread.acquire_nowait,
            lock.__enter__,
            tasklock.__enter__,
            MultiLock(lock).__enter__,
            lock.from_thread.__enter__,
            lock.from_thread.locked,
            lock.from_thread.owned,
            tasklock.from_thread.__enter__,
            tasklock.from_thread.locked,
            handle.from_thread.extend,
            handle.from_thread.release,
            handle.from_thread.wait_lost,
        ]
        for use in uses:
            with pytest.raises(OutOfContextError) as caught:
                use()
            assert str(caught.value) == (
                "`with` and from_thread were used on the event loop that has to serve them, which would wait for "
                "itself: use `async with` or `await` here, or call this in a thread (asyncio.to_thread)"
            )
        await handle.release()


@pytest.mark.parametrize("kind", [Lock, TaskLock, lambda name, backend: MultiLock(Lock(name, backend=backend))])
async def test_with_in_a_thread_is_the_short_form(world: World, kind: Any) -> None:
    async with world.client() as client:
        lock, seen = Lock("cart", backend=client), TaskLock("cart", backend=client)

        def use() -> None:
            entered = kind("cart", backend=client)
            with entered as held:
                assert held.valid
                assert lock.from_thread.locked() or seen.from_thread.locked()
                with pytest.raises(LockReentrantError), entered:
                    pass
            with pytest.raises(ZeroDivisionError), kind("other", backend=client):
                raise ZeroDivisionError
            assert not held.valid

        await asyncio.to_thread(use)


async def test_each_of_many_threads_leaves_the_block_that_it_entered(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client)
        inside = 0

        def use() -> None:
            nonlocal inside
            for _ in range(5):
                with lock as held:
                    inside += 1
                    assert inside == 1
                    assert held.valid
                    inside -= 1

        await asyncio.gather(*(asyncio.to_thread(use) for _ in range(4)))
        assert not await lock.locked()


async def test_another_loops_thread_may_wait(world: World) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client)

        async def use() -> None:
            with lock.from_thread:
                pass

        await asyncio.to_thread(lambda: asyncio.run(use()))


async def test_an_error_of_the_lock_is_the_threads(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        store.suffer("acquire", reply_lost)

        def work() -> None:
            with pytest.raises(Exception, match="which is undone in the background"):
                Lock("cart", backend=client).from_thread.acquire()

        await asyncio.to_thread(work)
        await eventually(lambda: not client._background, "the undo has ended")


async def test_a_closed_backend_is_refused(world: World) -> None:
    client = world.client()
    lock = Lock("cart", backend=client)
    async with client:
        handle = await asyncio.to_thread(lock.from_thread.acquire)
    for use in (lock.from_thread.acquire, lock.from_thread.locked, handle.extend, handle.release):
        with pytest.raises(OutOfContextError, match="LockAdapter is not open"):
            await asyncio.to_thread(use)


@pytest.mark.parametrize("ends", ["cancels its tasks", "stops"])
def test_a_loop_that_ends_during_a_call_is_told(ends: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grelmicro.coordination.threads.LOOK", 0.1)
    errors: list[BaseException] = []
    store = world.troubled()
    store.break_down(silence, "acquire")
    client = LockAdapter(store)
    loop = asyncio.new_event_loop()

    def work() -> None:
        try:
            Lock("cart", backend=client).from_thread.acquire()
        except BaseException as error:
            errors.append(error)

    async def open_and_wait() -> None:
        await client.__aenter__()
        thread.start()
        await eventually(lambda: store.calls["acquire"], "it asks")

    thread = threading.Thread(target=work)
    loop.run_until_complete(open_and_wait())
    if ends == "cancels its tasks":
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
    thread.join(20)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [OutOfContextError]
    assert "stopped during the call: keep the app open until all that uses it from other threads" in str(errors[0])
    store.heal()

    async def close() -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.01)
        await client.__aexit__(None, None, None)

    loop.run_until_complete(close())
    loop.close()


MOMENTS = ["before the loop was told", "when the loop was told", "before it began", "in flight", "when it ended"]


class Interruption:
    """Raises `KeyboardInterrupt` once in a thread, at a given moment of its first call to the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
        self.now = threading.Event()
        """In flight: when it comes."""
        self._moment = moment
        self._done = False
        self._wait = _Work.wait_for_its_end
        self._tell = loop_of_the_test().call_soon_threadsafe
        monkeypatch.setattr(_Work, "wait_for_its_end", lambda work: self._waiting(work))
        monkeypatch.setattr(loop_of_the_test(), "call_soon_threadsafe", self._telling)

    def _telling(self, *call: Any, **options: Any) -> object:
        about = getattr(call[0], "__func__", None)
        if about is _Work.start and self._moment == "before the loop was told":
            self._interrupt()
        told = self._tell(*call, **options)
        if about is _Work.start and self._moment == "when the loop was told":
            self._interrupt()
        return told

    def _waiting(self, work: "_Work[Any]") -> None:
        if self._moment == "before it began":
            self._interrupt()
        elif self._moment == "in flight" and not self._done:
            assert self.now.wait(10)
            self._interrupt()
        self._wait(work)
        if self._moment == "when it ended":
            self._interrupt()

    def _interrupt(self) -> None:
        if not self._done:
            self._done = True
            raise KeyboardInterrupt


def loop_of_the_test() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def acquire(lock: Lock, tasklock: TaskLock) -> None:
    lock.from_thread.acquire()


def acquire_nowait(lock: Lock, tasklock: TaskLock) -> None:
    lock.from_thread.acquire_nowait()


def enter(lock: Lock, tasklock: TaskLock) -> None:
    lock.from_thread.__enter__()


def enter_task(lock: Lock, tasklock: TaskLock) -> None:
    tasklock.from_thread.__enter__()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("act", [acquire, acquire_nowait, enter, enter_task])
async def test_an_interrupted_thread_leaves_no_lease(
    world: World, monkeypatch: pytest.MonkeyPatch, act: Callable[[Lock, TaskLock], None], moment: str
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        gate = Gate(after=True)
        if moment == "in flight":
            store.suffer("acquire", gate)
        interruption = Interruption(monkeypatch, moment)
        lock = Lock("cart", backend=client, lease_duration=LONG)
        tasklock = TaskLock("cart", backend=client, lease_duration=LONG)

        def work() -> None:
            with pytest.raises(KeyboardInterrupt):
                act(lock, tasklock)
            # The thread is no holder, and free to try again.
            lock.from_thread.acquire(timeout=LONG).release()

        working = asyncio.create_task(asyncio.to_thread(work))
        if moment == "in flight":
            await gate.arrived.wait()
            interruption.now.set()
        await working
        await eventually(lambda: not client._background, "the undo has ended")
        assert not lock._held
        assert not tasklock._held
        await Lock("cart", backend=other).acquire_nowait()
        async with TaskLock("cart", backend=other):
            pass


@pytest.mark.parametrize("moment", MOMENTS[:-1])
async def test_an_interrupted_thread_waits_for_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()
        interruption = Interruption(monkeypatch, moment)

        def work() -> None:
            with pytest.raises(KeyboardInterrupt):
                lock.from_thread.acquire()

        working = asyncio.create_task(asyncio.to_thread(work))
        if moment == "in flight":
            await eventually(lambda: client.queues.lines, "the thread waits")
            interruption.now.set()
        await asyncio.wait_for(working, 10)
        assert not client.queues.lines
        await handle.release()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("by", ["release", "block"])
async def test_an_interrupted_release_is_still_a_release(
    world: World, monkeypatch: pytest.MonkeyPatch, by: str, moment: str
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        loop = asyncio.get_running_loop()
        gate = Gate()
        if moment == "in flight":
            store.suffer("release", gate)

        async def begin() -> Interruption:
            return Interruption(monkeypatch, moment)

        def work() -> None:
            lock.from_thread.__enter__()
            interruption = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
            interruption.now.set()
            loop.call_soon_threadsafe(loop.call_later, 0.02, gate.open.set)
            with pytest.raises(KeyboardInterrupt):
                lock.from_thread.release() if by == "release" else lock.from_thread.__exit__(None, None, None)

        await asyncio.to_thread(work)
        await eventually(lambda: not client._background, "the release has ended")
        await Lock("cart", backend=other).acquire_nowait()


async def test_a_thread_waits_while_the_loop_works(world: World) -> None:
    """A thread that waits for long costs the loop nothing."""
    async with world.client() as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        handle = await lock.acquire()
        waiting = asyncio.create_task(asyncio.to_thread(lock.from_thread.acquire))
        await eventually(lambda: client.queues.lines, "the thread waits")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await handle.release()
        theirs = await asyncio.wait_for(waiting, 5)
        await asyncio.to_thread(theirs.release)


async def test_a_call_that_is_cancelled_elsewhere_is_no_end_of_the_loop(world: World) -> None:
    async def cancelled_elsewhere(apply: object) -> object:
        raise asyncio.CancelledError

    store = world.troubled()
    async with LockAdapter(store) as client:
        lock = Lock("cart", backend=client, lease_duration=LONG)
        store.suffer("acquire", cancelled_elsewhere)
        with pytest.raises(OutcomeUnknownError):
            await asyncio.to_thread(lock.from_thread.acquire)
        handle = await asyncio.to_thread(lock.from_thread.acquire)  # the first one is undone
        await asyncio.to_thread(handle.release)


async def test_what_is_cancelled_elsewhere_during_a_call_is_an_error() -> None:
    async def cancelled_elsewhere() -> None:
        raise asyncio.CancelledError

    loop = asyncio.get_running_loop()
    with pytest.raises(AwaitedCancelledError):
        await asyncio.to_thread(lambda: call(loop, cancelled_elsewhere()))
