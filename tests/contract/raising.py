"""What a store of leases has to do that can raise the fence of one, besides the contract of all stores."""

from grelmicro.leases import Lease, LeaseStore, RaisingLeases
from grelmicro.testing import LeaseStoreContract


class RaisingContract(LeaseStoreContract):
    """The rules of `RaisingLeases`, one fact a test."""

    async def test_a_raised_fence_is_that_of_the_same_lease(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", 30.0, data={"kept": "yes"})
        raised = await raise_fence(store, held, held.fence + 1000)
        assert raised is not None
        assert raised.granted_to("a")
        assert (raised.fence, raised.transitions, raised.data) == (held.fence + 1000, held.transitions, {"kept": "yes"})
        assert 25.0 < raised.remaining <= 30.001
        assert await store.renew(held, 30.0) is None, "it has another fence now"
        renewed = await store.renew(raised, 30.0)
        assert renewed is not None
        assert renewed.fence == raised.fence
        assert await store.release(renewed)
        assert (await store.acquire(name, "b", 30.0)).fence == raised.fence + 1

    async def test_a_fence_is_not_lowered(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", 30.0)
        raised = await raise_fence(store, held, 1)
        assert raised is not None
        assert raised.fence == held.fence
        assert await store.release(held)

    async def test_only_the_fence_of_what_is_held_is_raised(self, store: LeaseStore, name: str) -> None:
        assert await raise_fence(store, Lease(name, "a", 7), 1000) is None
        held = await store.acquire(name, "a", 30.0)
        for wrong in (Lease(name, "z", held.fence), Lease(name, "a", held.fence + 1)):
            assert await raise_fence(store, wrong, held.fence + 1000) is None
        assert await store.release(held)
        assert await raise_fence(store, held, held.fence + 1000) is None
        record = await store.read(name)
        assert record is not None
        assert (record.holder, record.fence) == ("", held.fence)

    async def test_the_fence_of_what_has_expired_is_not_raised(self, store: LeaseStore, name: str) -> None:
        held = await store.acquire(name, "a", max(0.3, store.resolution))
        await self.let_pass(store, held.remaining * 1.05 + 0.1)
        assert await raise_fence(store, held, held.fence + 1000) is None


async def raise_fence(store: LeaseStore, lease: Lease, least: int) -> Lease | None:
    """What the store answers."""
    assert isinstance(store, RaisingLeases)
    return await store.raise_fence(lease, least)
