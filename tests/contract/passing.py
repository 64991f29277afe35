"""What a store of leases has to do that passes them on, besides the contract of all stores."""

import asyncio

import pytest

from grelmicro.leases import Lease, LeaseStore, PassingLeases
from grelmicro.testing import LeaseStoreContract


class PassingContract(LeaseStoreContract):
    """The rules of `PassingLeases`, one fact a test."""

    async def test_what_is_passed_on_is_a_new_grant(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", 5.0, data={"kept": "yes"})
        passed = await pass_on(store, held, "b", 30.0)
        assert passed is not None
        assert passed.granted_to("b")
        assert (passed.fence, passed.transitions) == (held.fence + 1, held.transitions + 1)
        assert 29.0 < passed.remaining <= 30.001
        assert passed.data == {"kept": "yes"}
        record = await store.read(name)
        assert record is not None
        assert (record.holder, record.fence) == ("b", passed.fence)

    async def test_who_passed_it_on_has_it_no_more(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", 30.0)
        passed = await pass_on(store, held, "b", 30.0)
        assert passed is not None
        assert await store.renew(held, 30.0) is None
        assert not await store.release(held)
        assert await store.release(passed)

    async def test_only_what_is_held_is_passed_on(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", 30.0)
        for wrong in (Lease(name, "z", held.fence), Lease(name, "a", held.fence + 1), Lease(name, "", held.fence)):
            assert await pass_on(store, wrong, "b", 30.0) is None
        record = await store.read(name)
        assert record is not None
        assert record.granted_to("a")
        assert await store.release(held)
        assert await pass_on(store, held, "b", 30.0) is None
        record = await store.read(name)
        assert record is not None
        assert (record.holder, record.fence) == ("", held.fence)

    async def test_what_has_expired_is_not_passed_on(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", max(0.3, store.resolution))
        await self.let_pass(store, held.remaining * 1.05 + 0.1)
        assert await pass_on(store, held, "b", 30.0) is None

    async def test_it_is_passed_on_once(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", 30.0)
        answers = await asyncio.gather(*(pass_on(store, held, holder, 30.0) for holder in ("b", "c", "d")))
        assert len([answer for answer in answers if answer is not None]) == 1

    async def test_who_waits_can_be_woken(self, store: LeaseStore, name: str) -> None:
        async with store.watch(name) as waiter:
            for _ in range(2):
                waiting = asyncio.ensure_future(waiter.wait(3600.0))
                await asyncio.sleep(0)
                waiter.wake()
                await asyncio.wait_for(waiting, 10.0)

    async def test_who_waits_elsewhere_is_not_forgotten(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        if other is None:
            pytest.skip("there is no second process")
        held = await store.acquire(name, "a", 30.0)
        async with other.watch(name) as waiter:
            assert not (await other.acquire(name, "c", 30.0, waiting=True)).granted_to("c")
            passed = await pass_on(store, held, "b", 30.0)
            assert passed is not None
            assert await store.release(passed)
            assert await waiter.wait(10.0)


async def pass_on(store: LeaseStore, lease: Lease, holder: str, ttl: float) -> Lease | None:
    """Pass a lease on."""
    assert isinstance(store, PassingLeases)
    return await store.pass_on(lease, holder, ttl)
