"""An acquire that ended without an answer is undone for good: what comes late takes nothing any more."""

import asyncio
import copy
from typing import Any

import pytest

from grelmicro.backends.kubernetes.late import MOST, Late
from grelmicro.backends.kubernetes.requests import Answer
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError
from grelmicro.leases import Lease
from tests.helpers.kubernetes import CART, CART_LEASE, Place, Process

UNDO = Lease(CART, "late", 0)


async def used_before(process: Process) -> Lease:
    """A free record of the cart, which the process knows."""
    lease = await process.table.acquire(CART, "before", 30.0, None)
    assert await process.table.release(lease, None)
    return lease


async def acquired_late(process: Process, verb: str) -> None:
    """An acquire of which the write is still on its way."""
    process.trouble.keep.add(verb)
    with pytest.raises(OutcomeUnknownError):
        await process.table.acquire(CART, "late", 30.0, None)
    assert len(process.trouble.kept) == 1


async def free_to(process: Process) -> bool:
    """Whether nothing is held."""
    record = await process.table.read(CART)
    return record is None or not record.holder


async def test_a_late_write_to_a_known_record_is_refused_after_the_undo(mine: Process, place: Place) -> None:
    await used_before(mine)
    await acquired_late(mine, "PUT")
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409]
    assert await free_to(mine)


async def test_a_late_creation_is_refused_after_the_undo(mine: Process, place: Place) -> None:
    await acquired_late(mine, "POST")
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409]
    assert await free_to(mine)


async def test_what_a_late_write_took_before_the_undo_is_vacated(mine: Process) -> None:
    await used_before(mine)
    await acquired_late(mine, "PUT")
    assert await mine.trouble.deliver() == [200]
    assert await mine.table.release(UNDO, None) is True
    assert await free_to(mine)


async def test_what_a_late_creation_took_before_the_undo_is_vacated(mine: Process) -> None:
    await acquired_late(mine, "POST")
    assert await mine.trouble.deliver() == [201]
    assert await mine.table.release(UNDO, None) is True
    assert await free_to(mine)


@pytest.mark.parametrize("verb", ["GET", "PUT"])
@pytest.mark.parametrize("existed", [True, False])
async def test_a_write_that_comes_while_it_is_undone_takes_nothing(mine: Process, verb: str, existed: bool) -> None:
    if existed:
        await used_before(mine)
    await acquired_late(mine, "PUT" if existed else "POST")
    writes = ("PUT", "POST") if verb == "PUT" else ("GET",)

    async def deliver(verb: str, name: str) -> None:
        if verb in writes:
            mine.trouble.before = None
            await mine.trouble.deliver()

    mine.trouble.before = deliver
    assert await mine.table.release(UNDO, None) is True
    assert await free_to(mine)


@pytest.mark.parametrize("verb", ["PUT", "POST"])
async def test_an_answer_that_is_lost_is_undone(mine: Process, verb: str) -> None:
    if verb == "PUT":
        await used_before(mine)
    mine.trouble.lose.add(verb)
    with pytest.raises(OutcomeUnknownError):
        await mine.table.acquire(CART, "late", 30.0, None)
    assert not await free_to(mine)
    assert await mine.table.release(UNDO, None) is True
    assert await free_to(mine)


async def test_a_holder_that_came_meanwhile_is_not_written_to(mine: Process, other: Process, place: Place) -> None:
    await used_before(mine)
    await acquired_late(mine, "PUT")
    theirs = await other.table.acquire(CART, "theirs", 30.0, None)
    before = place.get(CART_LEASE)
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409]
    assert place.get(CART_LEASE) == before
    assert await other.table.renew(theirs, 30.0, None) is not None


async def test_an_undo_of_a_creation_leaves_what_another_one_created(mine: Process, other: Process) -> None:
    await acquired_late(mine, "POST")
    theirs = await other.table.acquire(CART, "theirs", 30.0, None)
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409]
    assert await other.table.renew(theirs, 30.0, None) is not None


async def test_an_undo_does_not_make_an_abandoned_lease_look_renewed(mine: Process, other: Process) -> None:
    await other.table.acquire(CART, "abandoned", 30.0, None)
    assert not (await other.table.acquire(CART, "waiter", 30.0, None)).granted_to("waiter")
    assert not (await mine.table.acquire(CART, "late", 30.0, None)).granted_to("late")
    await mine.clock.advance(31.0)
    await acquired_late(mine, "PUT")
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409]
    await other.clock.advance(30.001)
    assert (await other.table.acquire(CART, "waiter", 30.0, None)).granted_to("waiter")


async def test_a_write_to_a_record_that_is_deleted_meanwhile_does_not_create_it(mine: Process, place: Place) -> None:
    await used_before(mine)
    await acquired_late(mine, "PUT")
    place.delete(CART_LEASE)
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() in ([409], [404])
    assert place.get(CART_LEASE) is None


async def test_of_several_late_writes_none_takes_anything_after_the_undo(mine: Process) -> None:
    await acquired_late(mine, "POST")
    kept = mine.trouble.kept.pop()
    await used_before(mine)
    await acquired_late(mine, "PUT")
    mine.trouble.kept.append(kept)
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409, 409]
    assert await free_to(mine)


