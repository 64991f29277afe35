"""Leases are renewed together, and none of them depends on how long another one can wait for an answer."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from grelmicro.coordination import BackendUnavailableError, Lock, LockHandle
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.leases import Lease, LeaseStore
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import TroubledStore, silence
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
        await pass_by(clock, client, 19, step=1.0)
        assert short.valid
        await pass_by(clock, client, 30)
        assert long.valid
        assert short.valid
        await long.release()
        await short.release()


class OneFails(TroubledStore):
    """A store with a request for each lease, where the one for a certain lease always fails."""

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        return await LeaseStore.renew_many(self, renewals)

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        if lease.name == "lock:bad":
            raise BackendUnavailableError("this one cannot be written")
        return await super().renew(lease, ttl, data=data)


async def test_a_lease_that_cannot_be_renewed_costs_no_other_one(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = OneFails(world.store())
    async with LockAdapter(store) as client:
        names = ("first", "bad", "last")
        first, bad, last = [
            await Lock(name, backend=client, lease_duration=6, auto_renew=True).acquire() for name in names
        ]
        await pass_by(clock, client, 4)
        assert bad.valid  # until its own deadline
        await pass_by(clock, client, 26)
        assert first.valid
        assert last.valid
        assert bad.lost
        assert "(renewing leases) has trouble since 0.0 s: this one cannot be written" in caplog.text
        await first.release()
        await last.release()


async def test_a_lease_that_is_gone_is_lost_though_another_renewal_fails(world: World, clock: MovableClock) -> None:
    store = OneFails(world.store())
    async with LockAdapter(store) as client:
        names = ("kept", "bad", "gone")
        kept, bad, gone = [
            await Lock(name, backend=client, lease_duration=6, auto_renew=True).acquire() for name in names
        ]
        assert await store.inner.release(gone.lease)  # by an operator
        await pass_by(clock, client, 3)
        assert gone.lost
        assert bad.valid
        assert kept.valid
        await kept.release()
        await bad.release()
