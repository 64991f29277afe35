"""Which proxy is before the API server: the answers are those of kubectl."""

import os
import socket
import subprocess
from shutil import which

import pytest

from grelmicro.backends.kubernetes.proxies import proxy_for

PROXY = "http://127.0.0.1:1"

EXCLUDED = [
    ("https://10.96.0.1:443", "10.96.0.1"),
    ("https://10.96.0.1:443", "10.96.0.0/12"),
    ("https://10.96.0.1:443", "172.16.0.0/12, 10.0.0.0/8"),
    ("https://10.96.0.1:443", "10.96.0.1:443"),
    ("https://10.96.0.1", "10.96.0.1:443"),
    ("https://10.96.0.1:6443", "*"),
    ("https://[fd00:beef::1]:443", "fd00:beef::1"),
    ("https://[fd00:beef::1]:443", "[fd00:beef::1]:443"),
    ("https://[fd00:beef::1]:443", "[fd00:beef::1]"),
    ("https://[fd00:beef::1]:443", "fd00::/8"),
    ("https://api.cluster.local:6443", "cluster.local"),
    ("https://api.cluster.local:6443", ".cluster.local"),
    ("https://api.cluster.local:6443", "*.cluster.local"),
    ("https://api.cluster.local:6443", "API.Cluster.Local:6443"),
    ("https://127.0.0.1:6443", ""),
    ("https://127.0.0.2:6443", "elsewhere"),
    ("https://[::1]:6443", ""),
    ("https://localhost:6443", ""),
]

NOT_EXCLUDED = [
    ("https://10.96.0.1:443", ""),
    ("https://10.96.0.1:443", "10.112.0.0/12"),
    ("https://10.96.0.1:443", "10.96.0.1:6443"),
    ("https://10.96.0.1:443", "10.*"),
    ("https://10.96.0.1:443", "96.0.1"),
    ("https://10.96.0.1:443", "10.0.0.0/99,fd00::/8,:443,a/b"),
    ("https://cluster.local:6443", ".cluster.local"),
    ("https://mycluster.local:6443", "cluster.local"),
    ("https://api.cluster.local:6443", "cluster.local:443"),
    ("https://[fd00:beef::1]:443", "fd00:beef::2,10.0.0.0/8"),
]


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)


@pytest.mark.parametrize(("server", "rules"), EXCLUDED)
def test_a_server_that_is_excluded_is_reached_directly(
    server: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", rules)
    assert proxy_for(server) is None


@pytest.mark.parametrize(("server", "rules"), NOT_EXCLUDED)
def test_a_server_that_is_not_excluded_is_reached_by_the_proxy(
    server: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", rules)
    assert proxy_for(server) == PROXY


def test_the_variable_of_the_scheme_in_either_case_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    assert proxy_for("https://10.96.0.1:443") is None
    assert proxy_for("http://10.96.0.1:80") == PROXY
    monkeypatch.setenv("https_proxy", "proxy.corp:3128")
    assert proxy_for("https://10.96.0.1:443") == "http://proxy.corp:3128", "as kubectl takes it"
    monkeypatch.setenv("no_proxy", "10.96.0.0/16")
    assert proxy_for("https://10.96.0.1:443") is None
    assert proxy_for("no URL") is None


@pytest.mark.skipif(which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("rules", ["", "10.96.0.0/12", "10.112.0.0/12", "10.96.0.1:443", "10.96.0.1:6443", "10.*"])
def test_kubectl_goes_the_same_way(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = "https://10.96.0.1:443"
    command = ["kubectl", "get", "--raw", "/version", "--server", server, "--request-timeout=500ms"]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", rules)
        monkeypatch.setenv("KUBECONFIG", os.devnull)
        subprocess.run(command, capture_output=True, timeout=60.0, check=False)
        listening.setblocking(False)
        try:
            asked, _ = listening.accept()
            asked.close()
            by_proxy = True
        except BlockingIOError:
            by_proxy = False
    assert by_proxy is (proxy_for(server) is not None)
