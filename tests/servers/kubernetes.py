"""A Kubernetes API server with its etcd, two users, and what tests do to them as an administrator."""

import http.client
import json
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit
from uuid import uuid4

from tests.servers.found import Binary
from tests.servers.home import Home, free_port
from tests.servers.server import PATIENCE, Server

Object = dict[str, Any]

ADMIN = "admin"
"""A user who may do everything."""

GUEST = "guest"
"""A user who may do nothing but what a test allows."""

GROUPS = {ADMIN: "system:masters", GUEST: "guests"}

LEASES = "coordination.k8s.io"
ROLES = "/apis/rbac.authorization.k8s.io/v1/namespaces"


class Etcd(Server):
    """Where an API server keeps everything. What it has acknowledged survives SIGKILL, though not the machine's end."""

    def __init__(self, home: Home, binary: Binary) -> None:
        super().__init__(home, binary)
        self._port_of_peers = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str | Path]:
        return [
            *(self.binary.path, "--data-dir", self.folder / "data", "--unsafe-no-fsync"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", f"http://127.0.0.1:{self._port_of_peers}"),
        ]

    def ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@dataclass(frozen=True)
class Api:
    """An API server as its users find it. Its methods block, like those of `Server`.

    Nothing here asks it for indented output, which it also gives to curl and to browsers: old versions that were built
    with a new Go crash on that.
    """

    address: str
    """`https://127.0.0.1:PORT`."""

    folder: Path
    """Where its certificate is, and the files for its users."""

    @property
    def certificate(self) -> Path:
        """What its users trust."""
        return self.folder / "apiserver.crt"

    @property
    def trust(self) -> ssl.SSLContext:
        """What it is recognised by."""
        return ssl.create_default_context(cafile=self.certificate)

    def token(self, user: str) -> str:
        """What a user is known by."""
        return f"token-of-{user}-{self.folder.name}"

    def kubeconfig(self, user: str = ADMIN, namespace: str = "default", address: str = "") -> Path:
        """A kubeconfig file for a user; `address` is another way to the server, such as that of a proxy.

        It has a context for every user, named after the user.
        """
        server: Object = {"server": address or self.address}
        if server["server"].startswith("https:"):
            server["certificate-authority"] = str(self.certificate)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": user,
            "clusters": [{"name": "tests", "cluster": server}],
            "users": [{"name": each, "user": {"token": self.token(each)}} for each in GROUPS],
            "contexts": [
                {"name": each, "context": {"cluster": "tests", "user": each, "namespace": namespace}} for each in GROUPS
            ],
        }
        path = self.folder / f"{user}.{namespace}.{urlsplit(server['server']).port}.kubeconfig"
        temporary = path.with_name(f"{path.name}.{uuid4().hex}")
        temporary.write_text(json.dumps(config))  # YAML contains JSON
        return temporary.rename(path)

    def ask(self, method: str, path: str, body: Object | None = None, user: str = ADMIN) -> tuple[int, Object]:
        """The status and the object that it answers.

        Raises:
            OSError: it cannot be reached, or does not answer within five seconds.
        """
        parts = urlsplit(self.address)
        connection = http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=5.0, context=self.trust)
        try:
            headers = {"Authorization": f"Bearer {self.token(user)}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:  # as /readyz answers
            return answer.status, {"text": text.decode(errors="replace")}

    def namespace(self) -> "Namespace":
        """A new namespace. Nothing would empty one that is deleted, so it stays as long as the server."""
        name = f"test-{uuid4().hex[:12]}"
        expect(201, self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}}))
        return Namespace(self, name)


