"""What a Lease object says, and how a lease is written into one."""

import json
import re
from typing import Any

import pytest

from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.record import (
    MOST,
    annotated,
    labels,
    next_renewal,
    record_of,
    selector,
    whole_seconds,
    written,
)
from grelmicro.leases import Lease

CART = "lock:cart"
OBJECT = lease_name("grelmicro", CART)

LEASE = Lease(CART, "a", 1_795_000_007, 4, 1_795_000_000.123456, 1_795_000_001.654321, data={"k": "v"})

Body = dict[str, Any]


def stored(body: Body, version: int = 1) -> Body:
    """A body as the server keeps it."""
    metadata = {**body["metadata"], "uid": "u", "resourceVersion": str(version), "managedFields": [{"manager": "x"}]}
    return {**body, "metadata": metadata}


def foreign(**spec: object) -> Body:
    """An object as another program writes it."""
    return stored({"metadata": {"name": OBJECT}, "spec": spec})


def with_annotations(body: Body, **annotations: str) -> Body:
    known = body["metadata"].get("annotations") or {}
    texts = {f"grelmicro.io/{key}": text for key, text in annotations.items()}
    return {**body, "metadata": {**body["metadata"], "annotations": known | texts}}


def test_a_new_object_has_all_that_belongs_to_it() -> None:
    assert written(LEASE, OBJECT, "grelmicro", 30, None) == {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": "grelmicro.lock.cart",
            "labels": {"app.kubernetes.io/managed-by": "grelmicro", "grelmicro.io/prefix": "grelmicro"},
            "annotations": {
                "grelmicro.io/name": "lock:cart",
                "grelmicro.io/fence": "1795000007",
                "grelmicro.io/transitions": "4",
                "grelmicro.io/data": '{"k": "v"}',
            },
        },
        "spec": {
            "holderIdentity": "a",
            "leaseDurationSeconds": 30,
            "leaseTransitions": 1795000007,
            "acquireTime": "2026-11-18T11:06:40.123456Z",
            "renewTime": "2026-11-18T11:06:41.654321Z",
        },
    }


def test_what_is_written_is_read_again() -> None:
    record = record_of(stored(written(LEASE, OBJECT, "grelmicro", 30, None)))
    lease = record.as_lease(CART, seen_at=100.0, now=110.0)
    assert lease == Lease(
        CART, "a", 1_795_000_007, 4, 1_795_000_000.123456, 1_795_000_001.654321, 130.0, 110.0, {"k": "v"}
    )
    assert lease.remaining == 20.0
    assert (record.name, record.version) == (CART, "1")


