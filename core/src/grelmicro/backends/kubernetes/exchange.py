"""One request and its answer, within its time: refused credentials are read again, who is too busy is asked later."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from ssl import SSLCertVerificationError
from typing import Literal

from grelmicro.backends.kubernetes.access import Access, reason
from grelmicro.backends.kubernetes.channel import Channel, ClosedError, DisconnectedError, UnsentError, drop
from grelmicro.backends.kubernetes.library import (
    ClientConnectorError,
    ClientError,
    ClientHttpProxyError,
    ClientProxyConnectionError,
    ClientResponse,
    ClientSSLError,
    ClientTimeout,
    ConnectionTimeoutError,
    InvalidURL,
)
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutcomeUnknownError

Kind = Literal["ordinary", "urgent", "watch"]

PLACES: Mapping[Kind, int] = {"ordinary": 10, "urgent": 4, "watch": 2}
"""How many requests of each kind are under way at once, each on its own connection: none waits for another kind."""

EARLY = 0.6
"""The share of a request's time within which there is a connection: whatever takes longer was surely not sent."""
SHORTEST = 0.001
"""Seconds that aiohttp has for a connection at least: 0 would mean that it has any time."""

SHORTEST_PAUSE = 0.5
"""Seconds before an API server that is too busy is asked again, if it asks for less."""
USUAL_PAUSE = 1.0
"""Seconds if it does not say how many."""

FAILURES = (TimeoutError, ClientError, OSError)
"""What the library raises when no answer came."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request."""

    method: str
    path: str
    what: str
    """What it does, for error texts."""
    kind: Kind
    content: bytes | None = None

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.method != "GET"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    content: bytes
    headers: Mapping[str, str]

    @property
    def date(self) -> float | None:
        """When it was sent, by the clock of the API server."""
        return seconds_of_date(self.headers.get("Date"))


