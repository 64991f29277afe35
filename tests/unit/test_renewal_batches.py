"""Leases are renewed together, and none of them depends on how long another one can wait for an answer."""

import asyncio

from grelmicro.coordination import Lock, LockHandle
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import silence
from tests.helpers.timeline import takes
from tests.helpers.worlds import World, pass_by


async def hold_one_after_another(clock: MovableClock, client: LockAdapter, seconds: int) -> None:
    """Let time pass in which leases of three seconds are held at each moment."""
    short: list[LockHandle] = []
    for number in range(seconds):
        lock = Lock(f"short:{number}", backend=client, lease_duration=3, auto_renew=True)
        short.append(await lock.acquire())
        for _ in range(2):
            await clock.advance(0.5)
            await asyncio.sleep(0.003)
        if len(short) > 3 and (oldest := short.pop(0)).valid:
            await oldest.release()


async def test_a_long_lease_has_the_time_for_a_slow_answer_that_short_ones_have_not(
    world: World, clock: MovableClock
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        long = await Lock("long", backend=client, lease_duration=60, auto_renew=True).acquire()
        store.break_down(takes(clock, reply=2), "renew_many")
        await hold_one_after_another(clock, client, 100)
        assert long.valid
        store.heal()
        await long.release()


async def test_short_leases_are_renewed_while_a_long_one_waits_for_its_answer(
    world: World, clock: MovableClock
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        long = await Lock("long", backend=client, lease_duration=60, auto_renew=True).acquire()
        await clock.advance(19)
        short = await Lock("short", backend=client, lease_duration=4, auto_renew=True).acquire()
        store.suffer("renew_many", silence)
        await clock.advance(1.01)  # the long one is due, the short one not yet
        assert store.calls["renew_many"] == 1
        await pass_by(clock, client, 19)
        assert short.valid
        await pass_by(clock, client, 30)
        assert long.valid
        assert short.valid
        await long.release()
        await short.release()
