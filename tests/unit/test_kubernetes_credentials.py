"""Credentials that change while a store is open, TLS as it is set, and proxies."""

import asyncio
import base64
import errno
import json
import logging
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio.client import ApiClient, Configuration

from grelmicro.backends.kubernetes import access, credentials
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.requests import Requests
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError, SettingsValidationError
from tests.helpers.api_server import LEASE, PATH, ApiServer, Seen, certificate, kubeconfig, status
from tests.helpers.worlds import eventually
from tests.servers.home import free_port

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "KUBECONFIG",
        "KUBE_NAMESPACE",
        "KUBERNETES_SERVICE_HOST",
    ):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as api:
        yield api


@asynccontextmanager
async def opened(cluster: Cluster) -> AsyncIterator[Requests]:
    requests = Requests(cluster)
    await requests.open()
    try:
        yield requests
    finally:
        await requests.close()


async def write(requests: Requests) -> int:
    return (await requests.replace("a", LEASE, "renewing 'lock:a'")).status


# Files


async def test_a_refused_token_is_read_again_at_once(api: ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-1\n")
    async with opened(
        Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, {"tokenFile": "token"}))
    ) as requests:
        assert await write(requests) == 200
        token.write_text("secret-2\n")
        api.answers.append(status(401))
        assert await write(requests) == 200
        assert api.tokens == ["Bearer secret-1", "Bearer secret-1", "Bearer secret-2"]


async def test_a_new_token_is_used_soon(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FRESH", 0.05)
    token = tmp_path / "token"
    token.write_text("secret-1")
    async with opened(
        Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, {"tokenFile": "token"}))
    ) as requests:
        token.write_text("secret-2")
        await asyncio.sleep(0.06)
        for _ in range(3):
            assert await write(requests) == 200
    assert api.tokens[-1] == "Bearer secret-2"
    assert access.FRESH < 60


async def test_a_refusal_that_stays_is_told(api: ApiServer, tmp_path: Path) -> None:
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url))) as requests:
        api.answers += [status(401)] * 2
        with pytest.raises(BackendUnavailableError, match="does not accept the credentials, though") as refusal:
            await write(requests)
        assert "secret" not in str(refusal.value)
        assert len(api.seen) == 2
        api.answers.append(status(401))  # for once, and the token is right
        assert await write(requests) == 200