async def test_a_record_can_be_undone_twice(mine: Process) -> None:
    await used_before(mine)
    for _ in range(2):
        await acquired_late(mine, "PUT")
        assert await mine.table.release(UNDO, None) is False
        assert await mine.trouble.deliver() == [409]
    assert await free_to(mine)


async def test_an_undo_whose_own_answer_is_lost_can_be_repeated(mine: Process) -> None:
    await used_before(mine)
    await acquired_late(mine, "PUT")
    mine.trouble.lose.add("PUT")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.release(UNDO, None)
    assert await mine.table.release(UNDO, None) is False
    assert await mine.trouble.deliver() == [409]
    assert await free_to(mine)


async def test_an_undo_whose_own_write_comes_late_frees_nobody_else(mine: Process, other: Process) -> None:
    mine.trouble.lose.add("POST")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.acquire(CART, "late", 30.0, None)
    mine.trouble.keep.add("PUT")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.release(UNDO, None)
    assert await mine.table.release(UNDO, None) is True
    theirs = await other.table.acquire(CART, "theirs", 30.0, None)
    assert await mine.trouble.deliver() == [409]
    assert await other.table.renew(theirs, 30.0, None) is not None


async def test_without_a_late_write_an_undo_writes_nothing(mine: Process, place: Place) -> None:
    await used_before(mine)
    before = place.get(CART_LEASE)
    assert mine.calls.total()
    assert await mine.table.release(UNDO, None) is False
    assert await mine.table.release(Lease("lock:none", "late", 0), None) is False
    assert mine.calls == {"GET": 2}
    assert place.get(CART_LEASE) == before
    assert place.get("grelmicro.lock.none") is None


async def test_a_write_that_surely_did_nothing_needs_no_undo(mine: Process) -> None:
    await used_before(mine)

    async def refuse(verb: str, name: str) -> None:
        raise BackendUnavailableError("no")

    mine.trouble.before = refuse
    with pytest.raises(BackendUnavailableError):
        await mine.table.acquire(CART, "late", 30.0, None)
    mine.trouble.before = None
    assert mine.calls.total()
    assert await mine.table.release(UNDO, None) is False
    assert mine.calls == {"GET": 1}


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("steps", range(12))
async def test_cancelled_at_any_step_nothing_stays_held(mine: Process, existed: bool, steps: int) -> None:
    if existed:
        await used_before(mine)
    task = asyncio.create_task(mine.table.acquire(CART, "late", 30.0, None))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await mine.table.release(UNDO, None)
    assert await free_to(mine)
    assert (await mine.table.acquire(CART, "next", 30.0, None)).granted_to("next")


async def test_undone_creations_leave_a_record_that_is_taken_under_a_higher_fence(mine: Process) -> None:
    await acquired_late(mine, "POST")
    assert await mine.table.release(UNDO, None) is False
    record = await mine.table.read(CART)
    assert record is not None
    assert (record.name, record.holder, record.transitions) == (CART, "", 0)
    lease = await mine.table.acquire(CART, "next", 30.0, None)
    assert lease.fence == record.fence + 1


async def test_data_of_an_undo_replaces_that_of_the_record(mine: Process) -> None:
    mine.trouble.lose.add("POST")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.acquire(CART, "late", 30.0, {"of": "late"})
    assert await mine.table.release(UNDO, {"of": "undo"}) is True
    record = await mine.table.read(CART)
    assert record is not None
    assert record.data == {"of": "undo"}


def test_what_is_never_undone_is_forgotten_some_day() -> None:
    late = Late()
    for number in range(MOST + 10):
        with pytest.raises(OutcomeUnknownError), late.expect(f"h{number}", "1"):
            raise OutcomeUnknownError("no answer")
    assert not late.may_come("h0", "1")
    assert late.may_come(f"h{MOST + 9}", "1")
    with late.expect("h", "1"):
        assert late.may_come("h", "1")
    assert not late.may_come("h", "1")


# A way to the server that sends a request twice


async def test_what_is_passed_on_by_a_write_that_is_sent_twice_is_passed_on(
    mine: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await mine.table.acquire(CART, "a", 30.0, None)
    send_twice(mine, monkeypatch)
    passed = await mine.table.pass_on(lease, "b", 30.0)
    assert passed is not None
    assert passed.granted_to("b")
    assert passed.fence == lease.fence + 1


async def test_a_release_that_is_sent_twice_was_done(mine: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = await mine.table.acquire(CART, "a", 30.0, None)
    send_twice(mine, monkeypatch)
    assert await mine.table.release(lease, None)
    assert not await mine.table.release(lease, None)


def send_twice(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write is repeated on its way; what the repetition is answered comes back."""
    replace = process.trouble.inner.replace

    async def twice(name: str, body: dict[str, Any], what: str, *, urgent: bool = False) -> Answer:
        await replace(name, copy.deepcopy(body), what, urgent=urgent)
        return await replace(name, body, what, urgent=urgent)

    monkeypatch.setattr(process.trouble.inner, "replace", twice)