@pytest.mark.parametrize("seconds", [0.0, 1.0, 1_795_000_000.0, 1_795_000_000.1, 1_795_000_000.9999999, 4e9])
def test_times_have_six_digits_after_the_point(seconds: float) -> None:
    body = written(Lease(CART, "a", 1, 0, seconds, seconds), OBJECT, "grelmicro", 30, None)
    for time in ("acquireTime", "renewTime"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", body["spec"][time])


def test_a_free_lease_keeps_its_fence_has_no_times_and_lasts_a_second() -> None:
    held = record_of(stored(written(LEASE, OBJECT, "grelmicro", 30, None)))
    body = written(Lease(CART, "", LEASE.fence, 4, LEASE.acquired_at, LEASE.renewed_at), OBJECT, "grelmicro", 30, held)
    vacated = {"holderIdentity": "", "leaseDurationSeconds": 1, "acquireTime": None, "renewTime": None}
    assert body["spec"] == {**held.body["spec"], **vacated}
    free = record_of(stored(body)).as_lease(CART, 100.0, 100.0)
    assert (free.live, free.remaining, free.fence, free.transitions, free.data) == (False, 0.0, LEASE.fence, 4, {})
    assert "grelmicro.io/data" not in body["metadata"]["annotations"]


def test_what_is_not_ours_stays_and_who_set_what_is_left_out() -> None:
    body = foreign(strategy="OldestEmulationVersion", holderIdentity="b")
    body["metadata"] |= {"labels": {"team": "x"}, "annotations": {"note": "y"}, "finalizers": ["f"]}
    new = written(LEASE, OBJECT, "grelmicro", 30, record_of(body))
    assert new["spec"]["strategy"] == "OldestEmulationVersion"
    assert new["metadata"]["labels"] == {"team": "x"} | labels("grelmicro")
    assert new["metadata"]["annotations"]["note"] == "y"
    assert new["metadata"]["finalizers"] == ["f"]
    assert new["metadata"]["uid"] == "u"
    assert new["metadata"]["resourceVersion"] == "1"
    assert "managedFields" not in new["metadata"]


def test_a_manager_that_is_set_stays_and_the_prefix_is_ours() -> None:
    body = foreign()
    body["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "Helm", "grelmicro.io/prefix": "other"}
    new = written(LEASE, OBJECT, "grelmicro", 30, record_of(body))
    assert new["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "Helm",
        "grelmicro.io/prefix": "grelmicro",
    }
    assert selector("grelmicro") == "grelmicro.io/prefix=grelmicro"


def test_what_was_noted_about_the_record_before_is_left_out() -> None:
    held = record_of(with_annotations(stored(written(LEASE, OBJECT, "grelmicro", 30, None)), observed="o", touched="t"))
    new = written(LEASE, OBJECT, "grelmicro", 30, held)["metadata"]["annotations"]
    assert sorted(new) == ["grelmicro.io/data", "grelmicro.io/fence", "grelmicro.io/name", "grelmicro.io/transitions"]


def test_an_annotation_alone_is_changed_without_the_rest() -> None:
    held = record_of(stored(written(LEASE, OBJECT, "grelmicro", 30, None)))
    new = annotated(held, "grelmicro.io/touched", "x")
    assert new["spec"] == held.body["spec"]
    assert new["metadata"]["annotations"] == {**held.annotations, "grelmicro.io/touched": "x"}
    assert record_of({**new, "metadata": {**new["metadata"], "resourceVersion": "2"}}).identity == held.identity


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None, "leaseDurationSeconds": None, "renewTime": None}])
def test_fields_may_be_missing(spec: Body | None) -> None:
    record = record_of(
        {"metadata": {"uid": "u", "resourceVersion": "1", "labels": None, "annotations": None}, "spec": spec}
    )
    lease = record.as_lease(CART, 100.0, 100.0)
    assert lease == Lease(CART, "", 0, 0, 0.0, 0.0, 0.0, 100.0)
    assert record.name is None
    assert record.last_fence is None


@pytest.mark.parametrize("text", ["2026-11-18T11:06:40Z", "2026-11-18T11:06:40.000000Z", "2026-11-18T12:06:40+01:00"])
def test_times_are_read_as_other_programs_write_them(text: str) -> None:
    assert record_of(foreign(renewTime=text)).renewed_at == 1_795_000_000.0


@pytest.mark.parametrize("text", ["", "soon", "2026-11-18T11:06:40"])
def test_a_time_that_is_none_is_no_time(text: str) -> None:
    assert record_of(foreign(renewTime=text)).renewed_at == 0.0


# What another program did since


def test_data_of_a_fence_before_is_nobodys() -> None:
    body = stored(written(LEASE, OBJECT, "grelmicro", 30, None))
    body["spec"] |= {"holderIdentity": "theirs", "leaseTransitions": LEASE.fence + 2}
    lease = record_of(body).as_lease(CART, 100.0, 100.0)
    assert (lease.holder, lease.fence, lease.transitions, lease.data) == ("theirs", LEASE.fence + 2, 6, {})


def test_transitions_of_another_program_are_counted_on() -> None:
    assert record_of(foreign(leaseTransitions=7)).as_lease(CART, 0.0, 0.0).transitions == 7


def test_transitions_that_were_set_back_are_believed() -> None:
    body = stored(written(LEASE, OBJECT, "grelmicro", 30, None))
    body["spec"]["leaseTransitions"] = 3
    lease = record_of(body).as_lease(CART, 0.0, 0.0)
    assert (lease.transitions, lease.data) == (3, {})


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", '{"k": 1}', '{"k": null}'])
def test_data_that_is_none_is_no_data(text: str) -> None:
    body = with_annotations(stored(written(LEASE, OBJECT, "grelmicro", 30, None)), data=text)
    assert record_of(body).as_lease(CART, 0.0, 0.0).data == {}


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "٣", " 4", "99999999999", str(MOST + 1)])
def test_numbers_that_are_none_are_not_believed(text: str) -> None:
    body = with_annotations(stored(written(LEASE, OBJECT, "grelmicro", 30, None)), fence=text)
    record = record_of(body)
    assert record.last_fence is None
    assert record.as_lease(CART, 0.0, 0.0).transitions == LEASE.fence
    if text != str(MOST + 1):
        body = with_annotations(stored(written(LEASE, OBJECT, "grelmicro", 30, None)), transitions=text)
        assert record_of(body).as_lease(CART, 0.0, 0.0).transitions == LEASE.fence


