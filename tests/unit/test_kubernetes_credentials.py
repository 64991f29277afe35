"""Credentials that change while a store is open, TLS as it is set, and proxies."""

import asyncio
import base64
import json
import logging
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web
from kubernetes_asyncio.client import ApiClient, Configuration

from grelmicro.backends.kubernetes import access, credentials
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.requests import Requests
from grelmicro.errors import BackendUnavailableError, OutcomeUnknownError, SettingsValidationError
from tests.helpers.api_server import LEASE, PATH, ApiServer, Seen, certificate, kubeconfig, status
from tests.helpers.worlds import eventually

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


async def test_a_program_that_fails_is_told_at_opening(api: ApiServer, tmp_path: Path, program: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="cannot be read from the kubeconfig") as refusal:
        async with opened(Cluster.at(kubeconfig=kubeconfig(tmp_path / "config", api.url, run_by(program)))):
            pass
    assert "Traceback" not in str(refusal.value)


# What is wrong with a kubeconfig


@pytest.mark.parametrize(
    "content", ["", "[", "{}", "current-context: a", "\x00", '{"current-context": "a", "contexts": [], "clusters": []}']
)
async def test_a_kubeconfig_that_is_none_is_told_at_opening(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(BackendUnavailableError, match="cannot be read from the kubeconfig"):
        async with opened(Cluster.at(kubeconfig=tmp_path / "config")):
            pass


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
            with pytest.raises(BackendUnavailableError, match="no trust in its certificate"):
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


@pytest.mark.parametrize("file", ["token", "ca.crt"])
async def test_a_service_account_that_lacks_something_is_told(account: Path, file: str) -> None:
    (account / file).write_text("")
    with pytest.raises(BackendUnavailableError, match="cannot be read from the service account of this pod"):
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
