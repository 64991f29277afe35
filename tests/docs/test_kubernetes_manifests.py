"""The manifests are what the pages show; an API server takes them, and the Role is what a client needs, no less."""

import asyncio
import copy
import json
import logging
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import yaml

from grelmicro.backends.kubernetes.errors import ROLE
from grelmicro.coordination import Coordination, process
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases import DroppingLeases
from grelmicro.leases.identity import process_id
from grelmicro.providers.kubernetes import KubernetesProvider, lease_name
from tests.docs.examples import blocks
from tests.docs.pages import PAGES
from tests.docs.test_stores import use_everything
from tests.repo.source import ROOT
from tests.servers.kubernetes import ADMIN, Namespace, Object, expect

MANIFESTS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/manifests").iterdir())}

PLACES = {
    "ServiceAccount": "api/v1/namespaces/{}/serviceaccounts",
    "Role": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Deployment": "apis/apps/v1/namespaces/{}/deployments",
    # An API server older than 1.21 knows the same object by its former version.
    "CronJob": "apis/batch/v1beta1/namespaces/{}/cronjobs",
}

VERBS = ["get", "list", "watch", "create", "update"]


def objects(name: str) -> list[Object]:
    """The objects of a manifest."""
    return list(yaml.safe_load_all(MANIFESTS[name]))


def moved(body: Object, namespace: str) -> Object:
    """An object in another namespace than that of the manifest."""
    body = copy.deepcopy(body)
    for place in (body["metadata"], *body.get("subjects", ())):
        assert place["namespace"] == "shop"
        place["namespace"] = namespace
    return body


def missing(sent: object, stored: object, path: str = "") -> list[str]:
    """What an API server did not take of what was sent: it leaves out what it does not know, and says nothing."""
    if isinstance(sent, dict) and isinstance(stored, dict):
        return [part for key in sent for part in missing(sent[key], stored.get(key), f"{path}.{key}")]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        return [part for at, each in enumerate(sent) for part in missing(each, stored[at], f"{path}[{at}]")]
    return [] if sent == stored else [path]


def send(namespace: Namespace, body: Object, *, dry: bool = False) -> Object:
    """Create an object of a manifest in a namespace; as it was stored, or would be."""
    body = moved(body, namespace.name)
    if body["kind"] == "CronJob":
        assert body["apiVersion"] == "batch/v1"
        body["apiVersion"] = "batch/v1beta1"
    path = PLACES[body["kind"]].format(namespace.name)
    return expect(201, namespace.api.ask("POST", f"/{path}{'?dryRun=All' if dry else ''}", body))


def test_manifests_are_those_of_the_pages() -> None:
    shown = {
        block.title: block.text
        for page in ("docs/stores/kubernetes.md", "docs/guides/kubernetes.md")
        for block in blocks(PAGES[page])
        if block.language == "yaml"
    }
    assert shown == MANIFESTS


def test_the_namespace_is_made_before_what_is_in_it() -> None:
    for page in ("docs/stores/kubernetes.md", "docs/guides/kubernetes.md"):
        (commands,) = [block.text for block in blocks(PAGES[page]) if "kubectl apply" in block.text]
        assert commands.splitlines()[:2] == [
            "kubectl create namespace shop",
            "kubectl apply -f docs/manifests/rbac.yaml",
        ]


def test_every_manifest_has_a_version() -> None:
    _, _, versions = PAGES["docs/guides/kubernetes.md"].partition("## Versions")
    assert set(re.findall(r"`(\w+\.yaml)`", versions)) == set(MANIFESTS)


def test_no_other_page_shows_yaml() -> None:
    assert {block.title for text in PAGES.values() for block in blocks(text) if block.language == "yaml"} == set(
        MANIFESTS
    )


