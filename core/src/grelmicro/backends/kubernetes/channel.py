"""Connections to an API server: a pool of its own, and nothing that is sent twice."""

import asyncio
import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from grelmicro.backends.kubernetes.proxies import proxy_for
from grelmicro.errors import SettingsValidationError

CONNECTING = 0.5
"""Seconds after which a request that was given up has its connection, if it gets one."""

FORM = "give one such as https://10.0.0.1:6443"


class DisconnectedError(ClientError):
    """The connection ended after something may have been sent."""


class ClosedError(ClientError):
    """The channel was closed before anything was sent."""


class UnsentError(ClientError):
    """The request could not be made, so that nothing was sent."""


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
        proxy = configuration.proxy or proxy_for(str(configuration.host))
        self.proxy = _without_login(str(proxy)) if proxy else None
        """The proxy before the API server, without user and password."""
        made = RESTClientObject(configuration, maxsize=0)  # whoever sends requests limits them
        connector = made.pool_manager.connector
        assert connector is not None
        made.pool_manager.detach()  # it leaves its connector to the next session
        self._session = ClientSession(connector=connector, middlewares=(_once,), read_bufsize=2**21)
        self._given_up: set[asyncio.Task[None]] = set()
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
        request = self._session.request(method, URL(url, encoded=True), **self._options, **options)
        sending = asyncio.ensure_future(request)
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._give_up(sending)
            raise
        except ClientError:
            raise
        except ValueError as error:  # of an address or a header; what is wrong with an answer is a ClientError
            raise UnsentError from error

    async def close(self) -> None:
        """Close the connections, those in use too."""
        if self._given_up:
            await asyncio.wait(self._given_up)
        await self._session.close()

    def _give_up(self, sending: "asyncio.Future[ClientResponse]") -> None:
        """Nobody waits for the answer any more.

        It is not cancelled at once: asyncio leaves a connection open for good whose making is cancelled just before TLS
        begins on it.
        """
        task = asyncio.get_running_loop().create_task(_end(sending))
        self._given_up.add(task)
        task.add_done_callback(self._given_up.discard)


async def _end(sending: "asyncio.Future[ClientResponse]") -> None:
    """Let a request that was given up come to its answer, which nobody reads, or end it."""
    await asyncio.wait({sending}, timeout=CONNECTING)
    sending.cancel()
    with suppress(asyncio.CancelledError, TimeoutError, ClientError, OSError, ValueError):
        drop(await sending)


def drop(response: ClientResponse) -> None:
    """End a response. The connection of one that was not read to its end is cut.

    Otherwise TLS would take leave of the server, for as long as that takes, with nobody to close it at the end.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


def check_addresses(configuration: Configuration, title: str) -> None:
    """Check where requests are to go.

    Args:
        configuration: what says it.
        title: what that is called in error texts.

    Raises:
        SettingsValidationError: an address is none; it is not shown, since it may have a password.
    """
    host = str(configuration.host)
    why = _wrong_with(host)
    if why is None and URL(host).raw_user is not None:
        why = "has a user or a password in it, which are not used: leave them out"
    if why is not None:
        raise SettingsValidationError(f"Kubernetes: the address of the API server in {title} {why}")
    proxy = configuration.proxy or proxy_for(host)
    if proxy and (why := _wrong_with(str(proxy))) is not None:
        place = title if configuration.proxy else "the environment"
        raise SettingsValidationError(f"Kubernetes: the address of the proxy in {place} {why}")


def _wrong_with(address: str) -> str | None:
    """What is wrong with the address of a server, if anything."""
    try:
        url = URL(address)
    except ValueError:
        return f"is no URL: {FORM}"
    if url.scheme not in ("http", "https") or not url.raw_host or not address.isprintable() or " " in address:
        return f"is no URL of http or https: {FORM}"
    return None


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


def _without_login(address: str) -> str:
    return str(URL(address).with_user(None).origin())
