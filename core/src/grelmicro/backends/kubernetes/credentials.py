"""What tells how the API server is reached and who asks: a service account, a kubeconfig, or a client."""

import copy
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grelmicro.backends.kubernetes.kubeconfig import Choice, check_file, files_of
from grelmicro.backends.kubernetes.library import (
    ApiClient,
    ConfigException,
    Configuration,
    InClusterConfigLoader,
    KubeConfigLoader,
    KubeConfigMerger,
)
from grelmicro.backends.kubernetes.program import Credentials, CredentialsError, Program
from grelmicro.errors import SettingsValidationError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token and the namespace of its service account."""


def default_kubeconfig() -> str:
    """The files that are read when none is named."""
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


class Source(Protocol):
    """What tells how the API server is reached."""

    title: str
    """What it is called in error texts."""
    namespace: str | None
    """The one that it is in; known once it was loaded."""
    refreshes: bool
    """Whether what it tells changes by itself, so that `load` is called again now and then."""
    is_live: bool
    """Whether it is asked for the headers of each request, since only it knows when they change."""

    async def load(self, *, anew: bool = True) -> Configuration:
        """What it tells now.

        Args:
            anew: whether nothing that it remembers may be used.
        """

    async def headers(self, configuration: Configuration) -> dict[str, str]:
        """The headers that tell who asks."""


async def authorization(configuration: Configuration) -> dict[str, str]:
    """The header that tells who asks, as the library writes it.

    Raises:
        CredentialsError: it could not be sent.
    """
    settings = await configuration.auth_settings()
    headers = {str(each["key"]).title(): str(each["value"]).strip() for each in settings.values() if each["value"]}
    if not all(value.isprintable() for value in headers.values()):
        raise CredentialsError("the token has a line break or another control character in it")
    return headers


class ServiceAccount:
    """The service account of the pod that this process runs in."""

    title = "the service account of this pod"
    refreshes = True
    is_live = False

    def __init__(self) -> None:
        self.namespace: str | None = None

    @staticmethod
    def is_here() -> bool:
        """Whether there is one."""
        return "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").is_file()

    async def load(self, *, anew: bool = True) -> Configuration:
        """See `Source.load`; files are always read."""
        configuration = Configuration()
        # The hook of the library looks at the wall clock, and keeps a token for a minute even when it is refused.
        token, certificates = str(SERVICE_ACCOUNT / "token"), str(SERVICE_ACCOUNT / "ca.crt")
        try:
            InClusterConfigLoader(token, certificates, try_refresh_token=False).load_and_set(configuration)
        except ConfigException as error:  # its texts name a file or a variable
            raise CredentialsError(str(error).rstrip(".")) from error
        place = SERVICE_ACCOUNT / "namespace"
        self.namespace = (place.read_text().strip() or None) if place.is_file() else None
        return configuration

    async def headers(self, configuration: Configuration) -> dict[str, str]:
        """See `Source.headers`."""
        return await authorization(configuration)


class Kubeconfig:
    """One or several kubeconfig files.

    Args:
        paths: as in `KUBECONFIG`.
        context: the context to use; None: the current one.
    """

    is_live = False

    def __init__(self, paths: str, context: str | None) -> None:
        self.title = f"the kubeconfig {paths}"
        self.namespace: str | None = None
        self.refreshes = True
        self._paths = paths
        self._context = context
        self._read: _Read | None = None
        self._given: Credentials | None = None

    async def load(self, *, anew: bool = True) -> Configuration:
        """See `Source.load`; a program that gives credentials runs when the last ones end, or `anew`.

        Raises:
            SettingsValidationError: the files are none, or what they say is wrong.
            CredentialsError, OSError: a program that gives credentials fails.
        """
        read, given = self._read, self._given
        if anew or read is None or (given is not None and given.are_over()):
            read, given = self._read_files(), None
            if read.program is not None:
                given = await read.program.run()
                read.user.update(given.user)
        configuration = Configuration()
        # What it would write into the file are tokens of a kind of login that Kubernetes has removed.
        loader = KubeConfigLoader(config_dict=read.merged, active_context=read.context, config_base_path=None)
        await loader.load_and_set(configuration)
        self._read, self._given, self.namespace = read, given, read.namespace
        # One that does not say until when its token is good runs again only when the token is refused.
        self.refreshes = given is None or given.ends_at is not None
        return configuration

    async def headers(self, configuration: Configuration) -> dict[str, str]:
        """See `Source.headers`."""
        return await authorization(configuration)

    def _read_files(self) -> "_Read":
        for path in files_of(self._paths):
            check_file(path)
        merged = KubeConfigMerger(self._paths).config
        if merged is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._paths)
        choice = Choice(merged.value, self.title, self._context)
        return _Read(merged, choice.context, choice.user, choice.namespace, self._take_program(choice.user))

    def _take_program(self, user: dict[str, Any]) -> Program | None:
        """The program that gives a user's credentials, which the library then does not run: it could not be ended."""
        if "exec" not in user:
            return None
        settings = user.pop("exec")
        for each in ("token", "tokenFile", "username", "password"):
            user.pop(each, None)
        program = Program.of(settings) if isinstance(settings, dict) else None
        if program is None:
            raise SettingsValidationError(
                f"Kubernetes: {self.title} has an exec that is no program: it needs command, apiVersion, "
                "a list args if any, and a list env of names and values if any"
            )
        return program


@dataclass(frozen=True, slots=True)
class _Read:
    """What files say."""

    merged: Any
    """As the library put them together."""
    context: str
    user: dict[str, Any]
    """The part of `merged` that tells who asks."""
    namespace: str | None
    program: Program | None


class UserClient:
    """A client that the application made: it refreshes its own credentials."""

    title = "the configuration of the client"
    refreshes = False
    is_live = True

    def __init__(self, client: ApiClient) -> None:
        self.namespace: str | None = None
        self._client = client

    async def load(self, *, anew: bool = True) -> Configuration:
        """See `Source.load`."""
        configuration = copy.copy(self._client.configuration)
        configuration.retries = False
        return configuration

    async def headers(self, configuration: Configuration) -> dict[str, str]:
        """See `Source.headers`; those of the client's own configuration, which it may refresh."""
        cookie = {"Cookie": self._client.cookie} if self._client.cookie else {}
        return {**self._client.default_headers, **cookie, **await authorization(self._client.configuration)}