async def test_a_kubeconfig_that_was_written_anew_is_read_after_a_refusal(api: ApiServer, tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", api.url)
    async with opened(Cluster.at(kubeconfig=path)) as requests:
        kubeconfig(path, api.url, {"token": "secret-2"})
        api.answers.append(status(401))
        assert await write(requests) == 200
    assert api.tokens == ["Bearer secret-1", "Bearer secret-2"]


async def test_credentials_that_cannot_be_read_again_are_used_on(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "FRESH", 0.0)
    caplog.set_level(logging.INFO, "grelmicro")
    token = tmp_path / "token"
    token.write_text("secret-1")
    async with opened(
        Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, {"tokenFile": "token"}))
    ) as requests:
        token.unlink()
        for _ in range(3):
            assert await write(requests) == 200
        token.write_text("secret-2")
        for _ in range(3):
            assert await write(requests) == 200
    assert api.tokens[-1] == "Bearer secret-2"
    told = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert "secret" not in str(told)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has one element for each time that a kubeconfig was read: whether it was anew."""
    reads: list[bool] = []
    load = credentials.Kubeconfig.load

    async def counted(self: credentials.Kubeconfig, *, anew: bool = True) -> Configuration:
        reads.append(anew)
        await asyncio.sleep(0.05)
        return await load(self, anew=anew)

    monkeypatch.setattr(credentials.Kubeconfig, "load", counted)
    return reads


async def test_many_refused_requests_read_once(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url))) as requests:
        reads.clear()
        api.answers += [status(401)] * 8
        assert await asyncio.gather(*(write(requests) for _ in range(8))) == [200] * 8
    assert reads == [True]


async def test_a_late_refusal_of_old_credentials_reads_nothing(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "AGAIN", 0.0)
    reads = count_reads(monkeypatch)
    path = kubeconfig(tmp_path / "config", api.url)
    refused = asyncio.Event()

    async def late(seen: Seen) -> web.StreamResponse:
        await refused.wait()
        return await status(401)(seen)

    async with opened(Cluster.at(kubeconfig=path)) as requests:
        reads.clear()
        api.answers += [late, status(401)]
        slow = asyncio.create_task(write(requests))
        await eventually(lambda: len(api.seen) == 1, "it arrived")
        kubeconfig(path, api.url, {"token": "secret-2"})
        assert await write(requests) == 200
        refused.set()
        assert await slow == 200
    assert reads == [True]
    assert api.tokens[-1] == "Bearer secret-2"


# A program


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """One that gives the token of a file, counts its runs in another, and fails without the first."""
    path = tmp_path / "program"
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with open(folder / 'runs', 'a') as runs:\n"
        "    runs.write('x')\n"
        "given = json.loads((folder / 'given').read_text())\n"
        "kind = {'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential'}\n"
        "print(json.dumps({**kind, 'status': given}))\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_script(program: Path, text: str) -> None:
    program.write_text(text)


def run_by(program: Path) -> dict[str, object]:
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}}


def runs(program: Path) -> int:
    return len((program.parent / "runs").read_text())


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_a_program_gives_a_token_again_when_it_is_refused(
    api: ApiServer, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "FRESH", 0.0)
    given = tmp_path / "given"
    given.write_text(json.dumps({"token": "secret-1"}))
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, run_by(program)))) as requests:
        for _ in range(5):
            assert await write(requests) == 200
            await asyncio.sleep(0.1)  # in which it would run again
        assert runs(program) == 1
        given.write_text(json.dumps({"token": "secret-2"}))
        api.answers.append(status(401))
        assert await write(requests) == 200
        assert api.tokens[-1] == "Bearer secret-2"
        assert runs(program) == 2


async def test_a_program_runs_again_before_its_token_ends(
    api: ApiServer, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "FRESH", 0.0)
    given = tmp_path / "given"
    given.write_text(json.dumps({"token": "secret-1", "expirationTimestamp": in_seconds(60)}))
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, run_by(program)))) as requests:
        given.write_text(json.dumps({"token": "secret-2", "expirationTimestamp": in_seconds(3600)}))
        assert await write(requests) == 200
        await eventually(lambda: runs(program) == 2, "the program ran again")
        for _ in range(100):
            assert await write(requests) == 200
            if api.tokens[-1] == "Bearer secret-2":
                break
            await asyncio.sleep(0.02)
        for _ in range(5):
            assert await write(requests) == 200
    assert api.tokens[-1] == "Bearer secret-2"
    assert runs(program) == 2


async def test_a_program_that_fails_is_told_at_opening(
    api: ApiServer,
    tmp_path: Path,
    program: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What it writes may have a secret in it: it is neither told nor logged."""
    path = kubeconfig(tmp_path / "config", api.url, run_by(program))
    with pytest.raises(BackendUnavailableError, match="its program program ended with status 1") as refusal:
        async with opened(Cluster.at(kubeconfig=path)):
            pass
    assert "Traceback" in capfd.readouterr().err
    assert "Traceback" not in str(refusal.value)
    assert caplog.records == []


@pytest.mark.parametrize("answer", ["secret", "[]", "{}", '{"token": ""}', '{"clientCertificateData": "secret"}'])
async def test_a_program_that_gives_something_else_is_told_at_opening(
    api: ApiServer, tmp_path: Path, program: Path, answer: str
) -> None:
    (tmp_path / "given").write_text(answer)
    if answer == "secret":
        write_script(program, "#!/bin/sh\necho secret\n")
    with pytest.raises(BackendUnavailableError, match="its program program (wrote|gave)") as refusal:
        async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, run_by(program)))):
            pass
    assert "secret" not in str(refusal.value)


