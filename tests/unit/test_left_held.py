"""What is held still when an app closes is given back, but for what goes on under it."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockHandle, LockLostError, LockNotOwnedError, MultiLock


@pytest.fixture(params=["memory", "sqlite"])
def coordination(request: pytest.FixtureRequest, tmp_path: Path) -> Coordination:
    return Coordination.from_url("memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'locks.db'}")


@pytest.fixture
def micro(coordination: Coordination) -> Grelmicro:
    return Grelmicro(uses=[coordination])


renewed = pytest.mark.parametrize("auto_renew", [False, True], ids=["plain", "renewed"])


@renewed
async def test_a_handle_is_given_back(micro: Grelmicro, auto_renew: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with micro:
        held = await Lock("cart", auto_renew=auto_renew).acquire()
        several = await MultiLock(Lock("a"), Lock("b", auto_renew=auto_renew)).acquire()
    assert held.lost
    assert several.lost
    with pytest.raises(LockNotOwnedError, match="its backend was closed, and gave it back"):
        await held.release()
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    reason = "its backend was closed, and gave it back"
    assert sorted(told) == [f"lost lock:{name}: {reason}" for name in ("a", "b", "cart")]
    async with micro:
        for name in ("cart", "a", "b"):
            assert not await Lock(name).locked()


@renewed
def test_a_handle_of_a_thread_is_given_back(micro: Grelmicro, auto_renew: bool) -> None:
    with micro:
        held = Lock("cart", auto_renew=auto_renew).from_thread.acquire()
    assert held.lost
    with micro:
        assert not Lock("cart").from_thread.locked()


@renewed
async def test_a_block_that_its_task_left_behind_is_given_back(micro: Grelmicro, auto_renew: bool) -> None:
    held: list[LockHandle] = []

    async def enter() -> None:
        held.append(await Lock("cart", auto_renew=auto_renew).__aenter__())

    async with micro:
        await asyncio.create_task(enter())
    async with micro:
        assert not await Lock("cart").locked()


async def test_a_block_that_goes_on_keeps_it(micro: Grelmicro) -> None:
    """Another process must not begin while this one works still."""
    entered, end = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with Lock("cart", lease_duration=30):
            entered.set()
            await end.wait()
            raise ZeroDivisionError

    async with micro:
        task = asyncio.create_task(work())
        await entered.wait()
    if micro.coordination.lock_backend.scope != "process":
        async with micro:
            assert await Lock("cart").locked()
    end.set()
    with pytest.raises(ZeroDivisionError):
        await task


async def test_a_renewed_block_that_goes_on_is_cancelled(micro: Grelmicro) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with Lock("cart", auto_renew=True):
            entered.set()
            await asyncio.sleep(60)

    async with micro:
        task = asyncio.create_task(work())
        await entered.wait()
    with pytest.raises(LockLostError, match="its backend was closed"):
        await task


async def test_closing_it_inside_a_renewed_block_is_not_cancelled(micro: Grelmicro) -> None:
    goes_on = False
    await micro.__aenter__()
    with pytest.raises(LockLostError, match="its backend was closed"):
        async with Lock("cart", auto_renew=True):
            await micro.__aexit__(None, None, None)
            goes_on = True
    assert goes_on


def test_a_thread_in_its_block_keeps_it(micro: Grelmicro) -> None:
    entered, end = threading.Event(), threading.Event()
    locked: list[bool] = []

    def work() -> None:
        with pytest.raises(ZeroDivisionError), Lock("cart").from_thread:
            entered.set()
            end.wait(30)
            raise ZeroDivisionError

    thread = threading.Thread(target=work)
    with micro:
        thread.start()
        assert entered.wait(30)
    if micro.coordination.lock_backend.scope != "process":
        with micro:
            locked.append(Lock("cart").from_thread.locked())
    end.set()
    thread.join()
    assert locked in ([], [True])


@renewed
async def test_what_was_released_or_dropped_is_no_matter(
    micro: Grelmicro, auto_renew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with micro:
        lock = Lock("cart", auto_renew=auto_renew)
        held = await lock.acquire()
        await held.release()
        async with lock as again:
            pass
    assert held.released
    assert again.released
    assert "gave it back" not in caplog.text
