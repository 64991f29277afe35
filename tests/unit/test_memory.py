"""The memory store drops what is free for too long or too much, at the same cost however much there is."""

from collections import OrderedDict, UserDict
from collections.abc import Iterator

import pytest

from grelmicro.backends.memory import LOOK_INTERVAL, MORE_LOOKS, MemoryStore
from grelmicro.leases import Lease
from grelmicro.testing import MovableClock

CAPACITY = 10
LONG = 1_000_000.0


@pytest.fixture
def store(clock: MovableClock) -> MemoryStore:
    """One that keeps little."""
    return MemoryStore(clock=clock, capacity=CAPACITY, retention=3600.0)


async def names(store: MemoryStore, prefix: str = "") -> list[str]:
    return [lease.name async for lease in store.scan(prefix)]


async def take_and_end(store: MemoryStore, clock: MovableClock, name: str, way: str) -> Lease:
    """A lease that is over; its way says how it ended."""
    lease = await store.acquire(name, "holder", 60.0)
    if way == "released":
        assert await store.release(lease)
    elif way == "shortened":  # as task locks end
        assert await store.renew(lease, 1.0)
        await clock.advance(2.0)
    else:
        await clock.advance(61.0)
    return lease


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
async def test_no_more_free_records_are_kept_than_it_has_room_for(
    store: MemoryStore, clock: MovableClock, way: str
) -> None:
    for number in range(20 * CAPACITY):
        await take_and_end(store, clock, f"tasklock:report:{number}", way)
        assert len(await names(store)) <= CAPACITY + 3  # one or two may not have been looked at yet
    assert f"tasklock:report:{20 * CAPACITY - 1}" in await names(store)
    assert "tasklock:report:0" not in await names(store)


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
async def test_a_record_is_dropped_after_its_retention(store: MemoryStore, clock: MovableClock, way: str) -> None:
    await take_and_end(store, clock, "lock:old", way)
    for _ in range(3):  # a name that is known: nothing grows, but time goes on
        await take_and_end(store, clock, "lock:hot", "released")
        await clock.advance(3000.0)
    await take_and_end(store, clock, "lock:hot", "released")
    assert await names(store) == ["lock:hot"]


async def test_a_note_is_dropped_with_its_data(store: MemoryStore, clock: MovableClock) -> None:
    for name in ("break:lock:a", "tasklock:data"):
        await store.acquire(name, "a", 1.0, data={"k": "v"})
    await clock.advance(2.0)
    for _ in range(3):
        await take_and_end(store, clock, "lock:hot", "released")
        await clock.advance(3000.0)
    await take_and_end(store, clock, "lock:hot", "released")
    assert await names(store) == ["lock:hot", "tasklock:data"]


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
async def test_a_record_is_kept_for_its_retention(store: MemoryStore, clock: MovableClock, way: str) -> None:
    await take_and_end(store, clock, "lock:old", way)
    await clock.advance(3000.0)
    await take_and_end(store, clock, "lock:hot", "released")
    await clock.advance(500.0)
    await take_and_end(store, clock, "lock:hot", "released")
    assert await names(store) == ["lock:hot", "lock:old"]


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
async def test_what_is_live_is_not_dropped(store: MemoryStore, clock: MovableClock, way: str) -> None:
    held = [await store.acquire(f"lock:held:{number}", "holder", LONG) for number in range(5 * CAPACITY)]
    for number in range(20 * CAPACITY):
        await take_and_end(store, clock, f"lock:other:{number}", way)
    assert len(await names(store, "lock:held:")) == len(held)
    # Those that ended, and were not looked at yet, are hardly more than those that live.
    assert len(await names(store, "lock:other:")) <= CAPACITY + len(held) + 3
    for lease in held:
        assert await store.renew(lease, LONG)
        assert await store.release(lease)


async def test_what_was_released_does_not_keep_it_from_seeing_what_ended(clock: MovableClock) -> None:
    store = MemoryStore(clock=clock, capacity=100)
    for number in range(100):
        store.release_now(store.acquire_now(f"lock:{number}", "holder", LONG))
        await clock.advance(1.0)
    for number in range(300):
        await take_and_end(store, clock, f"tasklock:{number}", "shortened")
        assert len(await names(store)) <= 103


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
async def test_what_is_taken_again_is_not_dropped(store: MemoryStore, clock: MovableClock, way: str) -> None:
    """Also where it was seen to be free in between."""
    for number in range(5 * CAPACITY):
        await take_and_end(store, clock, "lock:cart", way)
        await take_and_end(store, clock, f"lock:before:{number}", way)
        lease = await store.acquire("lock:cart", "another", LONG)
        for other in range(2 * CAPACITY):
            await take_and_end(store, clock, f"lock:{number}:{other}", "released")
        assert await store.renew(lease, LONG)
        assert await store.release(lease)


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
async def test_the_fence_of_a_dropped_record_is_not_given_again(
    store: MemoryStore, clock: MovableClock, way: str
) -> None:
    highest = 0
    for _ in range(20):
        lease = await take_and_end(store, clock, "lock:cart", way)
        assert lease.fence > highest
        highest = lease.fence
    for number in range(3 * CAPACITY):
        await take_and_end(store, clock, f"lock:{number}", way)
    assert await store.read("lock:cart") is None
    assert await store.renew(lease, LONG) is None
    assert await store.release(lease) is False
    assert (await store.acquire("lock:cart", "another", LONG)).fence > highest