async def test_a_program_that_hangs_is_ended_with_what_it_began(
    api: ApiServer, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOADING", 1.0)
    write_script(program, f"#!/bin/sh\nsleep 600 &\necho $$ $! > {tmp_path}/begun\nwait\n")
    with pytest.raises(BackendUnavailableError, match="not within 1 s"):
        async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, run_by(program)))):
            pass
    begun = [int(each) for each in (tmp_path / "begun").read_text().split()]
    assert len(begun) == 2
    await eventually(lambda: not any(is_running(each) for each in begun), "both have ended")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # of one whose parent has ended, until somebody collects it


async def test_a_program_gives_a_certificate(authority: Path, of_server: Path, tmp_path: Path, program: Path) -> None:
    mine = certificate(tmp_path / "mine", ca=authority, name="web")
    pem = {"clientCertificateData": "cert.pem", "clientKeyData": "key.pem"}
    (tmp_path / "given").write_text(json.dumps({key: (mine / name).read_text() for key, name in pem.items()}))
    async with ApiServer(certificate=of_server, clients=authority / "cert.pem") as api:
        trust = {"certificate-authority": str(authority / "cert.pem")}
        path = kubeconfig(tmp_path / "config", api.url, run_by(program), cluster=trust)
        async with opened(Cluster.at(kubeconfig=path)) as requests:
            assert await write(requests) == 200
        assert api.seen[-1].peer["subject"] == ((("commonName", "web"),),)


async def test_a_program_is_told_what_kubectl_tells_it(api: ApiServer, tmp_path: Path, program: Path) -> None:
    write_script(
        program,
        "#!/bin/sh\n"
        f'echo "$1 $2 $REGION" > {tmp_path}/told\n'
        f'echo "$KUBERNETES_EXEC_INFO" > {tmp_path}/asked\n'
        'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
        '"status": {"token": "secret-1"}}\'\n',
    )
    user: dict[str, Any] = run_by(program)
    user["exec"] |= {"args": ["get", 7], "env": [{"name": "REGION", "value": "eu"}]}
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, user))) as requests:
        assert await write(requests) == 200
    assert api.tokens == ["Bearer secret-1"]
    assert (tmp_path / "told").read_text() == "get 7 eu\n"
    assert json.loads((tmp_path / "asked").read_text()) == {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }


# What is wrong with a kubeconfig


