"""Expiry by observation: alone, and with what another process saw before it ended."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from grelmicro.backends.kubernetes.observation import CAPACITY, SKEW, Observations, is_newer
from grelmicro.backends.kubernetes.record import Record, record_of, written
from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
from tests.helpers.kubernetes import CART, CART_LEASE, Place, Process, ServerPlace, Shelf, process

PROOF = 30.0 * 1.01 + SKEW
"""Seconds on the server's clock after which a marked lease of 30 seconds has expired for sure."""


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def holder(shelf: Shelf) -> AsyncIterator[Process]:
    async with process(shelf) as one:
        yield one


def record(name: str = CART, holder: str = "a", *, renewed: float = 1.0, version: int = 1) -> Record:
    body = written(Lease(name, holder, 1, 0, 1.0, renewed), "o", "grelmicro", 30, None)
    body["metadata"] |= {"uid": "u", "resourceVersion": str(version)}
    return record_of(body)


async def looked_in(place: Place, *, passed: float = 0.0) -> tuple[Process, bool]:
    """A short-lived process that tries once, looks on for a while, and exits; whether it got the lease."""
    async with process(place) as one:
        lease = await one.table.acquire(CART, "cron", 30.0, None)
        await one.clock.advance(passed)
        await one.table.tidy()
        return one, lease.granted_to("cron")


async def let_pass(shelf: Shelf, seconds: float) -> None:
    shelf.now += seconds


# Alone


def test_it_counts_from_the_first_sight_of_a_change() -> None:
    clock = MovableClock(now=1_000.0)
    seen = Observations(clock)
    assert seen.see("o", record()).seen_at == 1_000.0
    clock._now = 1_010.0
    assert seen.see("o", record(version=2)).seen_at == 1_000.0
    assert seen.see("o", record(renewed=2.0, version=3)).seen_at == 1_010.0
    clock._now = 1_020.0
    assert seen.see("o", record(renewed=2.0, version=3)).seen_at == 1_010.0
    assert seen.see("o", record(renewed=1.0, version=4)).seen_at == 1_020.0


async def test_it_ends_when_time_has_passed_the_recorded_duration(shelf: Shelf) -> None:
    clock = MovableClock(now=1_000.0)
    sight = Observations(clock).see("o", record())
    assert sight.is_live(1_030.0)
    assert not sight.is_live(1_030.001)
    lease = sight.lease(CART, 1_030.0)
    assert lease is not None
    assert (lease.live, lease.expires_at) == (True, 1_030.0)


def test_what_was_seen_longest_ago_is_forgotten_first() -> None:
    clock = MovableClock()
    seen = Observations(clock)
    for number in range(CAPACITY + 100):
        seen.see(f"o{number}", record())
        seen.get("o0")
    assert len(seen.items()) == CAPACITY
    assert seen.get("o0") is not None
    assert seen.get("o1") is None
    assert seen.get(f"o{CAPACITY + 99}") is not None


async def test_what_this_process_holds_is_not_forgotten() -> None:
    clock = MovableClock()
    seen = Observations(clock)
    for number in range(CAPACITY + 500):
        seen.see(f"own{number}", record()).own = True
    for number in range(CAPACITY):
        seen.see(f"o{number}", record())
    assert all(seen.get(f"own{number}") for number in range(CAPACITY + 500))
    await clock.advance(30.001)
    for number in range(CAPACITY):
        seen.see(f"p{number}", record())
    assert len(seen.items()) == CAPACITY


def test_what_is_only_looked_at_displaces_nothing() -> None:
    seen = Observations(MovableClock())
    assert seen.see("o", record(), keep=False) is seen.get("o")
    for number in range(CAPACITY):
        seen.see(f"o{number}", record())
    assert seen.see("p", record(), keep=False).record is not None
    assert seen.get("p") is None
    assert seen.get("o0") is not None


@pytest.mark.parametrize(
    ("version", "other", "newer"), [("10", "9", True), ("9", "10", False), ("9", "9", False), ("b", "a", False)]
)
def test_versions_are_compared_as_numbers(version: str, other: str, newer: bool) -> None:
    one, another = record(), record()
    one.version, another.version = version, other
    assert is_newer(one, another) is newer


# What another process saw


