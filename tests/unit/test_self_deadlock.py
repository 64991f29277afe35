"""What waits for a lock that it holds itself, through another `Lock` object, learns of it at once."""

import asyncio
import logging

import pytest

from grelmicro.coordination import Lock, LockReentrantError, LockTimeoutError, MultiLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.worlds import World, eventually

LONG = 3600.0


def lock(client: LockAdapter, *, auto_renew: bool = False) -> Lock:
    return Lock("cart", backend=client, lease_duration=LONG, auto_renew=auto_renew)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("max_hold", [None, LONG])
async def test_a_wait_that_would_never_end_is_refused(world: World, max_hold: float | None) -> None:
    """Also with a `max_hold`, at whose end the loss would cancel the wait together with the block around it."""
    async with world.client() as client:
        outer = Lock("cart", backend=client, lease_duration=LONG, auto_renew=True, max_hold=max_hold)
        async with outer as held, asyncio.timeout(10):
            for inner in (lock(client), MultiLock(lock(client), Lock("a", backend=client))):
                with pytest.raises(
                    LockReentrantError, match="lock 'cart' is held by this task, .* would never end"
                ) as caught:
                    await inner.acquire()
                assert caught.value.name == "cart"
            assert held.valid
        async with lock(client), Lock("a", backend=client):
            pass


async def test_so_is_one_behind_others(world: World) -> None:
    """Which wait for the same lock, so that the store is not asked."""
    async with world.client() as client:
        async with lock(client, auto_renew=True):
            other = asyncio.create_task(lock(client).acquire())
            await eventually(lambda: "lock:cart" in client.queues.lines, "another one waits")
            with pytest.raises(LockReentrantError):
                async with asyncio.timeout(10):
                    await lock(client).acquire()
        await (await asyncio.wait_for(other, 10)).release()


async def test_so_is_that_of_a_thread(world: World) -> None:
    def work() -> None:
        inner = lock(client).from_thread
        with lock(client, auto_renew=True).from_thread, pytest.raises(LockReentrantError, match="would never end"):
            inner.acquire()

    async with world.client() as client:
        async with asyncio.timeout(10):
            await asyncio.to_thread(work)


@pytest.mark.parametrize("auto_renew", [False, True], ids=["plain", "renewed"])
async def test_a_wait_that_ends_is_warned_of(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture, auto_renew: bool
) -> None:
    """By its timeout, or with a lease that nothing renews."""

    async def work() -> None:
        async with lock(client, auto_renew=auto_renew):
            await lock(client).acquire(timeout=5)

    async with world.client() as client:
        task = asyncio.create_task(work())
        await eventually(lambda: warnings(caplog), "a warning")
        assert warnings(caplog) == [
            "lock 'cart' is waited for by the task, thread or request that holds it, through another Lock object: it "
            "is not released meanwhile"
        ]
        await eventually(lambda: client.queues.lines["lock:cart"].offer, "it sleeps")
        await clock.advance(6)
        with pytest.raises(LockTimeoutError):
            await asyncio.wait_for(task, 10)


async def test_other_waits_are_none_of_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """That of another task; one for another lock; and one after a release, or a loss."""
    async with world.client() as client:
        async with lock(client, auto_renew=True) as held:
            other = asyncio.create_task(lock(client).acquire())
            await eventually(lambda: "lock:cart" in client.queues.lines, "another one waits")
            async with Lock("order", backend=client):
                pass
            await held.release()
            theirs = await asyncio.wait_for(other, 10)
            mine = asyncio.create_task(lock(client).acquire())
            await asyncio.sleep(0.02)
            assert not mine.done()
            await theirs.release()
            await (await asyncio.wait_for(mine, 10)).release()
        assert warnings(caplog) == []
