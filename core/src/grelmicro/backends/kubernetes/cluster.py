"""Which API server is asked, on whose behalf, and in which of its namespaces."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator

from grelmicro.backends.kubernetes.credentials import (
    Kubeconfig,
    ServiceAccount,
    Source,
    UserClient,
    default_kubeconfig,
)
from grelmicro.backends.kubernetes.library import ApiClient
from grelmicro.config import Config, Seconds, build
from grelmicro.errors import SettingsValidationError

DEFAULT_NAMESPACE = "default"


def _check_label(namespace: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise ValueError(
            "should be the name of a Kubernetes namespace: 1 to 63 lower-case letters, digits or '-', "
            "with a letter or digit at both ends"
        )
    return namespace


class ClusterSettings(Config):
    """What is set of a cluster; `KUBE_NAMESPACE` and `KUBE_REQUEST_TIMEOUT` in the environment."""

    kind: ClassVar[str] = "KUBE"

    namespace: Annotated[str | None, AfterValidator(lambda name: name if name is None else _check_label(name))] = None
    """The Kubernetes namespace; None: the one that the service account or the context is in, else `default`."""
    request_timeout: Seconds = 5.0
    """Seconds after which a request counts as unanswered, all its waits included."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as it is set; what it says of itself is read at opening."""

    namespace: str | None
    """The one that was set."""
    request_timeout: float
    kubeconfig: str | None = None
    context: str | None = None
    client: ApiClient | None = field(default=None, repr=False)

    @classmethod
    def at(
        cls,
        namespace: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
        context: str | None = None,
        request_timeout: float | None = None,
    ) -> Self:
        """The cluster of a kubeconfig, or the one that this process runs in.

        Args:
            namespace: the Kubernetes namespace; or `KUBE_NAMESPACE`, or that of the service account or the context.
            kubeconfig: the path of a file; several are separated as in `KUBECONFIG`.
            context: the name of a context in it, instead of its current one.
            request_timeout: seconds; or `KUBE_REQUEST_TIMEOUT`, or 5.

        Raises:
            SettingsValidationError: a setting breaks a rule.
        """
        settings = _settings(namespace, request_timeout)
        if isinstance(kubeconfig, os.PathLike):
            kubeconfig = os.fspath(kubeconfig)
        for setting, value in (("kubeconfig", kubeconfig), ("context", context)):
            if value is not None and not (isinstance(value, str) and value):
                raise SettingsValidationError(
                    f"Kubernetes: {setting} should be text that is not empty: give it, or leave it out"
                )
        return cls(settings.namespace, settings.request_timeout, kubeconfig, context)

    @classmethod
    def of_client(cls, api_client: object, namespace: str | None = None, request_timeout: float | None = None) -> Self:
        """The cluster of a client of kubernetes-asyncio: its configuration and headers, on connections of its own.

        Raises:
            SettingsValidationError: it is not a `kubernetes_asyncio.client.ApiClient`, or a setting breaks a rule.
        """
        if not isinstance(api_client, ApiClient):
            raise SettingsValidationError(
                "KubernetesProvider.from_client takes a kubernetes_asyncio.client.ApiClient, not "
                f"{type(api_client).__module__}.{type(api_client).__qualname__}: give it the ApiClient that your "
                "API objects use"
            )
        settings = _settings(namespace, request_timeout)
        return cls(settings.namespace, settings.request_timeout, client=api_client)

    @property
    def safe_url(self) -> str:
        """The namespace that was set, as a URL: nothing of the server, and nothing secret."""
        return f"kubernetes://{self.namespace or ''}"

    def source(self) -> Source:
        """What tells how the API server is reached; it looks around in this process now.

        Raises:
            SettingsValidationError: nothing tells it.
        """
        if self.client is not None:
            return UserClient(self.client)
        if self.kubeconfig is None and self.context is None and ServiceAccount.is_here():
            return ServiceAccount()
        paths = self.kubeconfig or default_kubeconfig()
        if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep)):
            if self.kubeconfig is not None:
                raise SettingsValidationError("Kubernetes: kubeconfig names no file that exists: check the path")
            raise SettingsValidationError(
                "Kubernetes: nothing says where the API server is: run in a pod that has a service account, "
                "give kubeconfig=, set the environment variable KUBECONFIG, or have a file ~/.kube/config"
            )
        return Kubeconfig(paths, self.context)


def _settings(namespace: str | None, request_timeout: float | None) -> ClusterSettings:
    given = {"namespace": namespace, "request_timeout": request_timeout}
    return build(ClusterSettings, "Kubernetes", given, name="kube", prefix="KUBE_")