class Exchange:
    """Sends requests.

    Args:
        access: the way to the API server.
        limit: seconds that a request may take, all its waits included.
        title: what the server is called in error texts.
    """

    def __init__(self, access: Access, limit: float, title: str) -> None:
        self._access = access
        self._limit = limit
        self._title = title
        self._loop = asyncio.get_running_loop()
        self._places = {kind: asyncio.Semaphore(number) for kind, number in PLACES.items()}

    async def ask(self, call: Call) -> Reply:
        """Send a request until there is an answer that is final, or the time is over.

        Raises:
            BackendUnavailableError: it was not sent, or changes nothing.
            OutcomeUnknownError: it was sent, and no answer came.
        """
        deadline = self._loop.time() + self._limit
        refused = disconnected = False
        while True:
            headers = await self._get_headers(call, deadline)
            try:
                async with self._place(call, deadline), self._access.lend() as channel, asyncio.timeout_at(deadline):
                    response = await self._send(channel, call, headers, deadline)
                    try:
                        reply = Reply(response.status, await response.read(), response.headers)
                    finally:
                        drop(response)
            except FAILURES as error:
                # An idle connection may end just when it is used. Reading twice is harmless, writing twice is not.
                if disconnected or call.changes or not isinstance(error, DisconnectedError):
                    raise self._failure(error, call) from error
                disconnected = True
                continue
            if reply.status == 401 and not refused:
                refused = True
                await self._renew(headers, deadline)
                continue
            pause = _pause(reply, call.changes)
            if pause is None or self._loop.time() + pause >= deadline:
                return reply
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def stream(self, call: Call, seconds: float) -> AsyncIterator["Stream | Reply"]:
        """What the API server sends on and on; or its refusal.

        Args:
            call: one that changes nothing.
            seconds: after which it must have ended.

        Raises:
            BackendUnavailableError: there is no connection, or no answer.
        """
        deadline = self._loop.time() + self._limit
        async with self._place(call, deadline), self._access.lend() as channel:
            headers = await self._get_headers(call, deadline)
            response = await self._begin(channel, call, headers, deadline)
            if response.status == 401:
                drop(response)
                await self._renew(headers, deadline)
                response = await self._begin(channel, call, await self._get_headers(call, deadline), deadline)
            try:
                if response.status == 200:
                    yield Stream(response, self._loop.time() + seconds)
                else:
                    yield Reply(response.status, await self._read(response, call, deadline), response.headers)
            finally:
                drop(response)

    @asynccontextmanager
    async def _place(self, call: Call, deadline: float) -> AsyncIterator[None]:
        """One of the places for requests of this kind."""
        place = self._places[call.kind]
        if place.locked():
            try:
                async with asyncio.timeout_at(self._early(deadline)):
                    await place.acquire()
            except TimeoutError as error:
                raise BackendUnavailableError(
                    f"{call.what}: all {PLACES[call.kind]} connections to {self._title} for such requests were in use, "
                    f"and none became free within {self._limit * EARLY:g} s: find out why the server is slow"
                ) from error
        else:
            await place.acquire()
        try:
            yield
        finally:
            place.release()

    def _early(self, deadline: float) -> float:
        """When there has to be a connection."""
        now = self._loop.time()
        return now + EARLY * (deadline - now)

    async def _send(self, channel: Channel, call: Call, headers: Mapping[str, str], deadline: float) -> ClientResponse:
        seconds = max(self._early(deadline) - self._loop.time(), SHORTEST)
        return await channel.request(
            call.method,
            self._access.host + call.path,
            data=call.content,
            headers=headers,
            timeout=ClientTimeout(total=None, connect=seconds),
        )

    async def _begin(self, channel: Channel, call: Call, headers: Mapping[str, str], deadline: float) -> ClientResponse:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._send(channel, call, headers, deadline)
        except FAILURES as error:
            raise self._failure(error, call) from error

    async def _read(self, response: ClientResponse, call: Call, deadline: float) -> bytes:
        try:
            async with asyncio.timeout_at(deadline):
                return await response.read()
        except FAILURES as error:
            raise self._failure(error, call) from error

    async def _get_headers(self, call: Call, deadline: float) -> Mapping[str, str]:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._access.headers()
        except Exception as error:  # a hook of the application's client may fail in any way
            raise BackendUnavailableError(
                f"{call.what}: the client of {self._title} gives no credentials ({reason(error)}): "
                "check what refreshes them"
            ) from error

    async def _renew(self, refused: Mapping[str, str], deadline: float) -> None:
        """Read the credentials again; where that takes too long, it goes on for the next request."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._access.renew(refused)

    def _failure(self, error: Exception, call: Call) -> CoordinationBackendError:
        """What is raised when there is no answer."""
        unsent = self._why_unsent(error)
        if unsent is not None:
            lasting = isinstance(error, ClientSSLError | UnsentError | InvalidURL)
            return BackendUnavailableError(f"{call.what}: {self._title} cannot be used: {unsent}", lasting=lasting)
        if isinstance(error, TimeoutError):
            why = f"did not answer within {self._limit:g} s"
        else:
            why = "ended the connection before it answered"
        text = f"{call.what}: {self._title} {why}"
        if call.changes:
            return OutcomeUnknownError(f"{text}; whether it was done is not known: check the server and the network")
        return BackendUnavailableError(f"{text}: check the server and the network")

    def _why_unsent(self, error: Exception) -> str | None:
        """Why there was no connection to send anything on; None if there was, or may have been, one."""
        proxy = self._access.proxy
        by_proxy = f"the proxy {proxy}, which the kubeconfig, or HTTPS_PROXY and NO_PROXY, put before it"
        if isinstance(error, ConnectionTimeoutError):
            way = f" by way of {by_proxy}" if proxy else ""
            return f"no connection within {self._limit * EARLY:g} s{way}: check the address and the network"
        if isinstance(error, ClientProxyConnectionError):
            return f"no connection to {by_proxy}: check that it runs, or exclude the API server from it"
        if isinstance(error, ClientSSLError):
            complaint = _complaint(error)
            return f"there is no trust in its certificate{complaint}: check the certificate authority and the address"
        if isinstance(error, ClientConnectorError):
            return f"{error.os_error.strerror or 'no connection'}: check that it runs, and the address"
        if isinstance(error, ClientHttpProxyError):
            return f"{by_proxy}, answered {error.status}: check the proxy, or exclude the API server from it"
        if isinstance(error, ClosedError):
            return "it is being closed"
        if isinstance(error, UnsentError | InvalidURL):
            return "no request can be made of its address, the proxy's and the headers: check the configuration"
        return None


class Stream:
    """What the API server sends on and on.

    Args:
        response: where it comes from.
        ends_at: when it must have ended, by the event loop's clock.
    """

    def __init__(self, response: ClientResponse, ends_at: float) -> None:
        self._response = response
        self._ends_at = ends_at

    async def line(self) -> bytes:
        """The next line; empty at the end.

        Raises:
            TimeoutError, ClientError, OSError, ValueError: there is none.
        """
        async with asyncio.timeout_at(self._ends_at):
            return await self._response.content.readline()


def _complaint(error: ClientSSLError) -> str:
    """What is wrong with a certificate, in the words of OpenSSL."""
    cause = error.__cause__
    return f" ({cause.verify_message})" if isinstance(cause, SSLCertVerificationError) else ""


def _pause(reply: Reply, changes: bool) -> float | None:
    """Seconds after which to ask again; None if the answer is final."""
    if reply.status == 429 or (reply.status >= 500 and "Retry-After" in reply.headers and not changes):
        return max(_retry_after(reply), SHORTEST_PAUSE)
    return None


def _retry_after(reply: Reply) -> float:
    """Seconds that the API server asks to wait for."""
    text = reply.headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    until, now = seconds_of_date(text), reply.date
    return USUAL_PAUSE if until is None or now is None else until - now


@lru_cache(maxsize=8)
def seconds_of_date(text: str | None) -> float | None:
    """The time of a header, in seconds since 1970; None if it has none."""
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None