@pytest.mark.parametrize("way", ["released", "shortened", "expired"])
@pytest.mark.parametrize(("name", "data"), [("leader:main", None), ("schedule:job", None), ("lock:cart", {"by": "me"})])
async def test_elections_schedules_and_what_has_data_stay(
    store: MemoryStore, clock: MovableClock, name: str, data: dict[str, str] | None, way: str
) -> None:
    await store.acquire(name, "holder", 60.0, data=data)
    lease = await take_and_end(store, clock, name, way)
    for number in range(5 * CAPACITY):
        await take_and_end(store, clock, f"lock:{number}", way)
    await clock.advance(LONG)
    await take_and_end(store, clock, "lock:other", way)
    record = await store.read(name)
    assert record is not None
    assert (record.live, record.fence, dict(record.data)) == (False, lease.fence, data or {})
    again = await store.acquire(name, "holder", LONG)
    assert again.fence > lease.fence
    # Whoever takes again what it let expire is no other holder than before.
    assert again.transitions == lease.transitions + (way == "released")
    assert await store.renew(again, LONG)


class Counted(UserDict[str, object]):
    """Counts the names that are looked at."""

    def __init__(self) -> None:
        self.looks = 0
        super().__init__()
        self.data: OrderedDict[str, object] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        for name in self.data:
            self.looks += 1
            yield name

    def move_to_end(self, name: str) -> None:
        """See `OrderedDict`."""
        self.data.move_to_end(name)


@pytest.mark.parametrize("way", ["released", "left"])
async def test_a_name_costs_the_same_however_many_there_are(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Neither does anything look at each name, nor does a dict at each place from which one was removed."""
    clock = MovableClock()
    store = MemoryStore(clock=clock, capacity=1000)
    assert all(type(kept) is OrderedDict for kept in (store._free, store._granted))
    counted = Counted(), Counted()
    monkeypatch.setattr(store, "_free", counted[0])
    monkeypatch.setattr(store, "_granted", counted[1])
    clock._now += 2 * LOOK_INTERVAL
    for number in range(3000):
        before = sum(each.looks for each in counted)
        lease = store.acquire_now(f"lock:{number}", "holder", LONG)
        if way == "released":
            store.release_now(lease)
        looks = sum(each.looks for each in counted) - before
        assert looks <= (MORE_LOOKS + 2 if number == 0 else 6)


async def test_records_that_stay_cost_one_look_only(monkeypatch: pytest.MonkeyPatch, clock: MovableClock) -> None:
    store = MemoryStore(clock=clock, capacity=CAPACITY)
    for number in range(10 * CAPACITY):
        store.release_now(store.acquire_now(f"leader:{number}", "holder", 60.0))
    for number in range(10 * CAPACITY):
        store.release_now(store.acquire_now(f"lock:{number}", "holder", 60.0))
    free = Counted()
    free.update(store._free)
    monkeypatch.setattr(store, "_free", free)
    free.looks = 0
    store.release_now(store.acquire_now("lock:cart", "holder", 60.0))
    assert free.looks <= 3
    assert len(await names(store, "leader:")) == 10 * CAPACITY
    assert len(await names(store, "lock:")) <= CAPACITY


async def test_a_quiet_process_looks_at_more_from_time_to_time(store: MemoryStore, clock: MovableClock) -> None:
    """Many that ended by themselves at once, and no new name since."""
    for number in range(MORE_LOOKS):
        await store.acquire(f"tasklock:{number}", "holder", 60.0)
    await take_and_end(store, clock, "lock:hot", "expired")
    assert len(await names(store)) > MORE_LOOKS
    for _ in range(3):
        await clock.advance(LOOK_INTERVAL)
        await take_and_end(store, clock, "lock:hot", "released")
    assert len(await names(store)) <= CAPACITY + 1


async def test_closing_vacates_what_expired(store: MemoryStore, clock: MovableClock) -> None:
    await take_and_end(store, clock, "leader:main", "expired")
    await take_and_end(store, clock, "lock:cart", "released")
    held = await store.acquire("lock:held", "holder", LONG)
    await store.close()
    assert {lease.name: lease.holder async for lease in store.scan()} == {
        "leader:main": "",
        "lock:cart": "",
        "lock:held": "holder",
    }
    assert await store.renew(held, LONG)
    assert (await store.acquire("leader:main", "holder", LONG)).transitions == 1
