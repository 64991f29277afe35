"""What every store of leases has to do, as tests: subclass `LeaseStoreContract` and give it a store.

    class TestMyStore(LeaseStoreContract):
        @pytest.fixture
        async def store(self) -> AsyncIterator[MyStore]:
            async with MyStore(...) as store:
                yield store

        async def let_pass(self, store: LeaseStore, seconds: float) -> None:
            await asyncio.sleep(seconds)  # or move the store's clock

The tests are coroutines: with pytest-asyncio, use its mode `auto`. Each uses names of its own, so the store need not be
empty.
"""

import asyncio
from contextlib import suppress
from secrets import token_hex
from typing import Any, ClassVar

from grelmicro.errors import DependencyNotFoundError
from grelmicro.leases import Lease, LeaseStore, Waiter

try:
    import pytest
except ImportError as error:
    raise DependencyNotFoundError(
        'the contract of stores runs under pytest: install it with pip install "grelmicro-suite[testing]"'
    ) from error

NAMES = (
    "plain",
    "Plain",
    "with space",
    " leading and trailing ",
    "percent%",
    "percent%25",
    "under_score",
    "underXscore",
    "star*",
    "brackets[a-z]",
    "quotes'\"`",
    "back\\slash",
    "slash/../slash",
    "colon:colon",
    "{braces}",
    "#hash?query&x=1",
    "\u00e9",
    "e\u0301",  # the same to the eye
    "日本語",
    "🔒",
    "x" * 240,
    "🔒" * 240,
)
"""Endings of names that are easily taken for each other, or for something else than a name."""

PATIENCE = 10.0
"""Real seconds after which something that should end counts as hanging."""