def test_data_of_any_text_is_kept() -> None:
    data = {"ü\n": "🔒\u0000\ud800", "": ""}
    body = written(Lease(CART, "a", 1, 0, data=data), OBJECT, "grelmicro", 30, None)
    text = json.loads(json.dumps(body).encode())
    assert record_of(stored(text)).as_lease(CART, 0.0, 0.0).data == data


# Renewals


def renewed_after(last: float, wall: float) -> float:
    held = record_of(stored(written(Lease(CART, "a", 1, 0, last, last), OBJECT, "grelmicro", 30, None)))
    return record_of(stored(written(Lease(CART, "a", 1, 0, last, wall), OBJECT, "grelmicro", 30, held))).renewed_at


@pytest.mark.parametrize("passed", [0.0, 1e-6, 0.1, 0.999, -0.5, -5.0, 1.0, 5.0])
def test_a_renewal_is_seen_by_who_compares_whole_seconds(passed: float) -> None:
    last = 1_795_000_000.5
    renewed = renewed_after(last, last + passed)
    assert int(renewed) != int(last)
    assert abs(renewed - (last + passed)) <= max(1.0, 1.0 - passed)


@pytest.mark.parametrize("every", [0.0, 0.01, 0.1, 0.33, 0.67, 0.9, 1.0, 2.0])
@pytest.mark.parametrize("step", [0.0, -3.0, -30.0, -3600.0], ids=lambda step: f"clock set by {step:g} s")
def test_no_renewal_has_the_time_of_an_earlier_one(every: float, step: float) -> None:
    wall = last = 1_795_000_000.3
    seen = [last]
    for number in range(500):
        wall += every + (step if number == 250 else 0.0)
        last = next_renewal(last, wall)
        seen.append(last)
    assert len({int(renewed) for renewed in seen}) == len(seen)
    assert seen == sorted(seen)


def test_a_time_that_no_renewal_wrote_is_not_gone_on_from() -> None:
    assert renewed_after(253_402_300_799.0, 1_795_000_000.0) == 1_795_000_000.0


def test_another_holder_begins_with_the_clock() -> None:
    held = record_of(stored(written(LEASE, OBJECT, "grelmicro", 30, None)))
    lease = Lease(CART, "b", LEASE.fence + 1, 5, LEASE.renewed_at, LEASE.renewed_at)
    assert written(lease, OBJECT, "grelmicro", 30, held)["spec"]["renewTime"] == "2026-11-18T11:06:41.654321Z"


@pytest.mark.parametrize(
    ("ttl", "seconds"), [(1e-9, 1), (0.5, 1), (1.0, 1), (1.000_000_1, 1), (1.000_001, 2), (60, 60)]
)
def test_a_duration_is_rounded_up(ttl: float, seconds: int) -> None:
    assert whole_seconds(ttl) == seconds


def test_each_part_of_the_spec_that_a_renewal_can_change_is_its_identity() -> None:
    body = stored(written(LEASE, OBJECT, "grelmicro", 30, None))
    record = record_of(body)
    for field, value in (
        ("holderIdentity", "b"),
        ("leaseDurationSeconds", 31),
        ("leaseTransitions", 8),
        ("acquireTime", "2026-11-18T11:06:40.123457Z"),
        ("renewTime", "2026-11-18T11:06:41.654322Z"),
    ):
        changed = record_of({**body, "spec": {**body["spec"], field: value}})
        assert changed.identity != record.identity
        assert changed.digest != record.digest
    same = record_of({**with_annotations(body, other="x"), "spec": {**body["spec"], "strategy": "x"}})
    assert (same.identity, same.digest) == (record.identity, record.digest)
