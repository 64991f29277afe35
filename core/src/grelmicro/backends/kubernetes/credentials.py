"""What tells how the API server is reached and who asks: a service account, a kubeconfig, or a client."""

import copy
import os
from pathlib import Path
from typing import Any, Protocol

from grelmicro.backends.kubernetes.library import (
    ApiClient,
    Configuration,
    InClusterConfigLoader,
    KubeConfigLoader,
    KubeConfigMerger,
)
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
    """The header that tells who asks, as the library writes it."""
    settings = await configuration.auth_settings()
    return {str(each["key"]).title(): str(each["value"]).strip() for each in settings.values() if each["value"]}


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
        InClusterConfigLoader(token, certificates, try_refresh_token=False).load_and_set(configuration)
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

    title = "the kubeconfig"
    refreshes = True
    is_live = False

    def __init__(self, paths: str, context: str | None) -> None:
        self.namespace: str | None = None
        self._paths = paths
        self._context = context
        self._loader: KubeConfigLoader | None = None
        self._runs_a_program = False

    async def load(self, *, anew: bool = True) -> Configuration:
        """See `Source.load`; a program that gives tokens runs when the last one expires, or `anew`."""
        loader = self._loader
        if anew or loader is None:
            loader = self._read()
        configuration = Configuration()
        await loader.load_and_set(configuration)
        self._loader = loader
        # One that does not say until when its token is good runs again only when the token is refused.
        self.refreshes = not self._runs_a_program or hasattr(loader, "exec_plugin_expiry")
        return configuration

    async def headers(self, configuration: Configuration) -> dict[str, str]:
        """See `Source.headers`."""
        return await authorization(configuration)

    def _read(self) -> KubeConfigLoader:
        merged = KubeConfigMerger(self._paths).config
        if merged is not None and self._context is not None:
            _check_context(merged.value, self._context)
        # What it would write into the file are tokens of a kind of login that Kubernetes has removed.
        loader = KubeConfigLoader(config_dict=merged, active_context=self._context, config_base_path=None)
        context: dict[str, Any] = (loader.current_context or {}).get("context", {})
        self.namespace = context.get("namespace") or None
        self._runs_a_program = merged is not None and _runs_a_program(merged.value, context.get("user"))
        return loader


def _check_context(kubeconfig: dict[str, Any], context: str) -> None:
    if context not in [getattr(each, "value", each).get("name") for each in kubeconfig.get("contexts") or ()]:
        raise SettingsValidationError(
            "Kubernetes: context is none of those in the kubeconfig: check the name with `kubectl config get-contexts`"
        )


def _runs_a_program(kubeconfig: dict[str, Any], user: object) -> bool:
    """Whether a program gives the user's tokens."""
    for each in kubeconfig.get("users") or ():
        entry = getattr(each, "value", each)
        if entry.get("name") == user:
            return "exec" in (entry.get("user") or {})
    return False


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
