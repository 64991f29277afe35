"""Requests to a real API server: what it answers is what the store was built for."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from kubernetes_asyncio.client import ApiClient, Configuration, CoordinationV1Api
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import load_kube_config

from grelmicro.backends.kubernetes import errors
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.requests import ForbiddenError, Requests
from grelmicro.errors import BackendUnavailableError
from tests.servers.kubernetes import GUEST, Namespace, Object

pytestmark = pytest.mark.usefixtures("nothing_left")

WHAT = "trying"


@pytest.fixture
async def requests(kubernetes_namespace: Namespace) -> AsyncIterator[Requests]:
    requests = Requests(Cluster.at(kubeconfig=kubernetes_namespace.kubeconfig()))
    await requests.open()
    yield requests
    await requests.close()


def lease(name: str = "a", **spec: object) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "labels": {"l": "v"}, "annotations": {"note": "ü"}},
        "spec": {"leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z", **spec},
    }


async def test_an_object_is_created_replaced_and_read(requests: Requests, kubernetes_namespace: Namespace) -> None:
    assert requests.namespace == kubernetes_namespace.name
    missing = await requests.read("a", WHAT)
    assert (missing.status, missing.body["reason"]) == (404, "NotFound")
    created = await requests.create(lease(), WHAT)
    assert created.status == 201
    assert created.date is not None
    assert (await requests.create(lease(), WHAT)).status == 409
    changed = {**created.body, "spec": {**created.body["spec"], "holderIdentity": "h"}}
    replaced = await requests.replace("a", changed, WHAT, urgent=True)
    assert (replaced.status, replaced.body["spec"]["holderIdentity"]) == (200, "h")
    assert (await requests.replace("a", changed, WHAT)).status == 409
    assert (await requests.read("a", WHAT)).body == replaced.body
    kubernetes_namespace.delete("a")
    assert (await requests.replace("a", replaced.body, WHAT)).status in (404, 409)


async def test_a_namespace_that_does_not_exist_is_told(kubernetes_namespace: Namespace) -> None:
    requests = Requests(Cluster.at("no-such-namespace", kubernetes_namespace.kubeconfig()))
    await requests.open()
    with pytest.raises(BackendUnavailableError, match="has no namespace no-such-namespace: create it"):
        await requests.create(lease(), WHAT)
    await requests.close()


async def test_an_object_that_breaks_a_rule_is_refused(requests: Requests) -> None:
    for spec, why in (
        (
            {"leaseDurationSeconds": 0},
            "finds the object invalid: .*spec.leaseDurationSeconds: .*must be greater than 0",
        ),
        ({"renewTime": "2026-01-01T00:00:00+00:00 secret"}, "does not accept it: .*parsing time"),
        ({"holderIdentity": "w:task:secret", "leaseDurationSeconds": -5}, "must be greater than 0"),
    ):
        with pytest.raises(BackendUnavailableError, match=why) as refusal:
            await requests.create(lease(**spec), WHAT)
        assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("verb", ["get", "list", "watch", "create", "update"])
async def test_each_right_that_is_missing_is_named(
    kubernetes_namespace: Namespace, verb: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_told", set())
    kubernetes_namespace.allow(*({"get", "list", "watch", "create", "update"} - {verb}))
    requests = Requests(Cluster.at(kubeconfig=kubernetes_namespace.kubeconfig(GUEST)))
    await requests.open()
    made = kubernetes_namespace.create(lease("b"))
    calls: Mapping[str, Callable[[], Awaitable[object]]] = {
        "get": lambda: requests.read("b", WHAT),
        "list": lambda: requests.list("", WHAT, limit=1),
        "watch": lambda: anext(requests.watch("", "0")),
        "create": lambda: requests.create(lease("c"), WHAT),
        "update": lambda: requests.replace("b", made, WHAT),
    }
    for each, call in calls.items():
        if each == verb:
            with pytest.raises(
                ForbiddenError, match=f"does not let guest {verb} leases.coordination.k8s.io in namespace"
            ):
                await call()
        elif each != "watch":
            await call()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert kubernetes_namespace.name in record.message
    await requests.close()


async def test_an_unknown_token_is_told(kubernetes_namespace: Namespace, tmp_path: Path) -> None:
    path = kubernetes_namespace.kubeconfig()
    changed = tmp_path / "config"
    changed.write_text(path.read_text().replace("token-of-admin", "secret-of-admin"))
    requests = Requests(Cluster.at(kubeconfig=changed))
    await requests.open()
    with pytest.raises(BackendUnavailableError, match="does not accept the credentials") as refusal:
        await requests.read("a", WHAT)
    assert "secret" not in str(refusal.value)
    await requests.close()


async def test_a_watch_sees_what_others_change(requests: Requests, kubernetes_namespace: Namespace) -> None:
    version = (await requests.list("", WHAT, limit=1)).body["metadata"]["resourceVersion"]
    started = asyncio.Event()
    watch = requests.watch("l=v", version, started.set)
    first = asyncio.ensure_future(anext(watch))
    await asyncio.wait_for(started.wait(), 10.0)
    made = await asyncio.to_thread(kubernetes_namespace.create, lease())
    event = await asyncio.wait_for(first, 10.0)
    assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "a")
    await asyncio.to_thread(kubernetes_namespace.create, {**lease("b"), "metadata": {"name": "b"}})
    await asyncio.to_thread(kubernetes_namespace.replace, {**made, "spec": {"leaseTransitions": 3}})
    event = await asyncio.wait_for(anext(watch), 10.0)
    assert (event["type"], event["object"]["spec"]) == ("MODIFIED", {"leaseTransitions": 3})
    await watch.aclose()


async def test_pages_follow_each_other(requests: Requests) -> None:
    for number in range(5):
        await requests.create(lease(f"lease-{number}"), WHAT)
    names, token = [], ""
    while True:
        page = await requests.list("l=v", WHAT, limit=2, token=token)
        names += [item["metadata"]["name"] for item in page.body["items"]]
        token = page.body["metadata"].get("continue", "")
        if not token:
            break
    assert names == [f"lease-{number}" for number in range(5)]


async def test_a_client_of_the_application_is_enough(kubernetes_namespace: Namespace) -> None:
    configuration = Configuration()
    await load_kube_config(str(kubernetes_namespace.kubeconfig()), client_configuration=configuration)
    async with ApiClient(configuration) as client:
        requests = Requests(Cluster.of_client(client, kubernetes_namespace.name))
        await requests.open()
        assert (await requests.create(lease(), WHAT)).status == 201
        found = await CoordinationV1Api(client).read_namespaced_lease("a", kubernetes_namespace.name)
        assert found.metadata.name == "a"
        with pytest.raises(ApiException):
            await CoordinationV1Api(client).read_namespaced_lease("b", kubernetes_namespace.name)
        await requests.close()