class LeaseStoreContract:
    """The rules of `LeaseStore`, one fact a test."""

    pytestmark = pytest.mark.asyncio

    exact: ClassVar[bool] = False
    """Whether `let_pass` lets exactly that time pass, to the last digit: on a clock that is moved."""

    @pytest.fixture
    def store(self) -> Any:
        """The store, open. Override it."""
        raise NotImplementedError

    @pytest.fixture
    def other(self, store: LeaseStore) -> LeaseStore | None:
        """Another open store on the same data, as a second process has it; None where there can be none."""
        return None

    async def let_pass(self, store: Any, seconds: float) -> None:
        """Let `seconds` pass on the clock by which the store judges leases. Override it."""
        raise NotImplementedError

    @pytest.fixture
    def name(self) -> str:
        """A name that no other test uses."""
        return f"contract:{token_hex(6)}"

    # Taking

    async def test_a_free_lease_is_granted(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 30.0)
        assert lease.granted_to("a")
        assert (lease.name, lease.holder, lease.live) == (name, "a", True)
        assert lease.fence > 0
        assert 29.0 < lease.remaining <= 30.001

    async def test_a_held_lease_is_refused_with_the_time_it_has_left(self, store: LeaseStore, name: str) -> None:
        granted = await store.acquire(name, "a", 30.0)
        refused = await store.acquire(name, "b", 90.0)
        assert not refused.granted_to("b")
        assert refused.granted_to("a")
        assert refused.fence == granted.fence
        assert 25.0 < refused.remaining <= 30.001

    async def test_a_refusal_changes_nothing(self, store: LeaseStore, name: str) -> None:
        await store.acquire(name, "a", 30.0, data={"of": "a"})
        before = await found(store, name)
        await store.acquire(name, "b", 90.0, data={"of": "b"})
        await store.acquire(name, "b", 90.0, data={"of": "b"}, waiting=True)
        after = await found(store, name)
        assert facts(after) == facts(before)
        assert after.remaining <= 30.001

    async def test_ones_own_lease_is_extended_under_the_same_fence(self, store: LeaseStore, name: str) -> None:
        first = await store.acquire(name, "a", 30.0)
        again = await store.acquire(name, "a", 60.0)
        assert again.granted_to("a")
        assert (again.fence, again.transitions) == (first.fence, first.transitions)
        assert 55.0 < again.remaining <= 60.001

    async def test_a_lease_lasts_and_then_ends_by_itself(self, store: LeaseStore, name: str) -> None:
        ttl = short(store)
        await store.acquire(name, "a", ttl)
        assert not (await store.acquire(name, "b", 30.0)).granted_to("b")
        await self.let_pass(store, ttl * 1.5)
        assert not (await found(store, name)).live
        assert (await store.acquire(name, "b", 30.0)).granted_to("b")

    async def test_a_lease_is_live_at_the_very_instant_of_its_end(self, store: LeaseStore, name: str) -> None:
        if not self.exact:
            pytest.skip("needs a clock that is moved")
        lease = await store.acquire(name, "a", 1.0)
        await self.let_pass(store, 1.0)
        assert await store.renew(lease, 2.0) is not None
        await self.let_pass(store, 2.0)
        assert (await found(store, name)).live
        assert not (await store.acquire(name, "b", 2.0)).granted_to("b")
        await self.let_pass(store, 0.001)
        assert not (await found(store, name)).live
        lease = await store.acquire(name, "b", 2.0)
        assert lease.granted_to("b")
        await self.let_pass(store, 2.0)
        assert await store.release(lease) is True

    async def test_only_one_of_many_gets_it(self, store: LeaseStore, name: str) -> None:
        answers = await asyncio.gather(*(store.acquire(name, f"h{number}", 30.0) for number in range(32)))
        granted = [answer for number, answer in enumerate(answers) if answer.granted_to(f"h{number}")]
        assert len(granted) == 1
        assert {answer.holder for answer in answers} == {granted[0].holder}

    async def test_a_lease_is_kept_as_long_as_was_asked(self, store: LeaseStore, name: str) -> None:
        for ttl in (max(store.resolution, 0.1), store.resolution / 10 or 0.001, 86_400.0):
            lease = await store.acquire(name, "a", ttl)
            assert lease.holder == "a"
            # In real time, some of it passes before the store answers.
            passed = 0.001 if self.exact else 0.25
            asked = max(ttl, store.resolution)
            assert asked - passed <= lease.expires_at - lease.now <= asked + 0.001

    # Fences

    async def test_a_fence_rises_by_one_each_time_a_lease_is_taken(self, store: LeaseStore, name: str) -> None:
        ttl = short(store)
        fences = []
        for holder in ("a", "a", "b", "c"):
            lease = await store.acquire(name, holder, ttl)
            fences.append(lease.fence)
            if holder == "b":
                await self.let_pass(store, ttl * 1.5)
            else:
                await store.release(lease)
        assert fences == list(range(fences[0], fences[0] + 4))

    async def test_transitions_count_the_changes_of_holder(self, store: LeaseStore, name: str) -> None:
        ttl = short(store)
        first = await store.acquire(name, "a", ttl)
        await self.let_pass(store, ttl * 1.5)
        same = await store.acquire(name, "a", 30.0)
        assert (same.fence, same.transitions) == (first.fence + 1, first.transitions)
        await store.release(same)
        changed = await store.acquire(name, "b", 30.0)
        assert changed.transitions == first.transitions + 1

    async def test_closing_and_opening_again_never_repeats_a_fence(self, store: LeaseStore, name: str) -> None:
        first = await store.acquire(name, "a", 30.0)
        await store.release(first)
        await reopen(store)
        assert (await store.acquire(name, "b", 30.0)).fence > first.fence

    # Renewing

    async def test_a_renewal_moves_the_end(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 30.0)
        renewed = await store.renew(lease, 60.0)
        assert renewed is not None
        assert renewed.granted_to("a")
        assert (renewed.fence, renewed.transitions) == (lease.fence, lease.transitions)
        assert 55.0 < renewed.remaining <= 60.001
        assert 55.0 < (await found(store, name)).remaining <= 60.001

    async def test_a_renewal_may_shorten(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 60.0)
        assert await store.renew(lease, short(store)) is not None
        await self.let_pass(store, short(store) * 1.5)
        assert (await store.acquire(name, "b", 30.0)).granted_to("b")

    async def test_a_renewal_never_takes_it_again(self, store: LeaseStore, name: str) -> None:
        expired = await store.acquire(name, "a", short(store))
        await self.let_pass(store, short(store) * 1.5)
        assert await store.renew(expired, 30.0) is None
        assert not (await found(store, name)).live
        released = await store.acquire(name, "a", 30.0)
        await store.release(released)
        assert await store.renew(released, 30.0) is None
        assert not (await found(store, name)).live
        assert await store.renew(Lease(name + "-missing", "a", 1), 30.0) is None
        assert await store.read(name + "-missing") is None

    async def test_only_its_holder_can_renew_it_and_only_under_its_fence(self, store: LeaseStore, name: str) -> None:
        lease = await taken_again(store, name, "a")
        assert await store.renew(Lease(name, "b", lease.fence), 90.0) is None
        assert await store.renew(Lease(name, "a", lease.fence - 1), 90.0) is None
        assert await store.renew(Lease(name, "a", lease.fence + 1), 90.0) is None
        assert (await found(store, name)).remaining <= 30.001

    async def test_renewing_many_returns_the_survivors(self, store: LeaseStore, name: str) -> None:
        mine = [await store.acquire(f"{name}:{number}", "a", 30.0) for number in range(4)]
        await store.release(mine[1])
        await store.release(mine[2])
        await store.acquire(mine[2].name, "b", 30.0)
        survivors = await store.renew_many([(lease, 60.0) for lease in mine])
        assert sorted(lease.name for lease in survivors) == [mine[0].name, mine[3].name]
        assert all(lease.granted_to("a") and 55.0 < lease.remaining <= 60.001 for lease in survivors)
        assert await store.renew_many([]) == []

    # Releasing

    async def test_a_released_lease_is_free_at_once(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 30.0)
        assert await store.release(lease) is True
        record = await found(store, name)
        assert (record.holder, record.live, record.remaining) == ("", False, 0.0)
        assert (record.fence, record.transitions) == (lease.fence, lease.transitions)
        assert (await store.acquire(name, "b", 30.0)).granted_to("b")

    async def test_a_lease_is_released_once(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 30.0)
        assert await store.release(lease) is True
        assert await store.release(lease) is False
        assert await store.release(Lease(name + "-missing", "a", 1)) is False

    async def test_only_its_holder_can_release_it_and_only_under_its_fence(self, store: LeaseStore, name: str) -> None:
        lease = await taken_again(store, name, "a")
        assert await store.release(Lease(name, "b", lease.fence)) is False
        assert await store.release(Lease(name, "b", 0)) is False
        assert await store.release(Lease(name, "", lease.fence)) is False
        assert await store.release(Lease(name, "a", lease.fence - 1)) is False
        assert await store.release(Lease(name, "a", lease.fence + 1)) is False
        assert (await found(store, name)).granted_to("a")

    async def test_without_a_fence_name_and_holder_decide(self, store: LeaseStore, name: str) -> None:
        await store.acquire(name, "a", 30.0)
        assert await store.release(Lease(name, "a", 0)) is True
        assert await store.release(Lease(name, "a", 0)) is False

    async def test_a_late_release_does_not_harm_the_next_holder(self, store: LeaseStore, name: str) -> None:
        late = await store.acquire(name, "a", short(store))
        await self.let_pass(store, short(store) * 1.5)
        assert await store.release(late) is False
        await store.acquire(name, "a", 30.0)
        assert await store.release(late) is False
        assert (await found(store, name)).granted_to("a")

    # Data

    async def test_data_stays_until_it_is_replaced(self, store: LeaseStore, name: str) -> None:
        async def kept() -> dict[str, str]:
            return dict((await found(store, name)).data)

        lease = await store.acquire(name, "a", 30.0, data={"k": "1", "ü": "quote' \" \\ \n 🔒", "": ""})
        assert dict(lease.data) == await kept() == {"k": "1", "ü": "quote' \" \\ \n 🔒", "": ""}
        assert dict((await store.acquire(name, "a", 30.0)).data) == await kept() != {}
        await store.renew(lease, 30.0)
        assert (await kept())["k"] == "1"
        await store.renew(lease, 30.0, data={"k": "2"})
        assert await kept() == {"k": "2"}
        await store.release(lease)
        assert await kept() == {"k": "2"}
        lease = await store.acquire(name, "b", 30.0)
        assert dict(lease.data) == {"k": "2"}
        await store.release(lease, data={"k": "3" * 5_000})
        assert await kept() == {"k": "3" * 5_000}
        await store.acquire(name, "c", 30.0, data={})
        assert await kept() == {}

    async def test_data_of_a_refused_request_is_not_stored(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 30.0, data={"of": "a"})
        assert dict((await store.acquire(name, "b", 30.0, data={"of": "b"})).data) == {"of": "a"}
        assert await store.release(Lease(name, "b", lease.fence), data={"of": "b"}) is False
        assert await store.renew(Lease(name, "b", lease.fence), 30.0, data={"of": "b"}) is None
        assert dict((await found(store, name)).data) == {"of": "a"}

    # Reading

    async def test_there_is_no_record_of_what_was_never_taken(self, store: LeaseStore, name: str) -> None:
        assert await store.read(name) is None
        assert [lease async for lease in store.scan(name)] == []

    async def test_names_are_never_taken_for_each_other(self, store: LeaseStore, name: str) -> None:
        names = [f"{name[:15]}{ending}" for ending in NAMES]
        for number, each in enumerate(names):
            assert (await store.acquire(each, f"h{number}", 30.0)).granted_to(f"h{number}")
        for number, each in enumerate(names):
            assert (await found(store, each)).holder == f"h{number}"
        assert [lease.name async for lease in store.scan(name[:15])] == sorted(names)

    @pytest.mark.parametrize("ending", ["%", "_", "*", "[a-z]", "?", "\\", "A", "\N{GRINNING FACE}"])
    async def test_a_scan_finds_what_begins_with_its_prefix(self, store: LeaseStore, name: str, ending: str) -> None:
        beginnings = (ending, f"{ending}1", f"{ending}{ending}")
        for rest in {*beginnings, "", "a", "z", "0"}:
            await store.acquire(f"{name}{rest}", "h", 30.0)
        scanned = [lease.name async for lease in store.scan(f"{name}{ending}")]
        assert scanned == sorted(f"{name}{rest}" for rest in beginnings)

    # Watching

    async def test_a_release_between_a_try_and_the_wait_is_not_missed(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 300.0)
        async with store.watch(name) as waiter:
            pushes_or_skip(waiter)
            assert not (await store.acquire(name, "b", 300.0, waiting=True)).granted_to("b")
            await store.release(lease)
            assert await hinted(waiter)

    async def test_a_release_ends_a_wait(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 300.0)
        async with store.watch(name) as waiter:
            pushes_or_skip(waiter)
            waiting = asyncio.create_task(hinted(waiter))
            await store.acquire(name, "b", 300.0, waiting=True)
            await store.release(lease)
            assert await waiting

    async def test_a_renewal_that_shortens_ends_a_wait(self, store: LeaseStore, name: str) -> None:
        lease = await store.acquire(name, "a", 300.0)
        async with store.watch(name) as waiter:
            pushes_or_skip(waiter)
            await store.acquire(name, "b", 300.0, waiting=True)
            await store.renew(lease, short(store))
            assert await hinted(waiter)

    async def test_a_wait_ends_without_a_hint(self, store: LeaseStore, name: str) -> None:
        await store.acquire(name, "a", 300.0)
        async with store.watch(name) as waiter:
            waiting = asyncio.create_task(waiter.wait(0.2))
            await asyncio.sleep(0)
            await self.let_pass(store, 0.3)
            await asyncio.wait_for(waiting, PATIENCE)

    # Opening and closing

    async def test_a_store_stays_open_until_its_last_user_leaves(self, store: LeaseStore, name: str) -> None:
        async with store:
            lease = await store.acquire(name, "a", 30.0)
        assert await store.renew(lease, 30.0) is not None

    async def test_closing_vacates_what_expired_and_nothing_else(self, store: LeaseStore, name: str) -> None:
        expired = await store.acquire(name, "a", short(store), data={"kept": "yes"})
        live = await store.acquire(name + "-live", "a", 300.0)
        await self.let_pass(store, short(store) * 1.5)
        await store.read(name)
        await reopen(store)
        record = await found(store, name)
        assert (record.holder, record.fence, dict(record.data)) == ("", expired.fence, {"kept": "yes"})
        assert (await found(store, live.name)).holder == "a"

    # Several processes

    async def test_two_stores_share_leases_and_fences(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        other = other_or_skip(other)
        mine = await store.acquire(name, "a", 300.0, data={"k": "1"})
        assert facts(await found(other, name)) == facts(await found(store, name))
        assert not (await other.acquire(name, "b", 300.0)).granted_to("b")
        assert await other.release(Lease(name, "b", mine.fence)) is False
        assert await store.release(mine) is True
        theirs = await other.acquire(name, "b", 300.0)
        assert (theirs.granted_to("b"), theirs.fence, dict(theirs.data)) == (True, mine.fence + 1, {"k": "1"})
        assert await store.renew(mine, 300.0) is None

    async def test_a_release_in_another_process_ends_a_wait(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        other = other_or_skip(other)
        lease = await other.acquire(name, "a", 300.0)
        async with store.watch(name) as waiter:
            pushes_or_skip(waiter)
            assert not (await store.acquire(name, "b", 300.0, waiting=True)).granted_to("b")
            await other.release(lease)
            assert await until_granted(store, waiter, name, "b")

    async def test_only_one_of_many_in_two_processes_gets_it(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        stores = (store, other_or_skip(other))
        answers = await asyncio.gather(*(stores[n % 2].acquire(name, f"h{n}", 300.0) for n in range(32)))
        assert sum(answer.granted_to(f"h{n}") for n, answer in enumerate(answers)) == 1

    # Breaking: an operator releases what it read

    async def test_a_lease_that_was_broken_is_the_holders_no_more(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        operator = other or store
        held = await store.acquire(name, "a", 300.0)
        assert await operator.release(await found(operator, name)) is True
        assert await store.renew(held, 300.0) is None
        assert await store.release(held) is False
        assert (await operator.acquire(name, "b", 300.0)).fence > held.fence

    async def test_a_lease_that_changed_hands_is_not_broken(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        operator = other or store
        held = await store.acquire(name, "a", 300.0)
        seen = await found(operator, name)
        await store.release(held)
        again = await store.acquire(name, "a", 300.0)
        assert await operator.release(seen) is False
        assert await store.renew(again, 300.0) is not None

    async def test_a_lease_that_is_renewed_meanwhile_is_broken_all_the_same(
        self, store: LeaseStore, other: LeaseStore | None, name: str
    ) -> None:
        operator = other or store
        for _ in range(5):
            held = await store.acquire(name, "a", 300.0)
            seen = await found(operator, name)
            _, broken = await asyncio.gather(store.renew(held, 300.0), operator.release(seen))
            assert broken is True
            assert await store.renew(held, 300.0) is None
            assert not (await found(operator, name)).live

    async def test_breaking_a_lease_ends_a_wait(self, store: LeaseStore, other: LeaseStore | None, name: str) -> None:
        await store.acquire(name, "a", 300.0)
        operator = other or store
        async with store.watch(name) as waiter:
            pushes_or_skip(waiter)
            assert not (await store.acquire(name, "b", 300.0, waiting=True)).granted_to("b")
            assert await operator.release(await found(operator, name))
            assert await until_granted(store, waiter, name, "b")


def short(store: LeaseStore) -> float:
    """A duration in seconds that a test can let pass."""
    return max(store.resolution, 0.2)


def facts(lease: Lease) -> tuple[object, ...]:
    """What is stored, without what depends on when or by whom it is read."""
    return lease.name, lease.holder, lease.live, lease.fence, lease.transitions, dict(lease.data)


async def found(store: LeaseStore, name: str) -> Lease:
    """The record of a name that has one."""
    record = await store.read(name)
    assert record is not None
    assert record.name == name
    return record


async def taken_again(store: LeaseStore, name: str, holder: str) -> Lease:
    """A lease that was taken before, so that the fence below its own is a fence too."""
    await store.release(await store.acquire(name, holder, 30.0))
    return await store.acquire(name, holder, 30.0)


async def reopen(store: LeaseStore) -> None:
    """Close it, though a fixture has it open, and open it again."""
    await store.__aexit__(None, None, None)
    await store.__aenter__()


async def hinted(waiter: Waiter) -> bool:
    """Whether a hint comes, long before the lease ends."""
    return await asyncio.wait_for(waiter.wait(PATIENCE * 2), PATIENCE)


async def until_granted(store: LeaseStore, waiter: Waiter, name: str, holder: str) -> bool:
    """Ask after each hint until the lease is granted: hints may come for nothing, but the right one has to come."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while await hinted(waiter):
                if (await store.acquire(name, holder, 300.0, waiting=True)).granted_to(holder):
                    return True
    return False


def pushes_or_skip(waiter: Waiter) -> None:
    """Skip the test for a store that gives no hints."""
    if not waiter.pushes:
        pytest.skip("this store gives no hints: its waiters poll")


def other_or_skip(other: LeaseStore | None) -> LeaseStore:
    """Skip the test for a store that two processes cannot share."""
    if other is None:
        pytest.skip("no second store on the same data")
    return other
