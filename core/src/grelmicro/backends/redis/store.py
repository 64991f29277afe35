"""Leases on a Redis server: for the processes of all hosts that reach it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from grelmicro import lifecycle
from grelmicro.backends import inherited
from grelmicro.backends.hints import Hints
from grelmicro.backends.redis.connections import Connections
from grelmicro.backends.redis.errors import is_lasting, reason
from grelmicro.backends.redis.feed import RedisFeed
from grelmicro.backends.redis.library import Redis, RedisError, ResponseError
from grelmicro.backends.redis.request import CLOSING_LIMIT
from grelmicro.backends.redis.scripts import pack
from grelmicro.backends.redis.server import RedisServer
from grelmicro.backends.redis.table import BEGIN, Table
from grelmicro.backends.releases import Releases
from grelmicro.backends.sweeper import Sweeper
from grelmicro.clock import Clock
from grelmicro.config import Duration, check_seconds
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutOfContextError
from grelmicro.leases.lease import Lease, LeaseStore, Waiter
from grelmicro.leases.retention import RETENTION
from grelmicro.lifecycle import outlast

logger = logging.getLogger("grelmicro.coordination")

TIDY_LIMIT = 0.5
"""Seconds for which closing looks for expired leases."""


@dataclass(slots=True, eq=False)
class _Open:
    """What an open store has."""

    connections: Connections
    table: Table
    hints: Hints
    releases: Releases
    sweeper: Sweeper[bytes]


class RedisStore(LeaseStore):
    """Leases on a Redis server, or on one that speaks like it.

    A lease is judged by the clock of the server. See the documentation for what a fail-over can lose.

    Args:
        server: a URL, or what `RedisServer` tells; None: the server that the environment variables `REDIS_*` name.
        namespace: separates applications that share one server; 1 to 63 letters, digits, `_`, `-` or `.`.
        clock: the time of deadlines in this process.
        retention: seconds for which a free lock's record is kept.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    scope = "cluster"
    resolution = 0.000_001
    ordered = True  # an undo waits until what it undoes is done, or cannot be done any more
    notice = 0.005  # a message, and the time to ask

    def __init__(
        self,
        server: str | RedisServer | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        super().__init__(namespace=namespace, clock=clock)
        self.server = server if isinstance(server, RedisServer) else RedisServer.at({}, url=server)
        self.outage.title = self.server.safe_url
        self.place = (self.server.safe_url, self.namespace)
        self._retention = check_seconds("retention", retention)
        self._opened: _Open | None = None
        self._client: Redis | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            BackendUnavailableError: the server cannot be used now.
        """
        connections = Connections(self.server)
        table = Table(connections, self.namespace, self.clock, self._retention)
        hints = Hints(RedisFeed(connections, table.prefix), self.clock, self.outage)
        connections.doubted = hints.doubt
        # A record that is held has no time to live, since a server that is short of memory may drop what has one. So a
        # lease that ends by its time leaves a record without one, until a sweep comes by.
        sweeper = Sweeper(table.sweep, BEGIN, self.clock, "Redis")
        opened = _Open(connections, table, hints, Releases(hints.send), sweeper)
        inherited.opened(opened)
        try:
            await self._look_around(opened)
            await hints.start()
        except BaseException:
            await outlast(asyncio.ensure_future(_close(opened)))
            raise
        self._opened = opened

    @property
    def client(self) -> Redis:
        """A client of the same server for whatever else the application does: see `RedisProvider.client`."""
        if self.server.client is not None:
            return self.server.client
        self._get_open()
        self._client = self._client or self.server.new_client()
        return self._client

    async def close(self) -> None:
        """Vacate what expired, as far as that is quickly done, and disconnect; a cancellation waits for that."""
        opened, self._opened = self._opened, None
        client, self._client = self._client or (self.server.client if self.server.owns_client else None), None
        if opened is not None:
            await outlast(asyncio.ensure_future(_close(opened, tidy=True, client=client)))

    def abandon(self) -> None:
        """Forget the connections of an event loop that is gone; those of a parent process are not touched."""
        opened, self._opened = self._opened, None
        self._client = None
        if opened is not None and self._generation is lifecycle.generation:
            opened.hints.abandon()
            inherited.closed(opened)

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        opened = self._get_open()
        lease = await opened.releases.follow(name, holder, opened.table.acquire(name, holder, ttl, data, waiting))
        opened.sweeper.begin_if_due()
        return lease

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        opened = self._get_open()
        survivors = _woken(opened, [await opened.table.renew(lease, ttl, data)])
        return survivors[0] if survivors else None

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Renew each lease by its ttl, in one round trip; the survivors."""
        opened = self._get_open()
        return _woken(opened, await opened.table.renew_many(renewals))

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        opened = self._get_open()
        release = opened.releases.begin(lease.name)
        try:
            return await opened.table.release(lease, data)
        finally:
            opened.releases.end(lease.name, release)

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        return await self._get_open().table.pass_on(lease, holder, max(ttl, self.resolution))

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        return await self._get_open().table.raise_fence(lease, least)

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        return await self._get_open().table.read(name)

    def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        return self._get_open().table.scan(prefix)

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """See `LeaseStore.watch`; a release in this process is a hint at once, one elsewhere by a message."""
        return self._get_open().hints.watch(name)

    def _get_open(self) -> _Open:
        self.check_open()
        if self._opened is None:
            raise OutOfContextError("RedisStore is closing: keep it open until its users have ended")
        return self._opened

    async def _look_around(self, opened: _Open) -> None:
        """Ask for the time, and whether the server may drop leases."""
        asked_at = self.clock.now()
        what = f"opening {type(self).__name__}"
        time, memory = await opened.connections.ask(pack(b"TIME") + pack(b"INFO", b"memory"), 2, what, changes=False)
        if isinstance(time, ResponseError):
            raise BackendUnavailableError(
                f"{what}: {self.server.safe_url} refused it: {reason(time)}", lasting=is_lasting(time)
            )
        opened.table.learn_time(int(time[0]) + int(time[1]) / 1e6, asked_at)
        if isinstance(memory, bytes):  # and the user may ask for it
            self._warn_of_eviction(memory.decode(errors="replace"))

    def _warn_of_eviction(self, memory: str) -> None:
        facts = dict(line.split(":", 1) for line in memory.splitlines() if ":" in line)
        policy = facts.get("maxmemory_policy", "")
        if policy.startswith("allkeys") and facts.get("maxmemory") != "0":
            logger.warning(
                "%s drops any key when its memory is full (maxmemory-policy %s), leases that are held among them: "
                "set the policy noeviction or a volatile one, or use a server of its own",
                self.server.safe_url,
                policy,
            )


def _woken(opened: _Open, renewals: Sequence[tuple[Lease, bool] | None]) -> list[Lease]:
    """The renewed leases; who waits in this process for one that was shortened is woken."""
    survivors = [renewal for renewal in renewals if renewal is not None]
    for lease, shortened in survivors:
        if shortened:
            opened.hints.send(lease.name)
    return [lease for lease, _ in survivors]


async def _close(opened: _Open, *, tidy: bool = False, client: Redis | None = None) -> None:
    try:
        await opened.sweeper.close()
        await opened.hints.close()
        if tidy:
            async with asyncio.timeout(TIDY_LIMIT):
                await opened.table.tidy()
    except (CoordinationBackendError, TimeoutError) as error:
        logger.debug("expired leases were left as they are: %s", error)
    finally:
        await opened.connections.close()
        inherited.closed(opened)
        if client is not None:
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(CLOSING_LIMIT):
                    await client.aclose()