def broken(change: Callable[[Any], object]) -> str:
    """A kubeconfig in which something was changed."""
    config = {
        "current-context": "main",
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    change(config)
    return json.dumps(config)


NO_PROGRAM = {"exec": {"command": "secret"}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "config is no kubeconfig: it is empty"),
        ("# secret", "config is no kubeconfig: it is empty"),
        ("secret", "config is no kubeconfig: it has no keys"),
        ("[secret]", "config is no kubeconfig: it has no keys"),
        ("token: *secret", "config is no kubeconfig: it is no YAML at line 1, column 8"),
        ("a: b\n  token: secret", "config is no kubeconfig: it is no YAML at line 2"),
        ("\x00", "config is no kubeconfig: it is no YAML"),
        ("users: secret", "config is no kubeconfig: users is no list"),
        ("users: [{user: {token: secret}}]", "config is no kubeconfig: an entry of users has no name"),
        ("users: [secret]", "config is no kubeconfig: an entry of users has no name"),
        ("users: [{name: u, user: secret}]", "config is no kubeconfig: the user 'u' has no keys"),
        ("{}", "config has no current-context"),
        (broken(lambda config: config.pop("current-context")), "config has no current-context"),
        (broken(lambda config: config.update({"current-context": "a"})), "the current-context 'a', which is not in it"),
        (broken(lambda config: config.pop("contexts")), "the current-context 'main', which is not in it"),
        (
            broken(lambda config: config["contexts"][0]["context"].pop("cluster")),
            "has a context 'main' that names no cluster",
        ),
        (broken(lambda config: config.update(clusters=[])), "context 'main' that names the cluster 'c', which is not"),
        (broken(lambda config: config.pop("users")), "context 'main' that names the user 'u', which is not in it"),
        (
            broken(lambda config: config["contexts"][0]["context"].update(user={"token": "secret"})),
            "has a context 'main' that names no user",
        ),
        (broken(lambda config: config["clusters"][0].update(cluster=None)), "has no server"),
        (broken(lambda config: config["clusters"][0].update(cluster={"server": ""})), "has no server"),
        (broken(lambda config: config["users"][0].update(user=NO_PROGRAM)), "has an exec that is no program"),
    ],
)
async def test_what_is_wrong_with_a_kubeconfig_is_told_at_opening(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(SettingsValidationError, match=why) as refusal:
        async with opened(Cluster.at(kubeconfig=tmp_path / "config")):
            pass
    assert str(tmp_path / "config") in str(refusal.value)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("key", ["certificate-authority", "client-certificate", "client-key", "tokenFile"])
async def test_a_file_that_a_kubeconfig_names_has_to_be_there(tmp_path: Path, key: str) -> None:
    entry: dict[str, object] = {key: "missing.pem"}
    user, cluster = ({}, entry) if key == "certificate-authority" else (entry, {})
    path = kubeconfig(tmp_path / "config", "https://10.0.0.1", user, cluster=cluster)
    told = f"names {tmp_path / 'missing.pem'} as {key}, a file that does not exist"
    with pytest.raises(SettingsValidationError, match=told):
        async with opened(Cluster.at(kubeconfig=path)):
            pass
    if key != "tokenFile":
        entry[f"{key}-data"] = "a"
        kubeconfig(path, "https://10.0.0.1", user, cluster=cluster)
        with pytest.raises(SettingsValidationError, match=f"has a {key}-data that is not base64"):
            async with opened(Cluster.at(kubeconfig=path)):
                pass
        entry[f"{key}-data"] = "bm8gUEVN"
        kubeconfig(path, "https://10.0.0.1", user, cluster=cluster)
        if key != "client-key":  # which is not looked at without a certificate
            with pytest.raises(BackendUnavailableError, match="a certificate or key in it cannot be used"):
                async with opened(Cluster.at(kubeconfig=path)):
                    pass


async def test_a_file_that_cannot_be_read_may_be_readable_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(tmp_path / "config", "https://10.0.0.1")

    def fail(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(BackendUnavailableError, match=f"cannot be read from .*Permission denied: {path}"):
        async with opened(Cluster.at(kubeconfig=path)):
            pass


@pytest.mark.parametrize("server", ["127.0.0.1:6443", "ftp://secret", "https://", "https://[secret", "http://a b", "/"])
async def test_an_address_that_is_none_is_told_at_opening(tmp_path: Path, server: str) -> None:
    async with ApiClient(Configuration(host=server)) as client:
        for cluster in (Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", server)), Cluster.of_client(client)):
            with pytest.raises(SettingsValidationError, match="address of the API server in .* is no URL") as refusal:
                async with opened(cluster):
                    pass
            assert "secret" not in str(refusal.value)
    path = kubeconfig(tmp_path / "config", "http://10.0.0.1", cluster={"proxy-url": server})
    with pytest.raises(SettingsValidationError, match="address of the proxy in the kubeconfig .* is no URL"):
        async with opened(Cluster.at(kubeconfig=path)):
            pass


async def test_an_address_with_a_password_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "https://me:secret@10.0.0.1")
    with pytest.raises(SettingsValidationError, match="a user or a password in it") as refusal:
        async with opened(Cluster.at(kubeconfig=path)):
            pass
    assert "secret" not in str(refusal.value)


async def test_a_token_that_cannot_be_sent_is_told_at_opening(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", "https://10.0.0.1", {"token": "secret\ntoken"})
    with pytest.raises(BackendUnavailableError, match="the token has a line break") as refusal:
        async with opened(Cluster.at(kubeconfig=path)):
            pass
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("namespace", ["Bad_NS/../x", 5, True, ["shop"]])
async def test_a_namespace_that_a_file_says_is_checked(api: ApiServer, tmp_path: Path, namespace: Any) -> None:
    path = kubeconfig(tmp_path / "config", api.url, namespace=namespace)
    with pytest.raises(SettingsValidationError, match="namespace in the kubeconfig .* should be the name of a"):
        async with opened(Cluster.at(kubeconfig=path)):
            pass
    async with opened(Cluster.at("own", kubeconfig=path)) as requests:
        assert requests.namespace == "own"


async def test_who_has_no_credentials_asks_as_nobody(encrypted: ApiServer, authority: Path, tmp_path: Path) -> None:
    trust = {"certificate-authority": str(authority / "cert.pem")}
    path = kubeconfig(tmp_path / "config", encrypted.url, cluster=trust)
    config = json.loads(path.read_text())
    context, (user,) = config["contexts"][0]["context"], config["users"]
    for place, key in ((user["user"], "token"), (user, "user"), (context, "user")):
        place[key] = None
        path.write_text(json.dumps(config))
        async with opened(Cluster.at(kubeconfig=path)) as requests:
            assert await write(requests) == 200
        assert "Authorization" not in encrypted.seen[-1].request.headers


async def test_a_context_that_does_not_exist_is_told_at_opening(api: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(SettingsValidationError, match="context is none of those"):
        async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url), context="other")):
            pass


async def test_several_files_are_joined(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(kubeconfig(tmp_path / "config", api.url, namespace="shop").read_text())
    (tmp_path / "one").write_text(json.dumps({**whole, "users": [], "current-context": ""}))
    (tmp_path / "two").write_text(json.dumps({"users": whole["users"]}))
    monkeypatch.setenv(
        "KUBECONFIG", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'missing'}{os.pathsep}{tmp_path / 'two'}"
    )
    async with opened(Cluster.at(context="main")) as requests:
        assert requests.namespace == "shop"
        await write(requests)
    assert api.tokens == ["Bearer secret-1"]
    assert api.seen[-1].call[1] == PATH.replace("default", "shop") + "/a"


@pytest.mark.parametrize(
    ("given", "of_context", "found"), [(None, "", "default"), (None, "shop", "shop"), ("own", "shop", "own")]
)
async def test_the_namespace_is_the_first_that_is_said(
    api: ApiServer, tmp_path: Path, given: str | None, of_context: str, found: str
) -> None:
    async with opened(Cluster.at(given, kubeconfig(tmp_path / "config", api.url, namespace=of_context))) as requests:
        assert (requests.namespace, requests.safe_url) == (found, f"kubernetes://{found}")


# TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("authority"), name="authority")


@pytest.fixture(scope="module")
def of_server(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("server"), ca=authority, name="kubernetes")


@pytest.fixture
async def encrypted(of_server: Path) -> AsyncIterator[ApiServer]:
    async with ApiServer(certificate=of_server) as api:
        yield api


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


async def test_the_certificate_of_the_server_is_checked(
    encrypted: ApiServer, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = authority / "cert.pem"
    for cluster in (
        {"certificate-authority": str(pem)},
        {"certificate-authority-data": data(pem)},
        {"certificate-authority": str(pem), "tls-server-name": "kubernetes"},
        {"insecure-skip-tls-verify": True},
    ):
        async with opened(
            Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", encrypted.url, cluster=cluster))
        ) as requests:
            assert await write(requests) == 200
    for cluster in ({}, {"certificate-authority": str(pem), "tls-server-name": "other"}):
        async with opened(
            Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", encrypted.url, cluster=cluster))
        ) as requests:
            with pytest.raises(BackendUnavailableError, match=r"no trust in its certificate \(.+\): check"):
                await write(requests)


async def test_a_client_certificate_says_who_asks(authority: Path, of_server: Path, tmp_path: Path) -> None:
    mine = certificate(tmp_path / "mine", ca=authority, name="web")
    user = {"client-certificate": str(mine / "cert.pem"), "client-key-data": data(mine / "key.pem")}
    async with ApiServer(certificate=of_server, clients=authority / "cert.pem") as api:
        trust = {"certificate-authority": str(authority / "cert.pem")}
        async with opened(
            Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, user, cluster=trust))
        ) as requests:
            assert await write(requests) == 200
        subject = api.seen[-1].peer["subject"]
        assert subject == ((("commonName", "web"),),)
        async with opened(
            Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, {}, cluster=trust))
        ) as requests:
            with pytest.raises((BackendUnavailableError, OutcomeUnknownError)):
                await write(requests)


