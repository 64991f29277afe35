"""How long something surely stays busy: what is left of a task lock's minimum hold, and nothing is promised else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Lock, TaskLock, WouldBlockError
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing import MovableClock
from tests.helpers.worlds import World


class Workers:
    """Two workers that share a task lock, and a clock that the test moves."""

    def __init__(self, backend: LockAdapter, clock: MovableClock, settings: dict[str, Any]) -> None:
        self.clock = clock
        self.first, self.second = (TaskLock("report", backend=backend, **settings) for _ in range(2))

    async def told(self) -> float | None:
        """What the second is told."""
        return (await refusal(self.second)).busy_for


@asynccontextmanager
async def workers(**settings: Any) -> AsyncIterator[Workers]:
    clock = MovableClock()
    async with LockAdapter(MemoryStore(clock=clock)) as backend:
        yield Workers(backend, clock, settings)


async def refusal(lock: TaskLock) -> WouldBlockError:
    with pytest.raises(WouldBlockError) as refused:
        await lock.__aenter__()
    return refused.value


async def test_what_is_left_of_the_minimum_hold_is_told_while_the_work_runs_and_after() -> None:
    async with workers(min_hold_duration=300, lease_duration=3600) as shop:
        async with shop.first:
            assert await shop.told() == pytest.approx(300)
            await shop.clock.advance(100)
            assert await shop.told() == pytest.approx(200)
        assert await shop.told() == pytest.approx(200)
        await shop.clock.advance(150)
        assert await shop.told() == pytest.approx(50)
        await shop.clock.advance(50.5)
        async with shop.second:
            pass


async def test_nothing_is_left_when_the_work_takes_longer() -> None:
    async with workers(min_hold_duration=10, lease_duration=60) as shop, shop.first:
        await shop.clock.advance(30)
        assert await shop.told() == 0


async def test_a_refreshed_lease_promises_no_more_than_the_minimum_hold() -> None:
    async with workers(min_hold_duration=20, lease_duration=60) as shop, shop.first:
        await shop.clock.advance(15)
        await shop.first.refresh()
        assert await shop.told() == pytest.approx(5)
        await shop.clock.advance(3)
        assert await shop.told() == pytest.approx(2)
        await shop.clock.advance(7)
        await shop.first.refresh()
        assert await shop.told() == 0


async def test_other_settings_elsewhere_promise_no_more_than_the_lease() -> None:
    async with workers(min_hold_duration=5, lease_duration=6) as shop:
        longer = TaskLock("report", backend=shop.first.backend, min_hold_duration=500, lease_duration=600)
        async with shop.first:
            pass
        assert (await refusal(longer)).busy_for == pytest.approx(5)


async def test_nobody_knows_how_long_a_lock_is_held() -> None:
    async with LockAdapter(MemoryStore()) as backend, Lock("cart", backend=backend):
        with pytest.raises(WouldBlockError) as refused:
            await Lock("cart", backend=backend).acquire_nowait()
    assert refused.value.busy_for is None


async def test_every_store_tells_the_same(real_world: World) -> None:
    settings: dict[str, Any] = {"min_hold_duration": 100, "lease_duration": 1000}
    async with real_world.client() as first, real_world.client() as second:
        lock, other = TaskLock("report", backend=first, **settings), TaskLock("report", backend=second, **settings)
        async with lock:
            while_it_ran = (await refusal(other)).busy_for
            await asyncio.sleep(0.05)
        after = (await refusal(other)).busy_for
    assert while_it_ran is not None
    assert after is not None
    assert 90 < after < while_it_ran <= 100
