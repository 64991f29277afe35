"""The Kubernetes API server of the tests: shared by all processes of a run, with rights and outages that are real."""

import asyncio
import fcntl
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.servers.fixtures import StartKubernetes
from tests.servers.kubernetes import GUEST, Namespace, Object
from tests.servers.together import SharedHome


def body(name: str, **annotations: str) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "annotations": annotations, "labels": {"app": "test"}},
        "spec": {"holderIdentity": "me"},
    }


def test_a_namespace_keeps_leases_as_they_were_written(kubernetes_namespace: Namespace) -> None:
    assert kubernetes_namespace.leases() == []
    assert kubernetes_namespace.lease("one") is None
    made = kubernetes_namespace.create(body("one", first="1", second="2"))
    assert made["metadata"]["annotations"] == {"first": "1", "second": "2"}
    made["metadata"]["annotations"]["third"] = "3"
    kubernetes_namespace.replace(made)
    [kept] = kubernetes_namespace.leases()
    assert kept["metadata"]["annotations"] == {"first": "1", "second": "2", "third": "3"}
    assert kept["metadata"]["labels"] == {"app": "test"}
    with pytest.raises(AssertionError, match="HTTP 409"):
        kubernetes_namespace.replace(made)
    kubernetes_namespace.delete("one")
    assert kubernetes_namespace.leases() == []


def test_a_guest_may_do_what_is_allowed_and_nothing_else(kubernetes_namespace: Namespace) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{kubernetes_namespace.name}/leases"
    api = kubernetes_namespace.api
    assert api.ask("POST", path, body("one"), GUEST)[0] == 403
    kubernetes_namespace.allow("create", "get")
    assert api.ask("POST", path, body("one"), GUEST)[0] == 201
    assert api.ask("GET", f"{path}/one", user=GUEST)[0] == 200
    assert api.ask("GET", path, user=GUEST)[0] == 403
    kubernetes_namespace.allow("list")
    assert api.ask("GET", path, user=GUEST)[0] == 200
    assert api.ask("GET", f"{path}/one", user=GUEST)[0] == 403
    kubernetes_namespace.allow()
    assert api.ask("GET", path, user=GUEST)[0] == 403


@pytest.mark.slow
@pytest.mark.xdist_group("kubernetes")
async def test_an_api_server_and_its_etcd_are_paused_killed_and_started_again(
    start_kubernetes: StartKubernetes,
) -> None:
    server = start_kubernetes()
    namespace = server.api.namespace()
    namespace.create(body("kept"))
    for part in (server, server.etcd):
        part.pause()
        asked = asyncio.create_task(asyncio.to_thread(namespace.lease, "kept"))
        done, _ = await asyncio.wait({asked}, timeout=0.1)
        assert not done
        part.resume()
        assert await asked is not None
    server.etcd.kill()
    server.kill()
    with pytest.raises(OSError, match="refused"):
        namespace.leases()
    server.start()
    assert len(namespace.leases()) == 1


def test_what_processes_share_ends_with_the_last_of_them(tmp_path: Path) -> None:
    users = tmp_path / "users"
    with ExitStack() as stack:
        first, last = (stack.enter_context(users.open("a")) for _ in range(2))
        fcntl.flock(first, fcntl.LOCK_SH)
        home = SharedHome(users)
        with subprocess.Popen(["sleep", "300"], cwd=home.path) as inhabitant:
            fcntl.flock(last, fcntl.LOCK_SH)
            first.close()
            with pytest.raises(subprocess.TimeoutExpired):
                inhabitant.wait(0.5)
            last.close()
            assert inhabitant.wait(30.0) == -signal.SIGKILL
        assert home.ending.wait(30.0) == 0
    assert not home.path.exists()
