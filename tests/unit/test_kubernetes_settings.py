"""Where the API server is and who asks: arguments, URL, environment, client; what is refused, and what is shown."""

from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.client import ApiClient, Configuration

from grelmicro.backends.kubernetes import (
    Cluster,
    KubernetesLeaderElectionAdapter,
    KubernetesLockAdapter,
    KubernetesScheduleAdapter,
    KubernetesStore,
    credentials,
)
from grelmicro.backends.kubernetes.credentials import Kubeconfig, ServiceAccount
from grelmicro.coordination import Coordination
from grelmicro.errors import SettingsValidationError
from grelmicro.providers.kubernetes import KubernetesProvider
from tests.helpers.api_server import kubeconfig


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not in a pod, and without any kubeconfig."""
    for variable in ("KUBE_NAMESPACE", "KUBE_REQUEST_TIMEOUT", "KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def cluster_of(provider: KubernetesProvider) -> Cluster:
    assert isinstance(provider.store, KubernetesStore)
    return provider.store.cluster


@pytest.mark.parametrize(
    ("url", "namespace", "config", "context", "prefix"),
    [
        ("kubernetes://", None, None, None, "grelmicro"),
        ("kubernetes://shop", "shop", None, None, "grelmicro"),
        ("kubernetes://shop/", "shop", None, None, "grelmicro"),
        ("KUBERNETES://shop", "shop", None, None, "grelmicro"),
        ("kubernetes://shop?prefix=jobs", "shop", None, None, "jobs"),
        (
            "kubernetes://shop?context=kind%3Aone&kubeconfig=%2Fetc%2Fa%20b",
            "shop",
            "/etc/a b",
            "kind:one",
            "grelmicro",
        ),
    ],
)
def test_a_url_says_where(
    url: str, namespace: str | None, config: str | None, context: str | None, prefix: str
) -> None:
    coordination: Any = Coordination.from_url(url)
    for store in (KubernetesProvider.from_url(url).store, coordination.lock_backend.store):
        assert isinstance(store, KubernetesStore)
        assert (store.cluster.namespace, store.cluster.kubeconfig, store.cluster.context) == (
            namespace,
            config,
            context,
        )
        assert store.namespace == prefix


@pytest.mark.parametrize(
    "url",
    [
        "http://shop",
        "kubernetes://secret@shop",
        "kubernetes://me:secret@shop",
        "kubernetes://shop:443",
        "kubernetes://shop/leases",
        "kubernetes://shop#secret",
        "kubernetes://shop?token=secret",
        "kubernetes://shop?context=",
        "kubernetes://shop?prefix=secret&prefix=secret",
        "kubernetes://Secret",
        "kubernetes://[secret",
        "kubernetes://shop?prefix=secret%20prefix",
    ],
)
def test_a_url_that_says_something_else_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsValidationError) as refusal:
        KubernetesProvider.from_url(url)
    assert "secret" not in str(refusal.value).lower()


def test_the_namespace_of_an_application_is_the_prefix_of_its_leases() -> None:
    coordination: Any = Coordination.from_url("kubernetes://shop", namespace="jobs")
    store = coordination.lock_backend.store
    assert (store.cluster.namespace, store.namespace) == ("shop", "jobs")
    coordination = Coordination.from_url("kubernetes://shop?prefix=own", namespace="jobs")
    assert coordination.lock_backend.store.namespace == "own"


@pytest.mark.parametrize("namespace", ["", "Shop", "a.b", "a_b", "-a", "a-", "a" * 64, "a/../b", "a\n", 7])
def test_a_namespace_is_one_that_kubernetes_allows(namespace: Any) -> None:
    with pytest.raises(SettingsValidationError, match="namespace"):
        KubernetesProvider(namespace)


@pytest.mark.parametrize(
    "settings",
    [
        {"request_timeout": 0},
        {"request_timeout": "soon"},
        {"request_timeout": float("inf")},
        {"request_timeout": 60.5},
        {"kubeconfig": ""},
        {"kubeconfig": 7},
        {"context": ""},
        {"prefix": "a b"},
    ],
)
def test_a_setting_that_breaks_a_rule_is_named(settings: dict[str, Any]) -> None:
    (setting,) = settings
    for take in (KubernetesProvider, KubernetesLockAdapter):
        with pytest.raises(SettingsValidationError, match=f"^Kubernetes: {setting} "):
            take(**settings)


def test_the_environment_names_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBE_NAMESPACE", "shop")
    monkeypatch.setenv("KUBE_REQUEST_TIMEOUT", "2.5")
    cluster = cluster_of(KubernetesProvider())
    assert (cluster.namespace, cluster.request_timeout) == ("shop", 2.5)
    cluster = cluster_of(KubernetesProvider("other", request_timeout=7))
    assert (cluster.namespace, cluster.request_timeout) == ("other", 7.0)
    monkeypatch.setenv("KUBE_NAMESPACE", "not a name")
    with pytest.raises(SettingsValidationError, match="KUBE_NAMESPACE"):
        KubernetesProvider()
    monkeypatch.delenv("KUBE_NAMESPACE")
    monkeypatch.setenv("KUBE_REQUEST_TIMEOUT", "1000000")
    with pytest.raises(SettingsValidationError, match="KUBE_REQUEST_TIMEOUT.* less than or equal to 60"):
        KubernetesProvider()


def test_what_is_shown_has_the_namespace_only(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "https://10.0.0.1", {"token": "secret"})
    provider = KubernetesProvider("shop", kubeconfig=path)
    assert provider.safe_url == "kubernetes://shop"
    assert repr(provider) == "KubernetesProvider('kubernetes://shop')"
    assert KubernetesProvider(kubeconfig=path).safe_url == "kubernetes://"


@pytest.mark.parametrize("adapter", [KubernetesLockAdapter, KubernetesLeaderElectionAdapter, KubernetesScheduleAdapter])
def test_an_adapter_takes_what_a_provider_takes(adapter: Any) -> None:
    backend = adapter("shop", kubeconfig="/etc/kube", context="main", prefix="jobs", request_timeout=3)
    cluster = backend.store.cluster
    assert cluster == Cluster("shop", 3.0, "/etc/kube", "main")
    assert backend.store.namespace == "jobs"
    assert adapter(namespace="default").store.cluster.namespace == "default"


async def test_a_client_gives_its_cluster() -> None:
    async with ApiClient(Configuration(host="https://10.0.0.1")) as client:
        provider = KubernetesProvider.from_client(client, "shop", prefix="jobs", request_timeout=3)
        assert cluster_of(provider) == Cluster("shop", 3.0, client=client)
        assert provider.store.namespace == "jobs"
        assert provider.safe_url == "kubernetes://shop"


@pytest.mark.parametrize("client", [None, "https://10.0.0.1", ApiClient, object()])
def test_another_client_is_refused(client: object) -> None:
    with pytest.raises(SettingsValidationError, match=r"takes a kubernetes_asyncio.client.ApiClient, not "):
        KubernetesProvider.from_client(client)


# Where it looks


def in_a_pod(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.mkdir()
    (folder / "token").write_text("token")
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")


def test_a_pod_uses_its_service_account_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "https://10.0.0.1")
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert isinstance(Cluster.at().source(), Kubeconfig)
    in_a_pod(monkeypatch, tmp_path / "account")
    assert isinstance(Cluster.at().source(), ServiceAccount)
    assert isinstance(Cluster.at(kubeconfig=path).source(), Kubeconfig)
    assert isinstance(Cluster.at(context="main").source(), Kubeconfig)
    (tmp_path / "account" / "token").unlink()
    assert isinstance(Cluster.at().source(), Kubeconfig)


def test_a_kubeconfig_is_found_where_kubectl_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SettingsValidationError, match="nothing says where the API server is"):
        Cluster.at().source()
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", "https://10.0.0.1")
    assert isinstance(Cluster.at().source(), Kubeconfig)
    missing = f"{tmp_path / 'missing'}:{tmp_path / 'missing too'}"
    monkeypatch.setenv("KUBECONFIG", missing)
    with pytest.raises(
        SettingsValidationError, match=f"KUBECONFIG names no file that exists: check the path {missing}"
    ):
        Cluster.at().source()
    with pytest.raises(SettingsValidationError, match=f"kubeconfig names no file that exists: .*{tmp_path}"):
        Cluster.at(kubeconfig=tmp_path).source()