async def test_new_certificates_are_used_by_new_connections(
    encrypted: ApiServer, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "FRESH", 0.0)
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes((certificate(tmp_path / "old", name="old") / "cert.pem").read_bytes())
    path = kubeconfig(tmp_path / "config", encrypted.url, cluster={"certificate-authority": "ca.crt"})
    async with opened(Cluster.at(kubeconfig=path)) as requests:
        with pytest.raises(BackendUnavailableError, match="no trust in its certificate"):
            await write(requests)
        trusted.write_bytes((authority / "cert.pem").read_bytes())
        with pytest.raises(BackendUnavailableError, match="no trust in its certificate"):
            await write(requests)
        assert await write(requests) == 200
        busy = len(encrypted.connections)
        assert await write(requests) == 200
        assert len(encrypted.connections) == busy
        begun = monotonic()
    assert monotonic() - begun < 3.0, "closing does not wait for what was to be closed later"


# A service account


@pytest.fixture
def account(encrypted: ApiServer, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a pod finds, with a service account that may use the API server."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text("secret-1\n")
    (folder / "namespace").write_text("shop\n")
    (folder / "ca.crt").write_bytes((authority / "cert.pem").read_bytes())
    monkeypatch.setattr(credentials, "SERVICE_ACCOUNT", folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(encrypted.port))
    return folder


async def test_a_pod_asks_as_its_service_account(
    encrypted: ApiServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(Cluster.at()) as requests:
        assert requests.namespace == "shop"
        assert await write(requests) == 200
        (account / "token").write_text("secret-2")
        encrypted.answers.append(status(401))
        assert await write(requests) == 200
        assert encrypted.tokens == ["Bearer secret-1", "Bearer secret-1", "Bearer secret-2"]
        (account / "token").write_text("secret-3")
        monkeypatch.setattr(access, "FRESH", 0.0)
        await write(requests)
        assert await write(requests) == 200
        assert encrypted.tokens[-1] == "Bearer secret-3"
    async with opened(Cluster.at("own")) as requests:
        assert requests.namespace == "own"


async def test_the_namespace_of_a_service_account_is_checked(account: Path) -> None:
    (account / "namespace").write_text("Bad_NS/../x\n")
    with pytest.raises(SettingsValidationError, match="namespace in the service account of this pod should be"):
        async with opened(Cluster.at()):
            pass


@pytest.mark.parametrize("file", ["token", "ca.crt"])
async def test_a_service_account_that_lacks_something_is_told(account: Path, file: str) -> None:
    (account / file).write_text("")
    with pytest.raises(
        BackendUnavailableError, match="from the service account of this pod .*(Token|Cert) file exists but empty"
    ):
        async with opened(Cluster.at()):
            pass


# A client


async def test_a_client_is_asked_for_its_credentials_at_each_request(api: ApiServer, tmp_path: Path) -> None:
    configuration = Configuration(host=api.url)
    configuration.api_key["BearerToken"] = "Bearer secret-1"
    client = ApiClient(configuration, header_name="X-Team", header_value="shop", cookie="a=b")
    async with client, opened(Cluster.of_client(client, "shop")) as requests:
        await write(requests)
        headers = api.seen[-1].request.headers
        assert (headers["X-Team"], headers["Cookie"], headers["Authorization"]) == (
            "shop",
            "a=b",
            "Bearer secret-1",
        )
        configuration.api_key["BearerToken"] = "Bearer secret-2"
        await client.close()  # its owner's affair
        await write(requests)
        assert api.tokens[-1] == "Bearer secret-2"
        tokens = count(3)

        async def hook(mine: Configuration) -> None:
            mine.api_key["BearerToken"] = f"Bearer secret-{next(tokens)}"

        configuration.refresh_api_key_hook = hook
        api.answers.append(status(401))
        assert await write(requests) == 200
        assert api.tokens[-2:] == ["Bearer secret-3", "Bearer secret-4"]


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_a_client_that_gives_no_credentials_is_told(api: ApiServer, seconds: float) -> None:
    configuration = Configuration(host=api.url)
    async with ApiClient(configuration) as client, opened(Cluster.of_client(client, request_timeout=0.3)) as requests:

        async def hook(mine: Configuration) -> None:
            await asyncio.sleep(seconds)
            raise RuntimeError("secret")

        configuration.api_key["BearerToken"] = "x"
        configuration.refresh_api_key_hook = hook
        with pytest.raises(BackendUnavailableError, match="gives no credentials") as refusal:
            await write(requests)
        assert "secret" not in str(refusal.value)
        assert api.seen == []


async def test_a_client_shares_no_connection_and_no_limit(api: ApiServer) -> None:
    configuration = Configuration(host=api.url)
    configuration.connection_pool_maxsize = 1
    async with ApiClient(configuration) as client:
        await client.rest_client.GET(f"{api.url}{PATH}/a")
        (theirs,) = api.connections
        async with opened(Cluster.of_client(client)) as requests:
            await asyncio.gather(*(write(requests) for _ in range(5)))
        assert len(api.connections) > 2
        assert theirs not in {seen.request.transport for seen in api.seen[1:]}


# Proxies, and other things of the environment


async def test_a_proxy_is_used_as_it_is_set(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "http://api.invalid:6443"
    path = kubeconfig(tmp_path / "config", target, cluster={"proxy-url": api.url})
    async with opened(Cluster.at(kubeconfig=path)) as requests:
        assert await write(requests) == 200
    assert api.seen[-1].request.headers["Host"] == "api.invalid:6443"
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@127.0.0.1:{api.port}")
    monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{api.port}")
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", target))) as requests:
        assert await write(requests) == 200
        assert len(api.seen) == 2
    monkeypatch.setenv("no_proxy", "api.invalid")
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", target))) as requests:
        with pytest.raises(BackendUnavailableError) as refusal:
            await write(requests)
        assert "secret" not in str(refusal.value)
    assert len(api.seen) == 2


async def test_a_proxy_that_is_down_is_named_as_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@127.0.0.1:{free_port()}")
    path = kubeconfig(tmp_path / "config", "http://10.96.0.1:6443")
    async with opened(Cluster.at(kubeconfig=path)) as requests:
        with pytest.raises(BackendUnavailableError) as refusal:
            await write(requests)
    assert "no connection to the proxy http://127.0.0.1:" in str(refusal.value)
    assert "NO_PROXY" in str(refusal.value)
    assert "secret" not in str(refusal.value)


async def test_logins_of_other_programs_are_not_used(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp takes them from there if asked to, and then refuses to send a token."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret")
    monkeypatch.setenv("NETRC", str(netrc))
    async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url))) as requests:
        assert await write(requests) == 200
    assert api.tokens == ["Bearer secret-1"]
