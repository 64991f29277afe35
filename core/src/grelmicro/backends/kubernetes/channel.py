"""Connections to an API server: a pool of its own, and nothing that is sent twice."""

import hashlib
from pathlib import Path
from typing import Any
from urllib.request import getproxies, proxy_bypass

from grelmicro.backends.kubernetes.library import (
    URL,
    ClientConnectorError,
    ClientError,
    ClientHandlerType,
    ClientOSError,
    ClientRequest,
    ClientResponse,
    ClientSession,
    Configuration,
    RESTClientObject,
    ServerDisconnectedError,
)


class DisconnectedError(ClientError):
    """The connection ended after something may have been sent."""


class ClosedError(ClientError):
    """The channel was closed before anything was sent."""


async def _once(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """Send a request, and never again: by itself aiohttp repeats a PUT whose connection ended without an answer."""
    try:
        return await handler(request)
    except ClientConnectorError:
        raise
    except (ClientOSError, ServerDisconnectedError) as error:
        raise DisconnectedError(str(error)) from error


class Channel:
    """A session with a pool of its own, made as the library makes one: TLS, client certificates, proxies.

    Only the session itself is not the library's: that one looks into the environment and into `~/.netrc` in a thread
    at each request, so that a renewal would wait for whatever else the application does in threads.

    Args:
        configuration: where the API server is, and how it is reached.
    """

    def __init__(self, configuration: Configuration) -> None:
        proxy = configuration.proxy or _proxy_of_environment(str(configuration.host))
        made = RESTClientObject(configuration, maxsize=0)  # whoever sends requests limits them
        connector = made.pool_manager.connector
        assert connector is not None
        made.pool_manager.detach()  # it leaves its connector to the next session
        self._session = ClientSession(connector=connector, middlewares=(_once,), read_bufsize=2**21)
        self._options: dict[str, Any] = {"allow_redirects": False}
        for option, value in (
            ("proxy", proxy),
            ("proxy_headers", made.proxy_headers),
            ("server_hostname", made.server_hostname),
        ):
            if value:
                self._options[option] = value

    async def request(self, method: str, url: str, **options: Any) -> ClientResponse:
        """Send a request; `options` are those of aiohttp."""
        if self._session.closed:
            raise ClosedError
        return await self._session.request(method, URL(url, encoded=True), **self._options, **options)

    async def close(self) -> None:
        """Close the connections, those in use too."""
        await self._session.close()


def fingerprint(configuration: Configuration) -> object:
    """What a channel depends on: one that was made of another is of no use any more."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return (
        configuration.host,
        configuration.verify_ssl,
        configuration.disable_strict_ssl_verification,
        configuration.tls_server_name,
        configuration.proxy,
        *(None if path is None else hashlib.sha256(Path(path).read_bytes()).digest() for path in files),
    )


def _proxy_of_environment(host: str) -> str | None:
    """The proxy that `HTTPS_PROXY`, `NO_PROXY` and so on name for the API server."""
    url = URL(host)
    if url.host is None or proxy_bypass(url.host):
        return None
    return getproxies().get(url.scheme)