async def test_a_process_that_tries_once_leaves_what_it_saw(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    before = shelf.found(CART_LEASE)
    _, granted = await looked_in(shelf)
    assert not granted
    after = shelf.found(CART_LEASE)
    assert after["spec"] == before["spec"]
    assert after["metadata"]["annotations"].pop("grelmicro.io/observed").endswith(" 1795000000")
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


async def test_processes_that_try_once_take_over_an_abandoned_lease_at_last(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    assert not (await looked_in(shelf))[1]
    for passed in (20.0, PROOF - 20.0):
        await let_pass(shelf, passed)
        assert not (await looked_in(shelf))[1]
    await let_pass(shelf, 1.0)
    assert (await looked_in(shelf))[1]
    assert await holder.table.renew(Lease(CART, "a", 0), 30.0, None) is None


async def test_a_mark_is_written_once_for_all(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    one, _ = await looked_in(shelf)
    assert one.calls == {"GET": 1, "PUT": 1}
    await let_pass(shelf, 5.0)
    one, _ = await looked_in(shelf)
    assert one.calls == {"GET": 1}


async def test_a_holder_that_renews_is_never_taken_over(holder: Process, shelf: Shelf) -> None:
    lease = await holder.table.acquire(CART, "a", 30.0, None)
    for _ in range(20):
        assert not (await looked_in(shelf))[1]
        await let_pass(shelf, 29.0)
        await holder.clock.advance(29.0)
        assert await holder.table.renew(lease, 30.0, None) is not None
    assert "grelmicro.io/observed" not in shelf.found(CART_LEASE)["metadata"]["annotations"]


async def test_a_holder_keeps_its_lease_when_a_mark_comes_between_its_renewals(holder: Process, shelf: Shelf) -> None:
    lease = await holder.table.acquire(CART, "a", 30.0, None)
    await looked_in(shelf)
    assert holder.calls.total()
    assert await holder.table.renew(lease, 30.0, None) is not None
    assert holder.calls == {"PUT": 2, "GET": 1}


async def test_a_renewal_by_another_program_that_keeps_the_mark_makes_it_void(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    await looked_in(shelf)
    await let_pass(shelf, PROOF - 1.0)
    shelf.edit(CART_LEASE, renewTime="2026-11-29T00:00:00.000000Z")
    await let_pass(shelf, 5.0)
    assert not (await looked_in(shelf))[1]


async def test_a_mark_of_a_future_time_proves_nothing(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    await looked_in(shelf)
    await let_pass(shelf, -1_000.0)
    _, granted = await looked_in(shelf, passed=10.0)
    assert not granted


@pytest.mark.parametrize("mark", ["", "x", "{digest}", "{digest} ", "{digest} x", "{digest} -5", "{digest} 1e3", "x 1"])
async def test_a_mark_that_is_none_proves_nothing(holder: Process, shelf: Shelf, mark: str) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    digest = record_of(shelf.found(CART_LEASE)).digest
    shelf.annotate(CART_LEASE, observed=mark.format(digest=digest))
    await let_pass(shelf, 100.0)
    assert not (await looked_in(shelf))[1]


async def test_a_mark_tells_of_the_record_as_it_is_now(holder: Process, shelf: Shelf) -> None:
    lease = await holder.table.acquire(CART, "a", 30.0, None)
    async with process(shelf) as one:
        await one.table.acquire(CART, "b", 30.0, None)
        await let_pass(shelf, 20.0)
        assert await holder.table.renew(lease, 30.0, None) is not None
        await one.table.acquire(CART, "b", 30.0, None)
        await let_pass(shelf, 5.0)
        await one.table.acquire(CART, "b", 30.0, None)
        await one.table.tidy()
    assert shelf.found(CART_LEASE)["metadata"]["annotations"]["grelmicro.io/observed"].endswith(" 1795000020")


async def test_what_the_watch_brought_is_marked_from_the_first_read_on(holder: Process, shelf: Shelf) -> None:
    lease = await holder.table.acquire(CART, "a", 30.0, None)
    async with process(shelf) as one:
        await one.table.acquire(CART, "b", 30.0, None)
        await let_pass(shelf, 20.0)
        assert await holder.table.renew(lease, 30.0, None) is not None
        one.table.learn(shelf.found(CART_LEASE))
        await one.table.tidy()
        assert "grelmicro.io/observed" not in shelf.found(CART_LEASE)["metadata"]["annotations"]
        await let_pass(shelf, 5.0)
        await one.table.acquire(CART, "b", 30.0, None)
        await one.table.tidy()
    assert shelf.found(CART_LEASE)["metadata"]["annotations"]["grelmicro.io/observed"].endswith(" 1795000025")


async def test_a_mark_shortens_the_wait_of_who_comes_later(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 100.0, None)
    await looked_in(shelf)
    await let_pass(shelf, 50.0 + SKEW)
    async with process(shelf) as one:
        lease = await one.table.acquire(CART, "b", 30.0, None)
        assert lease.remaining == pytest.approx(100.0 - 50.0 / 1.01)


async def test_who_got_the_lease_or_only_read_it_leaves_no_mark(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, None)
    assert holder.calls.total()
    await holder.table.tidy()
    assert holder.calls == {}
    async with process(shelf) as one:
        await one.table.read(CART)
        await one.table.tidy()
        assert one.calls == {"GET": 1}


async def test_what_this_process_holds_itself_is_not_marked(holder: Process) -> None:
    lease = await holder.table.acquire(CART, "a", 30.0, None)
    assert not (await holder.table.acquire(CART, "b", 30.0, None)).granted_to("b")
    await holder.table.renew(lease, 30.0, None)
    assert not (await holder.table.acquire(CART, "b", 30.0, None)).granted_to("b")
    assert holder.calls.total()
    await holder.table.tidy()
    assert holder.calls == {}


async def test_a_record_that_changed_since_is_not_marked(holder: Process, shelf: Shelf) -> None:
    lease = await holder.table.acquire(CART, "a", 30.0, None)
    async with process(shelf) as one:
        await one.table.acquire(CART, "b", 30.0, None)
        assert await holder.table.renew(lease, 30.0, None)
        before = shelf.found(CART_LEASE)
        await one.table.tidy()
    assert shelf.found(CART_LEASE) == before


# Closing


async def test_closing_vacates_only_what_was_seen_to_expire(holder: Process, shelf: Shelf) -> None:
    await holder.table.acquire(CART, "a", 30.0, {"k": "v"})
    await holder.table.acquire("lock:long", "a", 300.0, None)
    async with process(shelf) as one:
        await one.table.acquire(CART, "b", 30.0, None)
        await one.table.read("lock:long")
        await one.clock.advance(30.0)
        await one.table.tidy()
        assert (await holder.table.read(CART) or Lease("", "", 0)).holder == "a"
        await one.clock.advance(0.001)
        await one.table.tidy()
    record = await holder.table.read(CART)
    assert record is not None
    assert (record.holder, record.data) == ("", {"k": "v"})
    assert (await holder.table.read("lock:long") or Lease("", "", 0)).holder == "a"


async def test_closing_vacates_nothing_of_another_program(shelf: Shelf) -> None:
    shelf.put(CART_LEASE, {"spec": {"holderIdentity": "theirs", "leaseDurationSeconds": 15}})
    async with process(shelf) as one:
        await one.table.acquire(CART, "b", 30.0, None)
        await one.clock.advance(15.001)
        await one.table.tidy()
    assert shelf.found(CART_LEASE)["spec"]["holderIdentity"] == "theirs"


@pytest.mark.slow
async def test_on_a_real_server_processes_that_try_once_take_over(request: pytest.FixtureRequest) -> None:
    place = ServerPlace(request.getfixturevalue("kubernetes_namespace"))
    async with process(place) as gone:
        await gone.table.acquire(CART, "a", 1.0, None)
    tries = 0
    while not (await looked_in(place))[1]:
        tries += 1
        assert tries < 60
        await asyncio.sleep(0.5)
    assert tries >= 2 * SKEW


# Renewals in between


@pytest.mark.parametrize("every", [0.05, 0.33, 0.67, 0.9])
@pytest.mark.parametrize("looks", [3.0, 4.3, 7.7])
async def test_a_lease_that_is_renewed_is_never_seen_to_expire_however_rarely_one_looks(
    shelf: Shelf, holder: Process, every: float, looks: float
) -> None:
    lease = await holder.table.acquire(CART, "a", 2.0, None)
    async with process(shelf) as other:
        next_look = looks
        for number in range(1, round(60 / every)):
            for one in (holder, other):
                await one.clock.advance(every)
            shelf.now += every
            renewed = await holder.table.renew(lease, 2.0, None)
            assert renewed is not None
            lease = renewed[0]
            if number * every >= next_look:
                next_look += looks
                assert not (await other.table.acquire(CART, "b", 2.0, None)).granted_to("b")


async def test_who_tries_more_names_than_are_remembered_sees_them_expire(shelf: Shelf, holder: Process) -> None:
    names = [f"lock:{number}" for number in range(CAPACITY + 20)]
    for name in names:
        await holder.table.acquire(name, "a", 5.0, None)
    async with process(shelf) as other:
        for wanted in (0, len(names)):
            leases = [await other.table.acquire(name, "b", 5.0, None) for name in names]
            assert sum(lease.granted_to("b") for lease in leases) == wanted
            await other.clock.advance(6.0)


async def test_a_look_that_is_not_kept_costs_no_earlier_one(clock: MovableClock) -> None:
    seen = Observations(clock)
    seen.see("first", record())
    for number in range(CAPACITY + 10):
        seen.see(f"other:{number}", record(holder=""))
    await clock.advance(20.0)
    seen.see("first", record(), keep=False)
    await clock.advance(20.0)
    assert not seen.see("first", record()).is_live(clock.now())


async def test_what_is_renewed_meanwhile_was_not_seen_before(clock: MovableClock) -> None:
    seen = Observations(clock)
    seen.see("first", record(renewed=1.0))
    for number in range(CAPACITY + 10):
        seen.see(f"other:{number}", record(holder=""))
    await clock.advance(100.0)
    assert seen.see("first", record(renewed=2.0, version=2)).is_live(clock.now())


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()
