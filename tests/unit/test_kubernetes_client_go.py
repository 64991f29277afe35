"""One Lease, used by this package and by electors of client-go: neither takes it from the other while it is held."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
from tests.helpers.kubernetes import CART, CART_LEASE, Place, Process, process

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

OURS = 1_700_000_000
"""Below every fence that begins with the server's time."""


class Elector:
    """An elector as client-go has it: what it takes for a change, for held, and for expired, and what it writes."""

    def __init__(self, place: Place, clock: MovableClock, identity: str = "pod-7f", duration: int = 15) -> None:
        self.identity = identity
        self._place = place
        self._clock = clock
        self._duration = duration
        self._observed: tuple[object, ...] | None = None
        self._observed_at = 0.0

    def try_once(self) -> bool:
        """One round of its loop; whether it leads."""
        body = self._place.get(CART_LEASE)
        if body is None:
            self._place.put(CART_LEASE, {"spec": self._spec(0)})
            return True
        spec = body["spec"]
        seen = (
            spec.get("holderIdentity") or "",
            spec.get("leaseDurationSeconds") or 0,
            (spec.get("acquireTime") or "")[:19],  # it compares whole seconds
            (spec.get("renewTime") or "")[:19],
            spec.get("leaseTransitions") or 0,
        )
        if seen != self._observed:
            self._observed, self._observed_at = seen, self._clock.now()
        holder, duration, *_ = seen
        leads = holder == self.identity
        if holder and not leads and self._observed_at + int(str(duration)) > self._clock.now():
            return False
        new = self._spec(int(spec.get("leaseTransitions") or 0) + (not leads))
        if leads:
            new["acquireTime"] = spec.get("acquireTime")
        self._place.put(CART_LEASE, {**body, "spec": new})
        return True

    def release(self) -> None:
        """It gives the Lease back."""
        body = self._place.found(CART_LEASE)
        spec = self._spec(body["spec"]["leaseTransitions"])
        self._place.put(CART_LEASE, {**body, "spec": {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}})

    def _spec(self, transitions: int) -> dict[str, Any]:
        now = f"{EPOCH + timedelta(seconds=self._clock.wall()):%Y-%m-%dT%H:%M:%S.%f}Z"
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._duration,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


@pytest.fixture
def elector(place: Place, mine: Process) -> Elector:
    """An elector with a clock that is ten minutes behind."""
    clock = mine.clock
    return Elector(place, MovableClock(now=5.0, wall=clock.wall() - 600.0))


async def both_wait(mine: Process, elector: Elector, seconds: float) -> None:
    await mine.clock.advance(seconds)
    await elector._clock.advance(seconds)


async def acquired(mine: Process) -> Lease:
    return await mine.table.acquire(CART, "ours", 15.0, None)


async def test_what_an_elector_holds_is_refused_while_it_renews(mine: Process, elector: Elector) -> None:
    assert elector.try_once()
    for _ in range(20):
        refused = await acquired(mine)
        assert (refused.holder, refused.transitions) == ("pod-7f", 0)
        assert refused.remaining == 15.0
        await both_wait(mine, elector, 10.0)
        assert not (await acquired(mine)).granted_to("ours")
        assert elector.try_once()


async def test_what_an_elector_abandoned_is_taken_after_its_duration(mine: Process, elector: Elector) -> None:
    assert elector.try_once()
    assert not (await acquired(mine)).granted_to("ours")
    await both_wait(mine, elector, 15.0)
    assert not (await acquired(mine)).granted_to("ours")
    await both_wait(mine, elector, 0.001)
    lease = await acquired(mine)
    assert lease.granted_to("ours")
    assert lease.transitions == 1
    assert not elector.try_once()


async def test_what_an_elector_gave_back_is_taken_at_once(mine: Process, elector: Elector, place: Place) -> None:
    assert elector.try_once()
    elector.release()
    lease = await acquired(mine)
    assert lease.granted_to("ours")
    metadata = place.found(CART_LEASE)["metadata"]
    assert metadata["labels"]["grelmicro.io/prefix"] == "grelmicro"
    assert metadata["annotations"]["grelmicro.io/name"] == CART


