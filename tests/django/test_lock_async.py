"""`async with lock(...)` on any event loop."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections, transaction
from django.test import override_settings

from grelmicro import Grelmicro
from grelmicro.coordination import LockLostError, LockTimeoutError
from grelmicro.errors import OutOfContextError
from grelmicro_django import lock, serving
from grelmicro_django.serving import Served, aserved
from tests.django.databases import databases


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[None]:
    with databases(shop={"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.db")}):
        yield


async def is_free(name: str) -> bool:
    """Whether another task can acquire a lock at once."""

    async def ask() -> bool:
        try:
            async with lock(name, timeout=0):
                return True
        except LockTimeoutError:
            return False

    return await asyncio.create_task(ask())


def users() -> int:
    served = serving.serving.enter_at_once()
    assert served is not None
    serving.serving.leave(served)
    return served.users


async def test_one_block_at_a_time() -> None:
    once = lock("order:{pk}", pk=7)
    async with once as held:
        assert held.fencing_token > 0
        assert not await is_free("order:7")
        assert await is_free("order:8")
        with pytest.raises(OutOfContextError, match="guards a block already"):
            async with once:
                pass
    assert await is_free("order:7")
    with pytest.raises(ZeroDivisionError):
        async with once:
            raise ZeroDivisionError
    assert await is_free("order:7")
    assert users() == 0


async def test_loops_and_threads_of_one_process_exclude_each_other() -> None:
    inside = most = 0

    def note(change: int) -> None:
        nonlocal inside, most
        inside += change
        most = max(most, inside)

    async def coroutine() -> None:
        for _ in range(5):
            async with lock("order", timeout=30):
                note(1)
                await asyncio.sleep(0.001)
                note(-1)

    def thread() -> None:
        for _ in range(5):
            with lock("order", timeout=30):
                note(1)
                note(-1)

    await asyncio.gather(
        coroutine(),
        asyncio.to_thread(asyncio.run, coroutine()),
        asyncio.to_thread(async_to_sync(coroutine)),
        asyncio.to_thread(thread),
    )
    assert (inside, most) == (0, 1)
    assert users() == 0


async def test_a_loss_cancels_the_block() -> None:
    cancelled = False
    with pytest.raises(LockLostError, match="a test took it away"):
        async with lock("order") as held:
            handle = held._handle
            handle._backend.get_loop().call_soon_threadsafe(handle.lose, "a test took it away")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled = True
                raise
    assert cancelled
    assert users() == 0


async def test_a_waiter_that_is_cancelled_leaves_nothing_behind() -> None:
    async with lock("order"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await is_held_forever()
    assert await is_free("order")
    assert users() == 0


async def is_held_forever() -> None:
    async def wait() -> None:
        async with lock("order", timeout=None):
            pass

    await asyncio.create_task(wait())


class SlowOpening:
    """Opening an app waits until it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        self.opened: list[Served] = []
        real = serving._opened

        def slow(settings: Any) -> Served:
            self.began.set()
            assert self.may.wait(30)
            self.opened.append(real(settings))
            return self.opened[-1]

        monkeypatch.setattr(serving, "_opened", slow)


async def test_an_opening_that_is_cancelled_adds_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = SlowOpening(monkeypatch)
    task = asyncio.create_task(is_free("order"))
    await asyncio.to_thread(opening.began.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    opening.may.set()
    async with aserved():  # after the first one, which holds the opening
        assert users() == 1
    assert users() == 0
    assert len(opening.opened) == 1


async def test_an_opening_holds_no_event_loop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = SlowOpening(monkeypatch)
    tasks = [asyncio.create_task(is_free(f"order:{count}")) for count in range(3)]
    await asyncio.to_thread(opening.began.wait, 30)
    await asyncio.sleep(0.01)  # the loop turns while the others wait for the opening
    opening.may.set()
    assert await asyncio.gather(*tasks) == [True] * 3
    assert len(opening.opened) == 1


async def test_a_setting_that_changes_amid_an_opening_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = SlowOpening(monkeypatch)
    done = asyncio.Event()

    async def use() -> Grelmicro:
        async with aserved() as micro:
            await done.wait()
            assert micro.is_open
            return micro

    task = asyncio.create_task(use())
    await asyncio.to_thread(opening.began.wait, 30)
    serving.serving.replace()
    opening.may.set()
    async with aserved() as later:
        done.set()
        assert await task is not later
    assert [served.replaced for served in opening.opened] == [True, False]


async def test_a_store_that_is_replaced_stays_open_for_the_lease_that_is_held(tmp_path: Path) -> None:
    with override_settings(GRELMICRO={"STORE": f"sqlite:///{tmp_path}/here.db"}):
        block = lock("order")
        held = await block.__aenter__()
        async with aserved() as micro:
            assert micro.is_open
    async with lock("order", timeout=0):
        await held.extend()
    await block.__aexit__(None, None, None)
    assert not held.lost
    async with asyncio.timeout(30):
        while micro.is_open:  # it is closed in a thread
            await asyncio.sleep(0.005)


async def test_one_that_is_kept_inside_a_transaction_is_refused() -> None:
    with pytest.raises(OutOfContextError, match=r"use `with lock\(\.\.\., inside_transaction=True\)` in the function"):
        async with lock("order", inside_transaction=True):
            pass


async def ask() -> None:
    async with lock("order", timeout=0.2):
        pass


def in_transaction() -> str:
    with transaction.atomic("shop"), pytest.raises(OutOfContextError) as caught:
        async_to_sync(ask)()
    async_to_sync(ask)()
    return str(caught.value)


def test_a_transaction_around_the_coroutine_is_refused(shop: None) -> None:
    assert "(database 'shop')" in in_transaction()
    assert "acquire it before the transaction begins, in the coroutine that calls" in in_transaction()


async def test_a_transaction_that_coroutines_leave_open_is_refused(shop: None) -> None:
    async with ThreadSensitiveContext():
        assert "(database 'shop')" in await sync_to_async(in_transaction)()
        atomic = transaction.atomic("shop")
        await sync_to_async(atomic.__enter__)()
        with pytest.raises(OutOfContextError, match=r"\(database 'shop'\)"):
            await ask()
        await sync_to_async(atomic.__exit__)(None, None, None)
        await ask()
        await sync_to_async(connections.close_all)()


async def test_a_thread_of_queries_that_runs_the_loop_itself_is_an_error_and_no_hang(
    shop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        asyncio.run(ask())

    with monkeypatch.context() as patched:
        patched.setattr("grelmicro_django.locks.BUSY_LIMIT", 0.1)
        async with ThreadSensitiveContext():
            with pytest.raises(OutOfContextError, match="was busy for 0.2 s"):
                await sync_to_async(run)()
    with suppress(asyncio.CancelledError):
        await ask()
