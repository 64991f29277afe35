"""What a process has seen of fences, and what becomes of a grant that repeats one."""

from collections.abc import Mapping

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError
from grelmicro.leases import Lease, LeaseStore
from grelmicro.leases.fences import MAX_FENCES, Fences
from grelmicro.leases.rules import owns
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import TroubledStore, refused, reply_lost
from tests.helpers.worlds import eventually

pytestmark = pytest.mark.usefixtures("nothing_left")

LONG = 3600.0


def held(name: str, holder: str, fence: int) -> Lease:
    return Lease(name, holder, fence, expires_at=30.0)


def test_only_a_grant_that_repeats_a_fence_is_wrong() -> None:
    fences = Fences()
    assert fences.see("here", held("a", "x", 5), "x") == 0
    assert fences.see("here", held("a", "x", 5), "x") == 0, "its own lease was extended"
    assert fences.see("here", held("a", "y", 5), "y") == 6
    assert fences.see("here", held("a", "y", 4), "y") == 6
    assert fences.see("here", held("a", "x", 4), "x") == 6
    assert fences.see("here", held("a", "y", 4), "z") == 0, "a refusal"
    assert fences.see("here", held("a", "", 4)) == 0, "a record that is read"
    assert fences.see("here", held("b", "y", 4), "y") == 0, "another name"
    assert fences.see("there", held("a", "y", 4), "y") == 0, "another store"
    assert fences.see("here", held("a", "w", 9), "z") == 0
    assert fences.see("here", held("a", "z", 9), "z") == 10, "a refusal shows a fence as well"
    assert fences.see("here", held("a", "z", 10), "z") == 0


def test_names_that_were_used_longest_ago_are_forgotten() -> None:
    fences = Fences()
    for number in range(MAX_FENCES):
        fences.see("here", held(str(number), "x", 5), "x")
    fences.see("here", held("0", "", 5))
    fences.see("here", held("another", "x", 5), "x")
    assert fences.see("here", held("0", "y", 5), "y") == 6
    assert fences.see("here", held("1", "y", 5), "y") == 0
    assert len(fences._seen) == MAX_FENCES


class Restored(TroubledStore):
    """A store whose records can be replaced by a copy, and that cannot raise a fence."""

    def copy(self) -> Mapping[str, Lease]:
        assert isinstance(self.inner, MemoryStore)
        return dict(self.inner._records)

    def put_back(self, copy: Mapping[str, Lease]) -> None:
        assert isinstance(self.inner, MemoryStore)
        self.inner._records.clear()
        self.inner._records.update(copy)
        self.inner._free.clear()
        self.inner._free.update(dict.fromkeys(copy, 0.0))


class Raising(Restored):
    """One that can."""

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        async def apply() -> Lease | None:
            assert isinstance(self.inner, MemoryStore)
            record = self.inner._record(lease.name)
            if record is None or not owns(record, lease, self.clock.now()):
                return None
            record.fence = max(record.fence, least)
            return record

        return await self._send("raise_fence", apply)


async def seen_twice(backend: LockAdapter, store: Restored) -> int:
    """Have an old copy put back; the highest fence that was handed out."""
    await backend.release(await backend.acquire("lock:a", "a", LONG))
    copy = store.copy()
    lease = await backend.acquire("lock:a", "b", LONG)
    await backend.release(lease)
    store.put_back(copy)
    return lease.fence


async def test_a_store_that_cannot_raise_a_fence_is_refused_and_the_lease_given_back(clock: MovableClock) -> None:
    store = Restored(MemoryStore(clock=clock))
    async with LockAdapter(store) as backend:
        last = await seen_twice(backend, store)
        with pytest.raises(BackendUnavailableError, match="fence .* was seen before: its records were replaced"):
            await backend.acquire("lock:a", "c", LONG)
        await eventually(lambda: not backend._background, "it is given back")
        assert (await backend.acquire("lock:a", "d", LONG)).fence > last, "once it has grown above"


@pytest.mark.parametrize("fault", [refused, reply_lost])
async def test_a_lease_whose_fence_is_not_raised_is_given_back(clock: MovableClock, fault: object) -> None:
    store = Raising(MemoryStore(clock=clock))
    async with LockAdapter(store) as backend:
        last = await seen_twice(backend, store)
        store.suffer("raise_fence", refused if fault is refused else reply_lost)
        with pytest.raises(BackendUnavailableError if fault is refused else OutcomeUnknownError):
            await backend.acquire("lock:a", "c", LONG)
        await eventually(lambda: not backend._background, "it is given back")
        again = await backend.acquire("lock:a", "d", LONG)
        assert again.granted_to("d")
        assert again.fence > last
        assert store.calls["raise_fence"] <= 2


async def test_a_lease_that_ends_before_its_fence_is_raised_is_taken_again(clock: MovableClock) -> None:
    store = Raising(MemoryStore(clock=clock))
    async with LockAdapter(store) as backend:
        last = await seen_twice(backend, store)

        async def too_late(apply: object) -> object:
            assert isinstance(store.inner, MemoryStore)
            await store.inner.release(Lease("lock:a", "c", 0))
            return None

        store.suffer("raise_fence", too_late)
        lease = await backend.acquire("lock:a", "c", LONG)
        assert lease.granted_to("c")
        assert lease.fence > last


async def test_what_another_process_had_is_seen_in_refusals_and_reads(clock: MovableClock) -> None:
    for look in ("acquire", "read"):
        store = Raising(MemoryStore(clock=clock))
        inner: LeaseStore = store.inner
        async with LockAdapter(store) as backend:
            await backend.release(await backend.acquire("lock:a", "a", LONG))
            copy = store.copy()
            theirs = await inner.acquire("lock:a", "b", LONG)
            if look == "read":
                await backend.read("lock:a")
            else:
                assert not (await backend.acquire("lock:a", "c", LONG)).granted_to("c")
            await inner.release(theirs)
            store.put_back(copy)
            assert (await backend.acquire("lock:a", "d", LONG)).fence > theirs.fence
