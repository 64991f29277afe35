"""How the API server is reached now: credentials that are kept fresh, and connections that follow them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ssl import SSLError
from typing import Any

from grelmicro import lifecycle
from grelmicro.backends.kubernetes.channel import Channel, check_addresses, fingerprint
from grelmicro.backends.kubernetes.credentials import Source
from grelmicro.backends.kubernetes.library import Configuration
from grelmicro.backends.kubernetes.program import CredentialsError
from grelmicro.errors import GrelmicroError

logger = logging.getLogger("grelmicro.coordination")

FRESH = 30.0
"""Seconds after which credentials that may change are read again. Kubernetes gives a new token minutes before the old
one ends, and a file is read in microseconds."""
AGAIN = 1.0
"""Seconds within which refused credentials are not read again, so that a program that gives them is not run on end."""
LOADING = 30.0
"""Seconds that reading them may take: a program may ask a server of its own."""

HEADERS = {"User-Agent": "grelmicro-suite", "Accept": "application/json", "Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What was read at one time."""

    configuration: Configuration
    made_of: object
    """What the connections depend on."""
    channel: Channel


class Access:
    """The way to an API server.

    Args:
        source: what tells it.
        limit: seconds that a request may take.
    """

    def __init__(self, source: Source, limit: float) -> None:
        self._source = source
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._generation = lifecycle.generation
        self._now: Loaded | None = None
        self._headers: dict[str, str] = {}
        self._read_at = self._renewed_at = -AGAIN - FRESH
        self._reading: asyncio.Task[None] | None = None
        self._works = True
        self._open: set[Channel] = set()
        self._lent = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._closing = self._ends = False
        self._background: set[asyncio.Task[None]] = set()
        # It is cancelled at closing; and by `asyncio.run` in a program that closes nothing.
        self._keeper = self._loop.create_task(self._keep(), name="grelmicro-kubernetes")

    async def open(self) -> None:
        """Read where the API server is, and make a channel to it; nothing is sent.

        Raises:
            SettingsValidationError: what is read breaks a rule.
            Exception: whatever else is wrong with it.
        """
        await asyncio.sleep(0)  # from here on a cancellation of the keeper closes what it finds
        async with asyncio.timeout(LOADING):
            await self._read(anew=True)

    async def close(self) -> None:
        """Close all connections, those in use too."""
        self._closing = True
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        await self._close_channels()

    @property
    def host(self) -> str:
        """Where the API server is, as a URL without credentials."""
        assert self._now is not None
        return str(self._now.configuration.host)

    @property
    def proxy(self) -> str | None:
        """The proxy before the API server, without credentials."""
        assert self._now is not None
        return self._now.channel.proxy

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Channel]:
        """The connections, for one request.

        When the event loop ends, who gives leases back still sends requests; nobody closes anything after them, so
        that each has a channel of its own, which ends with it.
        """
        assert self._now is not None
        if self._ends:
            own = Channel(self._now.configuration)
            try:
                yield own
            finally:
                await own.close()
            return
        self._lent += 1
        self._unused.clear()
        try:
            yield self._now.channel
        finally:
            self._lent -= 1
            if not self._lent:
                self._unused.set()

    async def headers(self) -> Mapping[str, str]:
        """The headers of a request: they tell who asks."""
        assert self._now is not None
        if self._source.is_live:
            return HEADERS | await self._source.headers(self._now.configuration)
        if self._source.refreshes and self._loop.time() - self._read_at >= FRESH:
            self._read_soon(anew=False)
        return self._headers

    async def renew(self, refused: Mapping[str, str]) -> None:
        """Read the credentials again, since the API server refused them; the old ones stay where that fails.

        Args:
            refused: the headers that it refused: who read others meanwhile need not read again.
        """
        known = self._source.is_live or refused is self._headers
        if known and self._loop.time() - self._renewed_at >= AGAIN:
            await asyncio.wait({self._read_soon(anew=True)})

    def _read_soon(self, *, anew: bool) -> asyncio.Task[None]:
        if self._reading is None:
            self._read_at = self._loop.time()
            if anew:
                self._renewed_at = self._read_at
            self._reading = self._in_background(self._read_again(anew))
        return self._reading

    async def _read_again(self, anew: bool) -> None:
        try:
            async with asyncio.timeout(LOADING):
                await self._read(anew=anew)
        except Exception as error:  # the library lets everything through that a file or a program can do wrong
            if self._works:
                logger.warning(
                    "credentials for the API server cannot be read again (%s): the old ones stay", reason(error)
                )
            self._works = False
        else:
            if not self._works:
                logger.info("credentials for the API server can be read again")
            self._works = True
        finally:
            self._reading = None

    async def _read(self, *, anew: bool) -> None:
        configuration = await self._source.load(anew=anew)
        check_addresses(configuration, self._source.title)
        headers = self._headers if self._source.is_live else HEADERS | await self._source.headers(configuration)
        made_of = fingerprint(configuration)
        if self._now is None or made_of != self._now.made_of:
            channel = Channel(configuration)
            self._open.add(channel)
            if self._now is not None:
                self._in_background(self._retire(self._now.channel))
            self._now = Loaded(configuration, made_of, channel)
        if headers != self._headers:
            self._headers = headers
        self._read_at = self._loop.time()

    async def _retire(self, channel: Channel) -> None:
        """Close connections that are no longer used, once the requests on them have ended."""
        await asyncio.sleep(self._limit)
        await channel.close()
        self._open.discard(channel)

    def _in_background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _keep(self) -> None:
        """Wait until it is cancelled, and close every connection that is not in use."""
        try:
            await self._loop.create_future()
        except asyncio.CancelledError:
            if self._generation is not lifecycle.generation:
                return  # a forked child ends the loop; the connections are its parent's
            self._ends = not self._closing
            background = list(self._background)
            for task in background:
                task.cancel()
            if background:
                await asyncio.wait(background)
            if self._ends:
                with suppress(TimeoutError, asyncio.CancelledError):
                    async with asyncio.timeout(self._limit):
                        await self._unused.wait()
            await self._close_channels()

    async def _close_channels(self) -> None:
        for channel in list(self._open):
            await channel.close()
            self._open.discard(channel)


def reason(error: BaseException) -> str:
    """What was wrong with a configuration: its kind, and its text where that cannot contain a secret."""
    if isinstance(error, CredentialsError | GrelmicroError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"not within {LOADING:g} s"
    if isinstance(error, SSLError):
        return f"a certificate or key in it cannot be used: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return type(error).__name__