def test_the_role_is_the_one_that_a_refusal_logs() -> None:
    (role,) = [body for body in objects("rbac.yaml") if body["kind"] == "Role"]
    assert role == yaml.safe_load(ROLE.format(namespace="shop"))
    assert role["rules"] == [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": VERBS}]


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_api_server_takes_all_of_it(name: str, kubernetes_namespace: Namespace) -> None:
    for body in objects(name):
        stored = send(kubernetes_namespace, body, dry=True)
        sent = moved(body, kubernetes_namespace.name)
        assert missing(sent, {**stored, "apiVersion": sent["apiVersion"]}) == []


def test_what_an_api_server_leaves_out_is_seen(kubernetes_namespace: Namespace) -> None:
    (body,) = objects("deployment.yaml")
    body["spec"]["template"]["spec"]["terminationGracePeriod"] = 40
    stored = send(kubernetes_namespace, body, dry=True)
    assert missing(moved(body, kubernetes_namespace.name), stored) == [".spec.template.spec.terminationGracePeriod"]


def test_the_grace_period_is_longer_than_what_happens_in_it() -> None:
    pod = objects("deployment.yaml")[0]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    requests = int(command[command.index("--timeout-graceful-shutdown") + 1])
    found = re.search(r"Tasks\(shutdown_timeout=(\d+)\)", PAGES["docs/guides/kubernetes.md"])
    assert found is not None
    assert requests + int(found[1]) + 5 < pod["terminationGracePeriodSeconds"]


def test_the_probes_ask_routes_of_the_application() -> None:
    container = objects("deployment.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    routes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert routes == {"startup": "/alive", "liveness": "/alive", "readiness": "/ready"}
    (app,) = [block for block in blocks(PAGES["docs/guides/kubernetes.md"]) if block.title == "app.py"]
    assert all(f'"{path}"' in app.text for path in routes.values())


# Rights


def provider_of_the_service_account(namespace: Namespace, *verbs: str) -> KubernetesProvider:
    """One that asks as the service account of the manifest, whose Role has these verbs."""
    for body in objects("rbac.yaml"):
        if body["kind"] == "Role":
            body["rules"][0]["verbs"] = list(verbs)
        send(namespace, body)
    account = f"/{PLACES['ServiceAccount'].format(namespace.name)}/shop/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = expect(201, namespace.api.ask("POST", account, request))["status"]["token"]
    config = json.loads(namespace.kubeconfig().read_text())
    (user,) = [user for user in config["users"] if user["name"] == ADMIN]
    user["user"] = {"token": token}
    path = Path(namespace.kubeconfig()).with_name(f"shop.{namespace.name}.kubeconfig")
    path.write_text(json.dumps(config))
    return KubernetesProvider(kubeconfig=path, prefix="shop")


async def until_allowed(provider: KubernetesProvider, verb: str) -> None:
    """Wait until the API server has noticed the Role: it learns of one a moment later."""
    store = provider.store
    async with asyncio.timeout(10):
        while True:
            try:
                async with store:
                    if verb == "get":
                        await store.read("lock:unknown")
                    else:
                        assert [lease async for lease in store.scan()] == []
                return
            except BackendUnavailableError:
                await asyncio.sleep(0.02)


async def test_the_service_account_of_the_page_may_do_everything(
    kubernetes_namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    provider = provider_of_the_service_account(kubernetes_namespace, *VERBS)
    await until_allowed(provider, "get")
    caplog.clear()
    await use_everything(provider, caplog)
    async with Coordination(provider) as coordination:
        lease = await coordination.election_backend.acquire("leader:feed", "a", 15.0, data={"url": "here"})
        assert lease.granted_to("a")
        assert await coordination.election_backend.release(lease)
        assert await coordination.schedule_backend.claim("schedule:nightly", 1.0)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_process_publishes_itself_only_where_it_may_delete_that(
    kubernetes_namespace: Namespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    monkeypatch.setattr(process, "PUBLISH_DELAY", 0.0)
    provider = provider_of_the_service_account(kubernetes_namespace, *VERBS, *(["delete"] if allowed else []))
    await until_allowed(provider, "get")
    own = lease_name("shop", f"process:{process_id()}")
    store = provider.store
    assert isinstance(store, DroppingLeases)
    if allowed:
        async with provider, asyncio.timeout(10):
            while not await store.drop(f"process:{process_id()}"):
                await asyncio.sleep(0.02)
    caplog.clear()
    async with Coordination(provider) as coordination, coordination.lock("cart"):
        async with asyncio.timeout(10):
            while allowed and kubernetes_namespace.lease(own) is None:
                await asyncio.sleep(0.02)
        if not allowed:
            await asyncio.sleep(0.5)
            assert kubernetes_namespace.lease(own) is None
        holder = await coordination.holder_of("cart")
        assert holder is not None
        assert holder.process == process_id()
    assert kubernetes_namespace.lease(own) is None
    assert [record.getMessage() for record in caplog.records] == []


async def cannot_ask(provider: KubernetesProvider) -> None:
    """Without `get`, nothing that is not known can be taken."""
    with pytest.raises(BackendUnavailableError, match=r" get leases\.coordination\.k8s\.io"):
        await provider.store.acquire("lock:cart", "a", 60.0)


async def cannot_begin(provider: KubernetesProvider) -> None:
    """Without `create`, a name that has no Lease cannot begin."""
    with pytest.raises(BackendUnavailableError, match=r" create leases\.coordination\.k8s\.io"):
        await provider.store.acquire("lock:cart", "a", 60.0)
    assert (await provider.store.acquire("lock:old", "a", 60.0)).granted_to("a")


async def cannot_go_on(provider: KubernetesProvider) -> None:
    """Without `update`, nothing can be renewed, given back or taken once more."""
    lease = await provider.store.acquire("lock:cart", "a", 60.0)
    assert lease.granted_to("a")
    for change in (provider.store.renew(lease, 60.0), provider.store.release(lease)):
        with pytest.raises(BackendUnavailableError, match=r" update leases\.coordination\.k8s\.io"):
            await change
    with pytest.raises(BackendUnavailableError, match=r" update leases\.coordination\.k8s\.io"):
        await provider.store.acquire("lock:old", "a", 60.0)


async def is_not_woken(provider: KubernetesProvider) -> None:
    """Without `watch`, waiters poll."""
    async with provider.store.watch("lock:cart") as waiter:
        await waiter.wait(1.0)
        assert not waiter.pushes
    assert (await provider.store.acquire("lock:cart", "a", 60.0)).granted_to("a")


async def cannot_list(provider: KubernetesProvider) -> None:
    """Without `list`, waiters poll, and nothing is listed."""
    await is_not_woken(provider)
    with pytest.raises(BackendUnavailableError, match=r" list leases\.coordination\.k8s\.io"):
        _ = [lease async for lease in provider.store.scan()]


WITHOUT: dict[str, Callable[[KubernetesProvider], Coroutine[Any, Any, None]]] = {
    "get": cannot_ask,
    "list": cannot_list,
    "watch": is_not_woken,
    "create": cannot_begin,
    "update": cannot_go_on,
}


@pytest.mark.parametrize("verb", VERBS)
async def test_no_verb_of_the_role_can_be_left_out(
    verb: str, kubernetes_namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    name = lease_name("shop", "lock:old")
    kubernetes_namespace.create(
        {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": {}}
    )
    others = [each for each in VERBS if each != verb]
    provider = provider_of_the_service_account(kubernetes_namespace, *others)
    if verb == "get":
        await asyncio.to_thread(kubernetes_namespace.delete, name)
    await until_allowed(provider, "list" if verb == "get" else "get")
    caplog.set_level(logging.WARNING)
    async with provider:
        await WITHOUT[verb](provider)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert f"may not {verb} leases.coordination.k8s.io in namespace {kubernetes_namespace.name}" in told
    assert 'verbs: ["get", "list", "watch", "create", "update"]' in told
