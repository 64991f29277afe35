"""The remedy that is told for a loss is one that helps."""

from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockLostError, LockNotOwnedError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.testing import MovableClock

LONGER_HOLD = "stop the guarded work, and make it shorter or use a longer max_hold"
LONGER_LEASE = "stop the guarded work, and use a longer lease_duration or auto_renew=True if it needs more time"
RENEWAL = "and look in the log for what kept it from being renewed: a blocked event loop, or the store"


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def micro(clock: MovableClock) -> Grelmicro:
    return Grelmicro(uses=[Coordination(MemoryProvider(clock=clock))])


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"lease_duration": 9, "auto_renew": True, "max_hold": 20}, LONGER_HOLD),
        ({"lease_duration": 60, "max_hold": 5}, LONGER_HOLD),
        ({"lease_duration": 5, "max_hold": 5}, LONGER_HOLD),
        ({"lease_duration": 5, "max_hold": 60}, LONGER_LEASE),
        ({"lease_duration": 5}, LONGER_LEASE),
    ],
    ids=["renewed", "shortened", "equal", "lease", "unlimited"],
)
async def test_what_ended_it_decides(
    settings: dict[str, Any], remedy: str, micro: Grelmicro, clock: MovableClock
) -> None:
    async with micro:
        handle = await Lock("cart", **settings).acquire()
        while handle.valid:
            await clock.advance(0.5)
        for later in (0, 100):
            await clock.advance(later)
            with pytest.raises(LockLostError) as lost:
                handle.raise_if_lost()
            assert str(lost.value).endswith(remedy)


async def test_what_is_renewed_needs_no_other_setting(micro: Grelmicro, clock: MovableClock) -> None:
    async with micro:
        handle = await Lock("cart", lease_duration=9, auto_renew=True).acquire()
        await micro.coordination.lock_backend.release(handle.lease)
        while handle.valid:
            await clock.advance(0.5)
        with pytest.raises(LockLostError) as lost:
            handle.raise_if_lost()
        assert str(lost.value).endswith(RENEWAL)


async def test_a_hold_that_was_extended_to_its_limit(micro: Grelmicro, clock: MovableClock) -> None:
    async with micro:
        handle = await Lock("cart", lease_duration=9, max_hold=20).acquire()
        for _ in range(3):
            await clock.advance(6)
            await handle.extend()
        await clock.advance(6)
        with pytest.raises(LockNotOwnedError) as lost:
            await handle.release()
        assert str(lost.value).endswith(LONGER_HOLD)


async def test_what_was_taken_away_before_its_limit(micro: Grelmicro, clock: MovableClock) -> None:
    async with micro:
        handle = await Lock("cart", lease_duration=9, max_hold=9).acquire()
        await micro.coordination.lock_backend.release(handle.lease)
        with pytest.raises(LockNotOwnedError) as lost:
            await handle.release()
        assert str(lost.value).endswith(LONGER_LEASE)
