"""The imitation of an API server refuses what the original refuses, and keeps what it keeps."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import time
from typing import Any

import pytest
from aiohttp import ClientSession

from tests.servers.kubernetes import Namespace, Object
from tests.servers.lease_rules import ANNOTATIONS
from tests.servers.leases_api import LEASES, LeasesApi

Ask = Callable[..., Awaitable[tuple[int, Object]]]
"""Sends a method, a path below the namespace and a body; the status and the object of the answer."""


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[LeasesApi]:
    async with LeasesApi(tmp_path) as api:
        yield api


@pytest.fixture
async def session(api: LeasesApi) -> AsyncIterator[ClientSession]:
    async with ClientSession(api.address, headers={"Authorization": f"Bearer {api.token}"}) as session:
        yield session


@pytest.fixture(params=["the original", "the imitation"])
def ask(request: pytest.FixtureRequest, session: ClientSession) -> Ask:
    """Asks one of both."""
    if request.param == "the original":
        namespace = request.getfixturevalue("kubernetes_namespace")
        assert isinstance(namespace, Namespace)

        async def original(method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
            whole = f"{LEASES}{namespace.name}/leases{path}"
            return await asyncio.to_thread(namespace.api.ask, method, whole, body)

        return original

    async def imitation(method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        async with session.request(method, f"{LEASES}default/leases{path}", json=body) as answer:
            return answer.status, await answer.json()

    return imitation


def lease(name: str = "one", metadata: Mapping[str, Any] | None = None, **spec: Any) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, **(metadata or {})},
        "spec": spec,
    }


IN_ORDER = [
    {},
    {"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": 0},
    {"holderIdentity": "x" * 5000, "leaseDurationSeconds": 2**31 - 1, "leaseTransitions": 2**31 - 1},
    {"acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:00.123456Z"},
    {"holderIdentity": None, "leaseDurationSeconds": None, "acquireTime": None},
]

UNREADABLE = [
    {"leaseTransitions": 2**31},
    {"leaseDurationSeconds": 1.5},
    {"leaseDurationSeconds": "15"},
    {"holderIdentity": 7},
    {"renewTime": "2026-01-01T00:00:00Z"},
    {"renewTime": "2026-01-01T00:00:00.123Z"},
    {"renewTime": "2026-01-01T00:00:00.1234567Z"},
    {"renewTime": "2026-01-01 00:00:00.123456Z"},
    {"renewTime": "2026-01-01T00:00:00.123456"},
]

INVALID = [{"leaseDurationSeconds": 0}, {"leaseDurationSeconds": -1}, {"leaseTransitions": -1}]


@pytest.mark.parametrize("spec", IN_ORDER)
async def test_a_lease_in_order_is_stored_and_given_back(ask: Ask, spec: dict[str, Any]) -> None:
    status, made = await ask("POST", "", lease(**spec))
    assert status == 201
    assert (made["kind"], made["apiVersion"]) == ("Lease", "coordination.k8s.io/v1")
    assert made["metadata"]["uid"]
    assert int(made["metadata"]["resourceVersion"]) > 0
    assert made["spec"] == {field: value for field, value in spec.items() if value is not None}
    assert await ask("GET", "/one") == (200, made)


@pytest.mark.parametrize("spec", UNREADABLE)
async def test_what_cannot_be_read_is_a_bad_request(ask: Ask, spec: dict[str, Any]) -> None:
    assert (await ask("POST", "", lease(**spec)))[0] == 400
    assert (await ask("GET", "/one"))[0] == 404


@pytest.mark.parametrize("spec", INVALID)
async def test_what_breaks_a_rule_is_invalid(ask: Ask, spec: dict[str, Any]) -> None:
    status, answer = await ask("POST", "", lease(**spec))
    assert (status, answer["reason"]) == (422, "Invalid")
    assert (await ask("GET", "/one"))[0] == 404


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("a.b-c.d", 201),
        ("0", 201),
        ("a" * 253, 201),
        (".".join(["a" * 63] * 3), 201),
        ("a" * 254, 422),
        ("A", 422),
        ("a_b", 422),
        ("-a", 422),
        ("a.", 422),
        ("a..b", 422),
        ("a.-b", 422),
        ("ä", 422),
        ("", 422),
    ],
)
async def test_a_name_is_a_subdomain(ask: Ask, name: str, status: int) -> None:
    assert (await ask("POST", "", lease(name)))[0] == status


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ({"labels": {"app.kubernetes.io/managed-by": "grelmicro", "x": ""}}, 201),
        ({"labels": {"x": "a" * 63}}, 201),
        ({"labels": {"x": "a" * 64}}, 422),
        ({"labels": {"x": "a."}}, 422),
        ({"labels": {"x": "a b"}}, 422),
        ({"labels": {"a/b/c": "x"}}, 422),
        ({"labels": {"": "x"}}, 422),
        ({"annotations": {"grelmicro.io/name": "any text: 日本語 \n", "X": ""}}, 201),
        ({"annotations": {"a b": "x"}}, 422),
        ({"annotations": {"x": "a" * (ANNOTATIONS - 1)}}, 201),
        ({"annotations": {"x": "a" * ANNOTATIONS}}, 422),
        ({"annotations": {"x": 1}}, 400),
        ({"namespace": "other"}, 400),
        ({"resourceVersion": "7"}, 500),
    ],
)
async def test_metadata_has_rules(ask: Ask, metadata: dict[str, Any], status: int) -> None:
    assert (await ask("POST", "", lease(metadata=metadata)))[0] == status


async def test_a_name_is_taken_once(ask: Ask) -> None:
    await ask("POST", "", lease())
    status, answer = await ask("POST", "", lease())
    assert (status, answer["reason"]) == (409, "AlreadyExists")


async def test_a_replacement_is_based_on_the_version_that_is_there(ask: Ask) -> None:
    _, made = await ask("POST", "", lease(holderIdentity="a"))
    status, changed = await ask("PUT", "/one", {**made, "spec": {"holderIdentity": "b"}})
    assert (status, changed["spec"]) == (200, {"holderIdentity": "b"})
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]
    status, answer = await ask("PUT", "/one", {**made, "spec": {"holderIdentity": "c"}})
    assert (status, answer["reason"]) == (409, "Conflict")
    assert await ask("GET", "/one") == (200, changed)


async def test_a_replacement_that_changes_nothing_does_not_move_the_version(ask: Ask) -> None:
    _, made = await ask("POST", "", lease(holderIdentity="a"))
    assert await ask("PUT", "/one", made) == (200, made)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"resourceVersion": ""}, 422),
        ({"resourceVersion": "x"}, 500),
        ({"uid": "another"}, 409),
        ({"name": "two"}, 400),
        ({"uid": ""}, 200),
        ({"creationTimestamp": None}, 200),
    ],
)
async def test_a_replacement_has_rules(ask: Ask, change: dict[str, Any], status: int) -> None:
    _, made = await ask("POST", "", lease(holderIdentity="a"))
    metadata = {**made["metadata"], **change}
    assert (await ask("PUT", "/one", {**made, "metadata": metadata}))[0] == status


async def test_what_was_deleted_is_not_replaced_but_made_anew_where_no_uid_is_given(ask: Ask) -> None:
    _, made = await ask("POST", "", lease(holderIdentity="a"))
    assert (await ask("DELETE", "/one"))[0] == 200
    status, answer = await ask("PUT", "/one", made)
    assert (status, answer["reason"]) == (409, "Conflict")
    assert (await ask("PUT", "/one", lease(holderIdentity="b")))[0] == 201


async def test_what_is_not_there_is_not_found(ask: Ask) -> None:
    status, answer = await ask("GET", "/one")
    assert (status, answer["kind"], answer["reason"]) == (404, "Status", "NotFound")
    assert (await ask("DELETE", "/one"))[0] == 404


async def test_a_list_comes_in_pages_and_by_labels(ask: Ask) -> None:
    for name in ("a", "b", "c"):
        await ask("POST", "", lease(name, {"labels": {"part": "yes" if name != "b" else "no"}}))
    _, page = await ask("GET", "?limit=2")
    assert [each["metadata"]["name"] for each in page["items"]] == ["a", "b"]
    _, rest = await ask("GET", f"?limit=2&continue={page['metadata']['continue']}")
    assert [each["metadata"]["name"] for each in rest["items"]] == ["c"]
    assert not rest["metadata"].get("continue")
    _, found = await ask("GET", "?labelSelector=part%3Dyes")
    assert (found["kind"], [each["metadata"]["name"] for each in found["items"]]) == ("LeaseList", ["a", "c"])
    assert int(found["metadata"]["resourceVersion"]) > 0


# What only the imitation does


async def test_a_request_may_be_refused_or_answered_with_a_failure_after_it_was_done(
    api: LeasesApi, session: ClientSession
) -> None:
    path = f"{LEASES}default/leases"
    api.answer(429, "POST", retry_after=7)
    async with session.post(path, json=lease()) as answer:
        assert (answer.status, answer.headers["Retry-After"], (await answer.json())["kind"]) == (429, "7", "Status")
    assert api.leases.objects == {}
    api.answer(500, "POST", done=True)
    async with session.post(path, json=lease()) as answer:
        assert answer.status == 500
    assert len(api.leases.objects) == 1
    assert api.count() == {"POST": 2}


async def test_a_rotated_token_is_no_longer_accepted(api: LeasesApi, session: ClientSession) -> None:
    before = api.token_file.read_text()
    api.rotate(write=False)
    async with session.get(f"{LEASES}default/leases") as answer:
        assert answer.status == 401
    assert api.token_file.read_text() == before
    api.write_token()
    headers = {"Authorization": f"Bearer {api.token_file.read_text()}"}
    async with session.get(f"{LEASES}default/leases", headers=headers) as answer:
        assert answer.status == 200


async def test_its_clock_may_be_ahead_and_each_so_many_requests_slow(api: LeasesApi, session: ClientSession) -> None:
    api.ahead = 600.0
    api.slow_every, api.slow_by = 2, 0.2
    took = []
    for _ in range(2):
        began = asyncio.get_running_loop().time()
        async with session.get(f"{LEASES}default/leases") as answer:
            from_1970 = time()
            date = answer.headers["Date"]
        took.append(asyncio.get_running_loop().time() - began)
    assert took[1] >= 0.2
    assert abs(seconds(date) - from_1970 - 600.0) < 2.0


async def test_a_watch_tells_changes_and_ends(api: LeasesApi, session: ClientSession) -> None:
    path = f"{LEASES}default/leases"
    version = api.leases.version
    watch = f"{path}?watch=1&labelSelector=mine%3Dyes&resourceVersion={version}"
    async with session.get(watch) as stream:
        for name, mine in (("a", "yes"), ("b", "no")):
            await session.post(path, json=lease(name, {"labels": {"mine": mine}}))
        api.leases.remove(("default", "a"))
        told = [json.loads(await stream.content.readline()) for _ in range(2)]
        assert [(each["type"], each["object"]["metadata"]["name"]) for each in told] == [
            ("ADDED", "a"),
            ("DELETED", "a"),
        ]
        api.end_watches()
        assert await stream.content.read() == b""
    api.leases.forget()
    async with session.get(watch) as stream:
        event = json.loads(await stream.content.readline())
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


def seconds(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()
