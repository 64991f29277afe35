"""What is used of kubernetes-asyncio, and of the aiohttp beneath it; or how to install them."""

from grelmicro.errors import DependencyNotFoundError

try:
    from aiohttp import (
        ClientConnectorError,
        ClientError,
        ClientHandlerType,
        ClientHttpProxyError,
        ClientOSError,
        ClientProxyConnectionError,
        ClientRequest,
        ClientResponse,
        ClientSession,
        ClientSSLError,
        ClientTimeout,
        ConnectionTimeoutError,
        InvalidURL,
        ServerDisconnectedError,
    )
    from kubernetes_asyncio.client import ApiClient, Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader, KubeConfigMerger
    from yaml import YAMLError
    from yaml import safe_load as load_yaml
    from yarl import URL
except ImportError as error:
    raise DependencyNotFoundError(
        'the Kubernetes store needs kubernetes-asyncio: install it with pip install "grelmicro-suite[kubernetes]"'
    ) from error

__all__ = [
    "URL",
    "ApiClient",
    "ClientConnectorError",
    "ClientError",
    "ClientHandlerType",
    "ClientHttpProxyError",
    "ClientOSError",
    "ClientProxyConnectionError",
    "ClientRequest",
    "ClientResponse",
    "ClientSSLError",
    "ClientSession",
    "ClientTimeout",
    "ConfigException",
    "Configuration",
    "ConnectionTimeoutError",
    "InClusterConfigLoader",
    "InvalidURL",
    "KubeConfigLoader",
    "KubeConfigMerger",
    "RESTClientObject",
    "ServerDisconnectedError",
    "YAMLError",
    "load_yaml",
]
