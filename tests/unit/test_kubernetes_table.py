"""The operations on Lease objects: what they cost, what they answer, and what others do to the objects meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.observation import OVERTAKEN, WAITING_MEMORY
from grelmicro.backends.kubernetes.record import MOST, REMEMBERED, UNTOLD
from grelmicro.backends.kubernetes.requests import Gone
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError, SettingsValidationError
from grelmicro.leases import Lease
from tests.helpers.kubernetes import CART, CART_LEASE, Place, Process, Shelf, process
from tests.helpers.matrix import further


async def taken(process: Process, holder: str = "a", ttl: float = 30.0) -> Lease:
    lease = await process.table.acquire(CART, holder, ttl, None)
    assert lease.granted_to(holder)
    return lease


async def is_refused(process: Process, holder: str = "b") -> bool:
    lease = await process.table.acquire(CART, holder, 30.0, None)
    return not lease.granted_to(holder)


# What it costs


async def test_a_known_free_lease_is_taken_renewed_and_released_by_one_write_each(mine: Process) -> None:
    lease = await taken(mine)
    assert mine.calls == {"GET": 1, "POST": 1}
    await mine.table.release(lease, None)
    assert mine.calls == {"PUT": 1}
    lease = await taken(mine)
    assert mine.calls == {"PUT": 1}
    renewal = await mine.table.renew(lease, 60.0, None)
    assert renewal is not None
    assert mine.calls == {"PUT": 1}
    assert await mine.table.release(renewal[0], None)
    assert mine.calls == {"PUT": 1}


async def test_what_was_seen_to_expire_is_taken_by_one_write(mine: Process, other: Process) -> None:
    await taken(other)
    assert await is_refused(mine)
    await mine.clock.advance(30.001)
    assert mine.calls.total()
    await taken(mine, "b")
    assert mine.calls == {"PUT": 1}


async def test_a_refusal_is_always_read(mine: Process, other: Process) -> None:
    lease = await taken(other)
    for _ in range(2):
        assert await is_refused(mine)
        assert mine.calls == {"GET": 1}
    await other.table.release(lease, None)
    await taken(mine, "b")
    assert mine.calls == {"GET": 1, "PUT": 1}


async def test_renewals_alone_are_urgent(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    place.annotate(CART_LEASE, x="y")
    assert await mine.table.renew(lease, 30.0, None) is not None
    urgent = {verb: count for verb, count in mine.trouble.calls.items() if verb.startswith("urgent")}
    assert urgent == {"urgent PUT": 2, "urgent GET": 1}
    await mine.table.release(lease, None)
    assert sum(count for verb, count in mine.trouble.calls.items() if verb.startswith("urgent")) == 3


# Who has it


async def test_it_ends_when_it_was_seen_unchanged_for_its_own_duration(mine: Process, other: Process) -> None:
    await taken(other, ttl=100.0)
    refused = await mine.table.acquire(CART, "b", 1.0, None)
    assert refused.remaining == 100.0
    await mine.clock.advance(100.0)
    assert await is_refused(mine)
    await mine.clock.advance(0.001)
    await taken(mine, "b")


async def test_the_clocks_of_two_processes_need_not_agree(mine: Process, other: Process) -> None:
    mine.clock.shift_wall(-600)
    other.clock.shift_wall(600)
    await other.clock.advance(5_000)
    lease = await taken(other)
    assert await is_refused(mine)
    await mine.clock.advance(20)
    assert await is_refused(mine)
    assert await other.table.renew(lease, 30.0, None) is not None
    await mine.clock.advance(20)
    assert await is_refused(mine)
    await mine.clock.advance(29)
    assert await is_refused(mine)
    await mine.clock.advance(1.001)
    await taken(mine, "b")
    assert await other.table.renew(lease, 30.0, None) is None


async def test_what_was_seen_to_expire_is_not_taken_from_who_renewed_it_meanwhile(
    mine: Process, other: Process
) -> None:
    lease = await taken(other)
    assert await is_refused(mine)
    await mine.clock.advance(30.001)
    assert await other.table.renew(lease, 30.0, None) is not None
    assert await is_refused(mine)
    assert await other.table.renew(lease, 30.0, None) is not None


async def test_only_one_of_many_takes_what_expired(place: Place, mine: Process, other: Process) -> None:
    await taken(mine)
    assert await is_refused(other)
    for one in (mine, other):
        await one.clock.advance(31.0)
    holders = [f"h{number}" for number in range(10)]
    answers = await asyncio.gather(
        *((mine, other)[n % 2].table.acquire(CART, holder, 30.0, None) for n, holder in enumerate(holders))
    )
    assert sum(answer.granted_to(holder) for answer, holder in zip(answers, holders, strict=True)) == 1
    assert len({(answer.holder, answer.fence) for answer in answers}) == 1


async def test_fractions_of_a_second_are_rounded_up(mine: Process, place: Place) -> None:
    for ttl, seconds in (
        (0.001, 1),
        (1.0, 1),
        (2.000_000_1, 2),
        (2.001, 3),
        (0.1 * 30, 3),
        (315_360_000.0, 315_360_000),
    ):
        lease = await taken(mine, ttl=ttl)
        assert place.found(CART_LEASE)["spec"]["leaseDurationSeconds"] == seconds
        assert lease.remaining == pytest.approx(seconds)
        renewal = await mine.table.renew(lease, ttl, None)
        assert renewal is not None
        assert place.found(CART_LEASE)["spec"]["leaseDurationSeconds"] == seconds
    with pytest.raises(SettingsValidationError):
        await mine.table.acquire(CART, "a", 0.0, None)
    with pytest.raises(SettingsValidationError):
        await mine.table.renew(lease, float("inf"), None)


async def test_a_renewal_tells_whether_it_shortened(mine: Process) -> None:
    lease = await taken(mine)
    assert (await mine.table.renew(lease, 31.0, None) or (None, None))[1] is False
    assert (await mine.table.renew(lease, 30.0, None) or (None, None))[1] is True


async def test_ones_own_live_lease_is_extended_under_its_fence(mine: Process) -> None:
    first = await taken(mine)
    again = await taken(mine, ttl=60.0)
    assert (again.fence, again.transitions, again.acquired_at) == (first.fence, first.transitions, first.acquired_at)
    assert again.remaining == 60.0


# What others do to the object


async def test_an_edit_of_a_label_loses_nothing(mine: Process, place: Place) -> None:
    for change in (mine.table.renew, None):
        lease = await taken(mine)
        place.annotate(CART_LEASE, x="y")
        if change is not None:
            assert await change(lease, 30.0, None) is not None
            place.annotate(CART_LEASE, x="z")
        assert await mine.table.release(lease, None) is True
    assert place.found(CART_LEASE)["spec"]["holderIdentity"] == ""


async def test_an_edit_of_a_label_does_not_prolong_a_lease(mine: Process, other: Process, place: Place) -> None:
    await taken(other)
    assert await is_refused(mine)
    await mine.clock.advance(20.0)
    place.annotate(CART_LEASE, x="y")
    assert await is_refused(mine)
    await mine.clock.advance(10.001)
    await taken(mine, "b")


async def test_what_is_not_ours_stays_in_every_write(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    body = place.found(CART_LEASE)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "it", "uid": "d9607e19-f88f-11e6-a518-42010a800195"}
    body["metadata"] |= {"ownerReferences": [owner], "finalizers": ["example.com/kept"]}
    body["metadata"]["labels"] |= {"app.kubernetes.io/managed-by": "Helm", "team": "shop"}
    body["metadata"]["annotations"] |= {"example.com/note": "kept"}
    place.put(CART_LEASE, body)
    renewal = await mine.table.renew(lease, 30.0, None)
    assert renewal is not None
    assert await mine.table.release(renewal[0], None)
    await taken(mine, "b")
    metadata = place.found(CART_LEASE)["metadata"]
    assert metadata["ownerReferences"] == [owner]
    assert metadata["finalizers"] == ["example.com/kept"]
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "Helm",
        "team": "shop",
        "grelmicro.io/prefix": "grelmicro",
    }
    assert metadata["annotations"]["example.com/note"] == "kept"
    del body["metadata"]["finalizers"]
    place.put(CART_LEASE, {**place.found(CART_LEASE), "metadata": {**metadata, "finalizers": []}})


@pytest.mark.parametrize("storm", [3, *further(1000)])
async def test_a_storm_of_changes_is_ridden_out_or_told(mine: Process, place: Place, storm: int) -> None:
    lease = await taken(mine)
    left = [storm]

    async def change(verb: str, name: str) -> None:
        if verb == "PUT" and left[0]:
            left[0] -= 1
            place.annotate(name, storm=str(left[0]))

    mine.trouble.before = change
    if storm < 10:
        assert await mine.table.renew(lease, 30.0, None) is not None
        left[0] = storm
        assert await mine.table.release(lease, None) is True
        left[0] = storm
        await taken(mine, "b")
    else:
        for request in (
            mine.table.renew(lease, 30.0, None),
            mine.table.release(lease, None),
            mine.table.acquire(CART, "a", 30.0, None),
        ):
            with pytest.raises(BackendUnavailableError, match=r"(renewing|releasing|acquiring) 'lock:cart': others "):
                await request
        mine.trouble.before = None
        assert await mine.table.renew(lease, 30.0, None) is not None


async def test_a_lease_that_is_deleted_is_lost(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    place.delete(CART_LEASE)
    assert await mine.table.renew(lease, 30.0, None) is None
    assert await mine.table.release(lease, None) is False
    assert place.get(CART_LEASE) is None
    again = await taken(mine)
    place.delete(CART_LEASE)
    assert await mine.table.release(again, None) is False
    assert await mine.table.renew(again, 30.0, None) is None
    assert await mine.table.read(CART) is None


@pytest.mark.parametrize("verb", ["GET", "PUT"])
async def test_a_lease_that_is_deleted_between_two_requests_is_created_anew(
    mine: Process, other: Process, place: Place, verb: str
) -> None:
    before = await taken(other)
    await other.table.release(before, None)
    if verb == "PUT":
        assert await mine.table.read(CART)

    async def delete(sent: str, name: str) -> None:
        if sent == verb:
            mine.trouble.before = None
            place.delete(name)

    mine.trouble.before = delete
    lease = await taken(mine)
    assert lease.transitions == 0
    assert place.found(CART_LEASE)["spec"]["holderIdentity"] == "a"


async def test_a_deleted_and_taken_lease_is_not_renewed_or_released_by_who_had_it(
    mine: Process, other: Process, place: Place
) -> None:
    lease = await taken(mine)
    place.delete(CART_LEASE)
    theirs = await taken(other, "b")
    assert await mine.table.renew(lease, 30.0, None) is None
    assert await mine.table.release(lease, None) is False
    assert await other.table.renew(theirs, 30.0, None) is not None


async def test_an_object_that_keeps_another_name_is_refused(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    await mine.table.release(lease, None)
    place.annotate(CART_LEASE, name="lock:other")
    with pytest.raises(BackendUnavailableError, match=r"keeps another name.*grelmicro\.io/name"):
        await mine.table.acquire(CART, "a", 30.0, None)
    with pytest.raises(BackendUnavailableError, match="keeps another name"):
        await mine.table.read(CART)
    assert [lease async for lease in mine.table.scan("")] == []
    place.annotate(CART_LEASE, name=CART)
    await taken(mine)


async def test_who_holds_it_keeps_it_though_the_name_was_edited(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    place.annotate(CART_LEASE, name="lock:other")
    assert await mine.table.renew(lease, 30.0, None) is not None
    assert place.found(CART_LEASE)["metadata"]["annotations"]["grelmicro.io/name"] == CART


@pytest.mark.parametrize("spec", [{}, {"holderIdentity": ""}, {"holderIdentity": None, "leaseTransitions": None}])
async def test_an_object_without_a_holder_is_free(mine: Process, place: Place, spec: dict[str, Any]) -> None:
    place.put(CART_LEASE, {"spec": spec})
    record = await mine.table.read(CART)
    assert record is not None
    assert (record.holder, record.live, record.fence, record.acquired_at) == ("", False, 0, 0.0)
    await taken(mine)


async def test_a_holder_that_gave_no_duration_is_not_robbed_at_once(mine: Process, place: Place) -> None:
    place.put(CART_LEASE, {"spec": {"holderIdentity": "someone"}})
    refused = await mine.table.acquire(CART, "a", 30.0, None)
    assert (refused.holder, refused.remaining) == ("someone", UNTOLD)
    await mine.clock.advance(UNTOLD + 0.001)
    await taken(mine)


# Fences


async def test_a_first_fence_is_the_servers_time_in_seconds(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    if isinstance(place, Shelf):
        assert lease.fence == 1_795_000_000
    assert 1_700_000_000 < lease.fence < MOST
    assert place.found(CART_LEASE)["spec"]["leaseTransitions"] == lease.fence


async def test_a_fence_does_not_fall_where_a_lease_is_deleted(mine: Process, place: Place) -> None:
    fences = []
    for _ in range(3):
        for _ in range(2):
            lease = await taken(mine)
            fences.append(lease.fence)
            await mine.table.release(lease, None)
        place.delete(CART_LEASE)
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("known", [True, False])
async def test_a_fence_does_not_fall_where_somebody_sets_it_back(mine: Process, place: Place, known: bool) -> None:
    lease = await taken(mine)
    await mine.table.release(lease, None)
    place.edit(CART_LEASE, leaseTransitions=3)
    async with process(place) as another:
        again = await taken(mine if known else another)
    assert again.fence > lease.fence


async def test_a_fence_that_a_lease_cannot_hold_is_refused(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    place.edit(CART_LEASE, leaseTransitions=MOST, holderIdentity="")
    with pytest.raises(BackendUnavailableError, match="fencing tokens are used up"):
        await mine.table.acquire(CART, "b", 30.0, None)
    assert place.found(CART_LEASE)["spec"]["holderIdentity"] == ""
    assert await mine.table.renew(lease, 30.0, None) is None


async def test_the_last_fence_can_be_held(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    await mine.table.release(lease, None)
    place.edit(CART_LEASE, leaseTransitions=MOST - 1)
    last = await taken(mine)
    assert last.fence == MOST
    assert await mine.table.renew(last, 30.0, None) is not None
    assert await mine.table.release(last, None)


# Answers that are lost


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_renewal_without_an_answer_is_repeated(mine: Process, arrives: bool) -> None:
    lease = await taken(mine)
    (mine.trouble.lose if arrives else mine.trouble.keep).add("PUT")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.renew(lease, 60.0, None)
    assert await mine.table.renew(lease, 45.0, None) is not None
    if not arrives:
        assert await mine.trouble.deliver() == [409]
    record = await mine.table.read(CART)
    assert record is not None
    assert record.remaining == 45.0
    assert await mine.table.release(lease, None) is True


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_release_without_an_answer_is_repeated(mine: Process, other: Process, arrives: bool) -> None:
    lease = await taken(mine)
    (mine.trouble.lose if arrives else mine.trouble.keep).add("PUT")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.release(lease, None)
    assert await mine.table.release(lease, None)
    theirs = await taken(other, "b")
    if not arrives:
        assert await mine.trouble.deliver() == [409]
    assert await other.table.renew(theirs, 30.0, None) is not None


async def test_a_renewal_that_comes_after_the_release_takes_nothing(mine: Process) -> None:
    lease = await taken(mine)
    mine.trouble.keep.add("PUT")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.renew(lease, 60.0, None)
    assert await mine.table.release(lease, None) is True
    assert await mine.trouble.deliver() == [409]


async def test_a_renewal_that_was_done_unseen_keeps_the_lease(mine: Process) -> None:
    lease = await taken(mine)
    mine.trouble.lose.add("PUT")
    with pytest.raises(OutcomeUnknownError):
        await mine.table.renew(lease, 100.0, None)
    await mine.clock.advance(31.0)
    assert await mine.table.renew(lease, 30.0, None) is not None


@pytest.mark.parametrize("request_of", ["renew", "release"])
@pytest.mark.parametrize("steps", range(7))
async def test_a_cancelled_renewal_or_release_can_be_repeated(
    mine: Process, place: Place, request_of: str, steps: int
) -> None:
    lease = await taken(mine)
    place.annotate(CART_LEASE, x="y")
    requests: dict[str, Callable[[], Any]] = {
        "renew": lambda: mine.table.renew(lease, 45.0, None),
        "release": lambda: mine.table.release(lease, None),
    }
    task = asyncio.create_task(requests[request_of]())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await requests[request_of]()
    assert place.found(CART_LEASE)["spec"]["holderIdentity"] == ("a" if request_of == "renew" else "")


# Reading


async def test_a_scan_goes_through_all_pages_in_the_order_of_names(
    mine: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grelmicro.backends.kubernetes.objects.PAGE", 2)
    names = ["lock:b", "lock:B", "lock:a:1", "lock:a", "lock:é", "leader:a"]
    for name in names:
        await mine.table.acquire(name, "h", 30.0, {"of": name})
    assert mine.calls.total()
    leases = [lease async for lease in mine.table.scan("lock:")]
    assert [lease.name for lease in leases] == sorted(names)[1:]
    assert [lease.data["of"] for lease in leases] == sorted(names)[1:]
    assert mine.calls == {"LIST": 3}


async def test_a_scan_begins_again_when_the_server_forgets_the_list(
    mine: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grelmicro.backends.kubernetes.objects.PAGE", 2)
    for number in range(5):
        await mine.table.acquire(f"lock:{number}", "h", 30.0, None)
    lists = [0]

    async def forget(verb: str, name: str) -> None:
        lists[0] += 1
        if lists[0] in failing:
            raise Gone("reading records: too old")

    mine.trouble.before = forget
    failing = {2}
    assert len([lease async for lease in mine.table.scan("")]) == 5
    failing = set(range(100))
    with pytest.raises(BackendUnavailableError, match="forgot each list"):
        assert [lease async for lease in mine.table.scan("")] == []


async def test_leases_of_other_prefixes_are_not_found(mine: Process, place: Place) -> None:
    async with place.requests() as requests:
        shop = Process(requests, "shop")
        await shop.table.acquire(CART, "theirs", 30.0, None)
        await taken(mine)
        assert [(lease.name, lease.holder) async for lease in shop.table.scan("")] == [(CART, "theirs")]
        assert [(lease.name, lease.holder) async for lease in mine.table.scan("")] == [(CART, "a")]
    assert place.get(lease_name("shop", CART)) is not None


# What the watch brings


async def test_what_the_watch_brought_is_taken_by_one_write(mine: Process, other: Process, place: Place) -> None:
    lease = await taken(other)
    assert await is_refused(mine)
    await other.table.release(lease, None)
    before = mine.table.learn(place.found(CART_LEASE))
    assert before is not None
    assert before["spec"]["holderIdentity"] == "a"
    assert mine.calls.total()
    await taken(mine, "b")
    assert mine.calls == {"PUT": 1}


async def test_what_the_watch_brings_late_is_not_believed(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    old = place.found(CART_LEASE)
    renewal = await mine.table.renew(lease, 30.0, None)
    assert renewal is not None
    mine.table.learn(old)
    assert mine.calls.total()
    assert await mine.table.release(renewal[0], None)
    assert mine.calls == {"PUT": 1}


async def test_an_expiry_counts_from_what_the_watch_brought(mine: Process, other: Process, place: Place) -> None:
    await taken(other)
    assert mine.table.learn(place.found(CART_LEASE)) is None
    await mine.clock.advance(30.001)
    await taken(mine, "b")
    assert mine.calls == {"PUT": 1}


async def test_a_deletion_that_the_watch_tells_is_looked_at(mine: Process, place: Place) -> None:
    lease = await taken(mine)
    body = place.found(CART_LEASE)
    body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 1)
    mine.table.learn(body, deleted=True)  # as when somebody takes its label away
    assert await mine.table.renew(lease, 30.0, None) is not None
    mine.table.learn(body, deleted=True)  # too old now
    assert mine.calls.total()
    assert await mine.table.release(lease, None) is True
    assert mine.calls == {"PUT": 1}


async def test_only_objects_with_the_label_are_watched(mine: Process, place: Place) -> None:
    assert mine.table.is_watched(CART)
    place.put(CART_LEASE, {"spec": {"holderIdentity": "someone", "leaseDurationSeconds": 15}})
    assert await is_refused(mine)
    assert not mine.table.is_watched(CART)
    await mine.clock.advance(15.001)
    await taken(mine)
    assert mine.table.is_watched(CART)


# Who goes first


async def handed_over(process: Process, times: int) -> Lease:
    """The cart after so many hand-overs within one process."""
    lease = await taken(process, "a0")
    for number in range(times):
        passed = await process.table.pass_on(lease, f"a{number + 1}", 30.0)
        assert passed is not None
        lease = passed
    return lease


async def asks(process: Process, holder: str = "b") -> Lease:
    """What somebody is told who waits."""
    return await process.table.acquire(CART, holder, 30.0, None, waiting=True)


async def test_who_waits_costs_the_holder_nothing_at_first(mine: Process, other: Process) -> None:
    lease = await taken(other)
    for _ in range(3):
        assert not (await asks(mine)).granted_to("b")
    assert mine.calls == {"GET": 3}
    assert other.calls.total()
    assert await other.table.release(lease, None)
    assert other.calls == {"PUT": 1}


async def test_who_is_overtaken_again_and_again_is_noticed(mine: Process, other: Process) -> None:
    lease = await handed_over(other, 0)
    assert not (await asks(mine)).granted_to("b")
    for number in range(OVERTAKEN):
        assert not lease.waited
        assert not (await asks(mine)).waited
        passed = await other.table.pass_on(lease, f"a{number + 1}", 30.0)
        assert passed is not None
        lease = passed
    assert mine.calls.total()
    refused = await asks(mine)
    assert mine.calls == {"GET": 1, "PUT": 1}
    assert (refused.holder, refused.waited) == (lease.holder, False)
    assert mine.calls == {}
    await asks(mine)
    assert mine.calls == {"GET": 1}
    passed = await other.table.pass_on(lease, "next", 30.0)
    assert passed is not None
    assert passed.waited
    assert await other.table.release(passed, None)
    granted = await asks(mine)
    assert granted.granted_to("b")
    assert not granted.waited
    await mine.table.release(granted, None)
    assert not (await taken(other)).waited


async def test_who_has_gone_is_not_waited_for_long(mine: Process, other: Process) -> None:
    lease = await handed_over(other, 0)
    await asks(mine)
    lease = (await other.table.pass_on(lease, "a", 30.0)) or lease
    place_of = [lease]
    for number in range(OVERTAKEN):
        place_of.append((await other.table.pass_on(place_of[-1], f"b{number}", 30.0)) or lease)
    await asks(mine)
    lease = place_of[-1]
    waited = []
    for number in range(REMEMBERED + 2):
        passed = await other.table.pass_on(lease, f"c{number}", 30.0)
        assert passed is not None
        lease = passed
        waited.append(lease.waited)
    assert waited == [True] * REMEMBERED + [False] * 2


async def test_a_wait_that_was_given_up_is_not_told(mine: Process, other: Process) -> None:
    lease = await handed_over(other, 0)
    await asks(mine)
    await mine.clock.advance(WAITING_MEMORY + 0.001)
    for number in range(OVERTAKEN):
        lease = (await other.table.pass_on(lease, f"a{number + 1}", 30.0)) or lease
    assert mine.calls.total()
    await asks(mine)
    assert mine.calls == {"GET": 1}


async def test_who_is_overtaken_is_told_to_ask_by_the_watch(mine: Process, other: Process, place: Place) -> None:
    lease = await handed_over(other, 0)
    await asks(mine)
    for number in range(OVERTAKEN):
        lease = (await other.table.pass_on(lease, f"a{number + 1}", 30.0)) or lease
        before = mine.table.learn(place.found(CART_LEASE))
        assert (before is None) is (number == OVERTAKEN - 1)
    await asks(mine)
    lease = (await other.table.pass_on(lease, "next", 30.0)) or lease
    assert mine.table.learn(place.found(CART_LEASE)) is not None


@pytest.mark.parametrize("trouble", ["conflict", "failure"])
async def test_a_mark_that_fails_leaves_a_refusal(mine: Process, other: Process, place: Place, trouble: str) -> None:
    lease = await handed_over(other, 0)
    await asks(mine)
    for number in range(OVERTAKEN):
        lease = (await other.table.pass_on(lease, f"a{number + 1}", 30.0)) or lease

    async def interfere(verb: str, name: str) -> None:
        if verb == "PUT" and trouble == "failure":
            raise OutcomeUnknownError("no answer")
        if verb == "PUT":
            place.annotate(name, x=str(mine.trouble.calls["PUT"]))

    mine.trouble.before = interfere
    assert (await asks(mine)).holder == lease.holder


async def test_what_is_free_by_then_is_taken_rather_than_marked(mine: Process, other: Process) -> None:
    lease = await handed_over(other, 0)
    await asks(mine)
    for number in range(OVERTAKEN):
        lease = (await other.table.pass_on(lease, f"a{number + 1}", 30.0)) or lease

    async def release(verb: str, name: str) -> None:
        if verb == "PUT":
            mine.trouble.before = None
            await other.table.release(lease, None)

    mine.trouble.before = release
    assert (await asks(mine)).granted_to("b")


async def test_the_first_fence_after_a_deletion_is_the_servers_time_by_then() -> None:
    shelf = Shelf()
    async with process(shelf) as mine:
        lease = await taken(mine)
        shelf.delete(CART_LEASE)
        assert await mine.table.release(lease, None) is False
        shelf.now += 1000.0
        assert (await taken(mine)).fence == lease.fence + 1000


async def test_those_who_take_and_free_it_at_once_all_get_it(mine: Process, other: Process) -> None:
    async def edit(one: Process, holder: str) -> None:
        while not (lease := await one.table.acquire(CART, holder, 30.0, None, waiting=True)).granted_to(holder):
            await asyncio.sleep(0.001)
        assert await one.table.release(lease, None)

    async with asyncio.timeout(50.0):
        await asyncio.gather(*(edit((mine, other)[number % 2], f"h{number}") for number in range(40)))


async def test_in_one_process_nobody_writes_while_another_one_does(
    mine: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grelmicro.backends.kubernetes.turns.QUEUEING", 3600.0)
    lease = await taken(mine)
    await mine.table.release(lease, None)
    assert mine.calls.total()
    holders = [f"h{number}" for number in range(10)]
    async with asyncio.timeout(20.0):
        answers = await asyncio.gather(*(mine.table.acquire(CART, holder, 30.0, None) for holder in holders))
    assert sum(answer.granted_to(holder) for answer, holder in zip(answers, holders, strict=True)) == 1
    assert mine.calls == {"PUT": 1, "GET": 9}


async def test_a_write_that_hangs_keeps_nobody_for_long(mine: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grelmicro.backends.kubernetes.turns.QUEUEING", 0.01)
    await mine.table.release(await taken(mine), None)
    hangs = asyncio.Event()

    async def hang(verb: str, name: str) -> None:
        mine.trouble.before = None
        await hangs.wait()

    mine.trouble.before = hang
    hanging = asyncio.create_task(mine.table.acquire(CART, "a", 30.0, None))
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(mine.table.acquire(CART, "b", 30.0, None), 10.0)).granted_to("b")
    hangs.set()
    assert (await hanging).granted_to("b")