@pytest.mark.parametrize("ttl", [1.0, 15.0])
async def test_an_elector_takes_nothing_that_is_renewed(mine: Process, elector: Elector, ttl: float) -> None:
    lease = await mine.table.acquire(CART, "ours", ttl, None)
    for _ in range(40):
        assert not elector.try_once()
        await both_wait(mine, elector, ttl * 0.3)
        assert not elector.try_once()
        await both_wait(mine, elector, ttl * 0.4)
        assert await mine.table.renew(lease, ttl, None) is not None


async def test_an_elector_takes_what_was_abandoned_after_its_duration(mine: Process, elector: Elector) -> None:
    lease = await acquired(mine)
    assert not elector.try_once()
    await both_wait(mine, elector, 14.9)
    assert not elector.try_once()
    await both_wait(mine, elector, 0.1)
    assert elector.try_once()
    assert await mine.table.renew(lease, 15.0, None) is None
    assert await mine.table.release(lease, None) is False
    assert elector.try_once()


async def test_an_elector_takes_what_was_given_back_at_once(mine: Process, elector: Elector, place: Place) -> None:
    lease = await mine.table.acquire(CART, "ours", 15.0, {"address": "10.0.0.1"})
    assert not elector.try_once()
    await mine.table.release(lease, None)
    assert elector.try_once()
    refused = await acquired(mine)
    assert (refused.holder, refused.fence, refused.transitions) == ("pod-7f", lease.fence + 1, 1)
    assert refused.data == {}
    assert place.found(CART_LEASE)["metadata"]["annotations"]["grelmicro.io/name"] == CART


async def test_two_programs_take_turns_under_rising_fences(mine: Process, elector: Elector, place: Place) -> None:
    fences = []
    for turn in range(3):
        assert elector.try_once()
        if turn:
            fences.append(place.found(CART_LEASE)["spec"]["leaseTransitions"])
        elector.release()
        lease = await acquired(mine)
        fences.append(lease.fence)
        assert lease.transitions == 2 * turn + 1
        await mine.table.release(lease, None)
    assert fences == list(range(fences[0], fences[0] + 5))


async def test_fences_do_not_begin_at_nothing_where_an_elector_created_the_lease(
    mine: Process, elector: Elector, place: Place
) -> None:
    before = await acquired(mine)
    await mine.table.release(before, None)
    place.delete(CART_LEASE)
    assert elector.try_once()
    elector.release()
    async with process(place) as another:
        after = await acquired(another)
    assert OURS < before.fence <= after.fence


async def test_no_elector_is_told_that_it_waits_for_a_watch(mine: Process, elector: Elector) -> None:
    assert elector.try_once()
    await acquired(mine)
    assert not mine.table.is_watched(CART)
    elector.release()
    await acquired(mine)
    assert elector.try_once() is False
    assert mine.table.is_watched(CART)


async def test_electors_and_we_never_lead_at_once(mine: Process, elector: Elector) -> None:
    """Each renews now and then, and stops at times; who is refused tries again."""
    lease: Lease | None = None
    leads_until = ours_until = 0.0
    terms = 0
    for step in range(400):
        await both_wait(mine, elector, 1.0)
        now = mine.clock.now()
        if step % 50 < 25 and elector.try_once():
            leads_until = now + 15.0
            assert ours_until <= now
        if (step + 25) % 50 >= 30:
            continue
        sent_at = now
        if lease is not None and await mine.table.renew(lease, 15.0, None) is None:
            lease = None
        if lease is None and (answer := await acquired(mine)).granted_to("ours"):
            lease = answer
            terms += 1
            assert leads_until <= now
        if lease is not None:
            ours_until = sent_at + 15.0
    assert terms > 2