@dataclass(frozen=True)
class Namespace:
    """A namespace of an API server, for one test."""

    api: Api
    name: str

    @property
    def url(self) -> str:
        """Where a store of the user who may do everything finds it."""
        return self.url_of(ADMIN)

    def url_of(self, user: str, address: str = "") -> str:
        """Where a user's store finds it; see `kubeconfig`."""
        return url_of(self.kubeconfig(user, address), self.name)

    def kubeconfig(self, user: str = ADMIN, address: str = "") -> Path:
        """A kubeconfig file for a user whose namespace it is; `address` is another way to the server."""
        return self.api.kubeconfig(user, self.name, address)

    def allow(self, *verbs: str, user: str = GUEST) -> None:
        """From now on a user may do just this with leases: `get`, `list`, `watch`, `create`, `update`, `patch`."""
        rules = [{"apiGroups": [LEASES], "resources": ["leases"], "verbs": list(verbs)}] if verbs else []
        self._put("roles", {"metadata": {"name": f"leases-of-{user}"}, "rules": rules})
        self._put(
            "rolebindings",
            {
                "metadata": {"name": f"leases-of-{user}"},
                "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
                "roleRef": {"kind": "Role", "name": f"leases-of-{user}", "apiGroup": "rbac.authorization.k8s.io"},
            },
        )
        until = monotonic() + PATIENCE
        for verb in ("get", "list", "watch", "create", "update", "patch", "delete"):
            while self._allowed(verb, user) != (verb in verbs):  # a server learns of a new role a moment later
                assert monotonic() < until, f"the server does not notice that {user} may {', '.join(verbs)}"
                sleep(0.005)

    def _put(self, kind: str, body: Object) -> None:
        status, _ = self.api.ask("PUT", f"{ROLES}/{self.name}/{kind}/{body['metadata']['name']}", body)
        if status == 404:
            expect(201, self.api.ask("POST", f"{ROLES}/{self.name}/{kind}", body))

    def _allowed(self, verb: str, user: str) -> bool:
        attributes = {"namespace": self.name, "verb": verb, "group": LEASES, "resource": "leases"}
        review = {"spec": {"user": user, "groups": [GROUPS[user]], "resourceAttributes": attributes}}
        answer = expect(201, self.api.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review))
        return bool(answer["status"]["allowed"])

    # Leases, as an administrator sees and edits them

    def lease(self, name: str) -> Object | None:
        """A Lease; None when there is none."""
        status, body = self.api.ask("GET", f"{self._leases}/{name}")
        return None if status == 404 else expect(200, (status, body))

    def leases(self) -> list[Object]:
        """All Leases."""
        items: list[Object] = expect(200, self.api.ask("GET", self._leases))["items"]
        return items

    def create(self, body: Object) -> Object:
        """A new Lease; the object as it was stored."""
        return expect(201, self.api.ask("POST", self._leases, body))

    def replace(self, body: Object) -> Object:
        """Replace a Lease, if the body's resourceVersion is that of the object; the object as it was stored."""
        return expect(200, self.api.ask("PUT", f"{self._leases}/{body['metadata']['name']}", body))

    def delete(self, name: str) -> None:
        """Delete a Lease."""
        expect(200, self.api.ask("DELETE", f"{self._leases}/{name}"))

    @property
    def _leases(self) -> str:
        return f"/apis/{LEASES}/v1/namespaces/{self.name}/leases"


def url_of(kubeconfig: Path | str, namespace: str = "") -> str:
    """Where a store finds what a kubeconfig file leads to."""
    return f"kubernetes://{namespace}?kubeconfig={quote(str(kubeconfig), safe='')}"


def kubeconfig_of(url: str) -> str:
    """The kubeconfig file that a URL names."""
    return parse_qs(urlsplit(url).query)["kubeconfig"][0]


def expect(status: int, answer: tuple[int, Object]) -> Object:
    """The object of an answer, which has this status."""
    assert answer[0] == status, f"HTTP {answer[0]}: {answer[1]}"
    return answer[1]


class KubernetesServer(Server):
    """One API server before an etcd of its own, which is started with it, and ended, paused and restarted apart.

    Args:
        home: where it lives.
        binaries: what `kubernetes_binaries` gives: kube-apiserver and etcd.
        options: as on its command line, with underscores.
    """

    poll = 0.05

    def __init__(self, home: Home, binaries: Sequence[Binary], options: Mapping[str, str | int]) -> None:
        binary, etcd = binaries
        super().__init__(home, binary)
        self.etcd = Etcd(home, etcd)
        self.options = dict(options)
        self.api = Api(f"https://127.0.0.1:{self.port}", self.folder)
        self.place = Namespace(self.api, "default")
        """The namespace of `url`."""
        users = (f'{self.api.token(user)},{user},{user},"{group}"\n' for user, group in GROUPS.items())
        (self.folder / "tokens.csv").write_text("".join(users))
        subprocess.run(
            ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.folder / "accounts.key"],
            check=True,
            capture_output=True,
        )

    @property
    def url(self) -> str:
        return self.place.url

    def command(self) -> Sequence[str | Path]:
        key = self.folder / "accounts.key"
        options: dict[str, str | int | Path] = {
            "etcd-servers": self.etcd.url,
            "bind-address": "127.0.0.1",
            "secure-port": self.port,
            "cert-dir": self.folder,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": key,
            "service-account-key-file": key,
            "token-auth-file": self.folder / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.0.0.0/24",
            "disable-admission-plugins": "ServiceAccount",
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        return [self.binary.path, *(f"--{name}={value}" for name, value in options.items())]

    def start(self) -> None:
        if not self.etcd.running:
            self.etcd.start()
        super().start()

    def ready(self) -> bool:
        try:
            return self.api.certificate.exists() and self.api.ask("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def revive(self) -> None:
        """End every outage, and wait until both serve."""
        for part in (self.etcd, self):
            if part.running:
                part.resume()
            else:
                part.start()
        until = monotonic() + PATIENCE
        while not self.ready():
            assert monotonic() < until, "the API server does not come back"
            sleep(self.poll)
