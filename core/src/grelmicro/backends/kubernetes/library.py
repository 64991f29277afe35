"""What is used of kubernetes-asyncio, and of the aiohttp beneath it; or how to install them."""

from grelmicro.backends.needed import needed

with needed("Kubernetes", "kubernetes-asyncio", "kubernetes_asyncio", "kubernetes"):
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
