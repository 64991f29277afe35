"""`with micro:` in programs that have no event loop: an app runs on a loop in a thread, and threads use its locks."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from grelmicro import Grelmicro
from grelmicro.context import bound, open_apps
from grelmicro.coordination import Coordination, Lock, LockLostError, LockNotOwnedError, TaskLock
from grelmicro.errors import OutOfContextError
from grelmicro.providers.memory import MemoryProvider
from tests.helpers.parts import Part


@pytest.fixture
def micro() -> Grelmicro:
    return Grelmicro(uses=[Coordination(MemoryProvider())])


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """What a test opened is closed at its end, and serves nobody any more."""
    before, open_before = set(threading.enumerate()), list(open_apps)
    yield
    assert set(threading.enumerate()) - before == set()
    assert bound.get() is None
    assert [app for app in open_apps if app not in open_before] == []


def test_a_script_uses_locks(micro: Grelmicro) -> None:
    lock = Lock("cart")
    with micro:
        with lock.from_thread as handle:
            assert handle.valid
            assert lock.from_thread.locked()
            assert lock.from_thread.owned()
            handle.extend()
        assert not lock.from_thread.locked()
        with TaskLock("report").from_thread as held:
            assert held.fencing_token > 0


def test_it_opens_again(micro: Grelmicro) -> None:
    for _ in range(3):
        with micro, Lock("cart").from_thread:
            pass


def test_its_error_is_the_bodys(micro: Grelmicro) -> None:
    with pytest.raises(ZeroDivisionError), micro, Lock("cart").from_thread:
        raise ZeroDivisionError


def test_other_threads_share_it(micro: Grelmicro) -> None:
    lock, done = Lock("cart"), list[int]()

    def work() -> None:
        for _ in range(50):
            with lock.from_thread:
                done.append(len(done))

    with micro:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert done == list(range(400))


def test_apps_in_one_another_serve_in_turn(micro: Grelmicro) -> None:
    inner = Grelmicro(uses=[Coordination(MemoryProvider())])
    with micro:
        with inner:
            assert bound.get() is inner
        assert bound.get() is micro
        with Lock("cart").from_thread:
            pass


def test_closed_in_another_order_they_serve_no_longer(micro: Grelmicro) -> None:
    other = Grelmicro(uses=[Coordination(MemoryProvider())])
    micro.__enter__()
    other.__enter__()
    micro.__exit__(None, None, None)
    assert bound.get() is other
    other.__exit__(None, None, None)


def test_what_fails_to_open_is_raised() -> None:
    micro = Grelmicro(uses=[Coordination(MemoryProvider()), Part("server", [], opening=ConnectionError("no server"))])
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no server"), micro:
            pytest.fail("it did not open")


def test_what_fails_to_close_is_raised() -> None:
    server = Part("server", [], closing=ConnectionError("the server is gone"))
    micro = Grelmicro(uses=[Coordination(MemoryProvider()), server])
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the server is gone"), micro:
            pass


@pytest.mark.parametrize("open_it", [Grelmicro.__enter__, Grelmicro.open])
async def test_it_is_refused_where_a_loop_runs(micro: Grelmicro, open_it: Callable[[Grelmicro], object]) -> None:
    with pytest.raises(OutOfContextError) as caught:
        open_it(micro)
    assert str(caught.value) == "`with` or open() was used where an event loop runs: use `async with` here"


def test_blocks_nest(micro: Grelmicro) -> None:
    with micro:
        with micro:
            assert is_served()
        assert is_served()
    assert not micro.is_open


def test_each_open_needs_its_close(micro: Grelmicro) -> None:
    micro.close()  # as tidying up does where opening failed
    micro.open()
    micro.open()
    with micro:
        micro.close()
        assert is_served()
    assert is_served()
    micro.close()
    assert not micro.is_open
    micro.close()
    micro.open()
    assert is_served()
    micro.close()


def test_open_serves_every_thread(micro: Grelmicro) -> None:
    micro.open()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: is_served(), range(8)))
        pool.submit(micro.close).result()
    assert not micro.is_open


def test_threads_open_it_once() -> None:
    log: list[str] = []
    opened = Grelmicro(uses=[Coordination(MemoryProvider()), Part("part", log)])
    together = threading.Barrier(8)

    def work() -> None:
        for _ in range(20):
            together.wait(10)
            with opened:
                assert opened.is_open
                assert log.count("open part") == log.count("close part") + 1

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result(60)
    assert not opened.is_open
    assert log.count("open part") == log.count("close part")


def test_who_comes_after_a_failed_opening_tries_again() -> None:
    part = Part("server", [], opening=ConnectionError("no server"))
    micro = Grelmicro(uses=[Coordination(MemoryProvider()), part])
    with pytest.raises(ConnectionError):
        micro.open()
    part.opening = None
    micro.open()
    assert is_served()
    micro.close()


def test_closing_it_on_its_own_loop_is_refused(micro: Grelmicro) -> None:
    async def close() -> None:
        micro.close()

    micro.open()
    loop = micro.get_loop()
    with pytest.raises(OutOfContextError, match="on its own event loop"):
        asyncio.run_coroutine_threadsafe(close(), loop).result(10)
    assert is_served()
    micro.close()


def is_served() -> bool:
    with Lock("cart").from_thread.acquire(timeout=30) as held:
        return held.valid


def test_async_code_of_another_loop_is_refused(micro: Grelmicro) -> None:
    async def use() -> None:
        await Lock("cart").acquire()

    async def reopen() -> None:
        async with micro:
            pytest.fail("it did not open")

    with micro:
        with pytest.raises(OutOfContextError, match="serves another event loop than the running one"):
            asyncio.run(use())
        with pytest.raises(OutOfContextError, match="is open on another event loop"):
            asyncio.run(reopen())


def test_a_lost_lock_says_so_at_its_next_use_and_at_the_end(micro: Grelmicro) -> None:
    lock = Lock("cart", auto_renew=True)

    def work() -> None:
        with lock.from_thread as handle:
            backend = micro.coordination.lock_backend
            taken_away = backend.release(handle._handle.lease)
            asyncio.run_coroutine_threadsafe(taken_away, backend.get_loop()).result(5)
            with pytest.raises(LockNotOwnedError, match="it expired or was taken over"):
                handle.extend()
            with pytest.raises(LockLostError, match="it expired or was taken over"):
                handle.raise_if_lost()
            handle.wait_lost()

    with micro, pytest.raises(LockLostError, match="cannot be kept until its block ended"):
        work()


def test_an_app_closed_inside_the_block_leaves_the_bodys_error_first(micro: Grelmicro) -> None:
    def work() -> None:
        with Lock("cart").from_thread:
            micro.__exit__(None, None, None)
            raise ZeroDivisionError

    micro.__enter__()
    with pytest.raises(ZeroDivisionError) as caught:
        work()
    assert len(caught.value.__notes__) == 1


def test_forgetting_to_close_it_ends_with_the_process() -> None:
    """A thread that nobody joins does not keep the program running."""
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    micro.__enter__()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "grelmicro-loop")
    assert thread.daemon
    began = monotonic()
    micro.__exit__(None, None, None)
    assert monotonic() - began < 5
