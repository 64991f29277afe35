"""Which API server is asked, on whose behalf, and in which of its namespaces."""

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field

from grelmicro.backends.kubernetes.credentials import (
    Kubeconfig,
    ServiceAccount,
    Source,
    UserClient,
    default_kubeconfig,
)
from grelmicro.backends.kubernetes.kubeconfig import files_of
from grelmicro.backends.kubernetes.library import ApiClient
from grelmicro.config import Config, Duration, Seconds, build
from grelmicro.errors import SettingsValidationError

ENV_PREFIX = "KUBE_"
"""What the names of environment variables begin with, unless `env_prefix` says otherwise."""

DEFAULT_NAMESPACE = "default"

LONGEST_REQUEST = 60.0
"""Seconds: an API server itself ends a request after that time."""


def _check_label(namespace: object) -> str:
    if not (isinstance(namespace, str) and re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace)):
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
    request_timeout: Annotated[Seconds, Field(le=LONGEST_REQUEST)] = 5.0
    """Seconds after which a request counts as unanswered, all its waits included; at most 60."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as it is set; what it says of itself is read at opening."""

    namespace: str | None
    """The one that was set."""
    request_timeout: float
    kubeconfig: str | None = None
    context: str | None = None
    client: ApiClient | None = field(default=None, repr=False)
    owns_client: bool = False
    """Whether the client is closed with the store."""

    @classmethod
    def at(
        cls,
        namespace: str | None = None,
        kubeconfig: str | os.PathLike[str] | None = None,
        context: str | None = None,
        request_timeout: Duration | None = None,
        *,
        env_prefix: str = ENV_PREFIX,
    ) -> Self:
        """The cluster of a kubeconfig, or the one that this process runs in.

        Args:
            namespace: the Kubernetes namespace; or `KUBE_NAMESPACE`, or that of the service account or the context.
            kubeconfig: the path of a file; several are separated as in `KUBECONFIG`.
            context: the name of a context in it, instead of its current one.
            request_timeout: seconds, at most 60; or `KUBE_REQUEST_TIMEOUT`, or 5.
            env_prefix: what the names of these variables begin with, but for `KUBECONFIG`.

        Raises:
            SettingsValidationError: a setting breaks a rule.
        """
        settings = _settings(namespace, request_timeout, env_prefix)
        if isinstance(kubeconfig, os.PathLike):
            kubeconfig = os.fspath(kubeconfig)
        for setting, value in (("kubeconfig", kubeconfig), ("context", context)):
            if value is not None and not (isinstance(value, str) and value):
                raise SettingsValidationError(
                    f"Kubernetes: {setting} should be text that is not empty: give it, or leave it out"
                )
        return cls(settings.namespace, settings.request_timeout, kubeconfig, context)

    @classmethod
    def of_client(
        cls,
        api_client: object,
        namespace: str | None = None,
        request_timeout: Duration | None = None,
        *,
        own: bool = False,
    ) -> Self:
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
        return cls(settings.namespace, settings.request_timeout, client=api_client, owns_client=own)

    @property
    def safe_url(self) -> str:
        """The namespace that was set, as a URL: nothing of the server, and nothing secret."""
        return f"kubernetes://{self.namespace or ''}"

    @property
    def place(self) -> Hashable:
        """What distinguishes clusters and their namespaces, as they are set; a client of the application is one."""
        return self.namespace, self.kubeconfig, self.context, self.client and id(self.client)

    def namespace_in(self, source: Source) -> str:
        """The namespace that is used: the one that was set, else the one that `source` is in.

        Raises:
            SettingsValidationError: the source has one that Kubernetes does not allow.
        """
        if self.namespace is not None:
            return self.namespace
        found: object = source.namespace
        if found is None or found == "":
            return DEFAULT_NAMESPACE
        try:
            return _check_label(found)
        except ValueError as error:
            raise SettingsValidationError(
                f"Kubernetes: namespace in {source.title} {error}: correct it there, or give namespace"
            ) from None

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
        if not any(files_of(paths)):
            variable = os.environ.get("KUBECONFIG")
            if self.kubeconfig is not None or variable:
                setting = "kubeconfig" if self.kubeconfig is not None else "the environment variable KUBECONFIG"
                raise SettingsValidationError(
                    f"Kubernetes: {setting} names no file that exists: check the path {paths}"
                )
            raise SettingsValidationError(
                "Kubernetes: nothing says where the API server is: run in a pod that has a service account, "
                "give kubeconfig=, set the environment variable KUBECONFIG, or have a file ~/.kube/config"
            )
        return Kubeconfig(paths, self.context)


def _settings(namespace: str | None, request_timeout: Duration | None, env_prefix: str = ENV_PREFIX) -> ClusterSettings:
    given = {"namespace": namespace, "request_timeout": request_timeout}
    return build(ClusterSettings, "Kubernetes", given, name="kube", prefix=env_prefix)
