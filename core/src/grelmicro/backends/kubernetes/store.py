"""Leases on a Kubernetes API server: for the processes of all hosts that reach it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from grelmicro import lifecycle
from grelmicro.backends.hints import Hints
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.feed import KubernetesFeed
from grelmicro.backends.kubernetes.library import ApiClient
from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.requests import Requests
from grelmicro.backends.kubernetes.table import Table
from grelmicro.clock import Clock, TimeLimit
from grelmicro.config import check_namespace
from grelmicro.errors import CoordinationBackendError, OutOfContextError, SettingsValidationError
from grelmicro.leases.lease import Lease, LeaseStore, Waiter, survivors_of
from grelmicro.lifecycle import outlast

logger = logging.getLogger("grelmicro.coordination")

SHARE = 0.25
"""The share of the shortest lease that renewals which are sent together may take: whoever sends them waits longer."""

TIDY_LIMIT = 1.0
"""Seconds for which closing vacates expired leases and leaves marks."""


@dataclass(slots=True, eq=False)
class _Open:
    """What an open store has."""

    requests: Requests
    table: Table
    hints: Hints


class _LeaseWaiter(Waiter):
    """A subscription to one record, which is polled while the watch does not tell its changes."""

    def __init__(self, waiter: Waiter, table: Table, name: str, clock: Clock) -> None:
        super().__init__(clock)
        self._waiter = waiter
        self._table = table
        self._name = name

    @property
    def pushes(self) -> bool:
        """Whether hints come at present."""
        return self._waiter.pushes and self._table.is_watched(self._name)

    async def wait(self, timeout: float) -> bool:
        """Wait for a hint, at most `timeout` seconds; whether one came."""
        return await self._waiter.wait(timeout)

    def wake(self) -> None:
        """End the present wait, as a hint does."""
        self._waiter.wake()


class KubernetesStore(LeaseStore):
    """Leases on a Kubernetes API server, as Lease objects of one Kubernetes namespace.

    A lease counts as expired once this process has seen it unchanged for its whole duration, by its own clock. A Lease
    object keeps whole seconds: a duration is rounded up to them.

    Args:
        cluster: where the API server is, and who asks; None: what the environment says, see `Cluster.at`.
        namespace: the Kubernetes namespace, where `cluster` is not given.
        prefix: separates applications that share a Kubernetes namespace; 1 to 63 letters, digits, `_`, `-` or `.`.
        clock: the time of this process.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    scope = "cluster"
    resolution = 1.0
    ordered = True  # an undo makes what it undoes fail if it comes later
    notice = 0.05  # an event of the watch, and the time to ask

    def __init__(
        self,
        cluster: Cluster | None = None,
        *,
        namespace: str | None = None,
        prefix: str = "grelmicro",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(namespace=check_namespace(prefix, setting="Kubernetes: prefix"), clock=clock)
        if cluster is not None and namespace is not None:
            raise SettingsValidationError(
                "KubernetesStore: namespace is set beside cluster, which has one: leave one of them out"
            )
        self.cluster = cluster or Cluster.at(namespace)
        self.outage.title = self.cluster.safe_url
        self.place = self.cluster.place, self.namespace
        self._opened: _Open | None = None

    async def open(self) -> None:
        """Find out where the API server is, and who asks; nothing is sent.

        Raises:
            SettingsValidationError: nothing tells it, or what does breaks a rule.
            BackendUnavailableError: what tells it cannot be read now.
        """
        requests = Requests(self.cluster)
        await requests.open(f"opening {type(self).__name__}")
        table = Table(requests, self.namespace, self.clock)
        feed = KubernetesFeed(requests, table.learn, self.namespace, self.clock)
        self.outage.title = requests.safe_url
        hints = Hints(feed, self.clock, self.outage, lazy=True)
        opened = _Open(requests, table, hints)
        try:
            await hints.start()
        except BaseException:
            await outlast(asyncio.ensure_future(_close(opened)))
            raise
        self._opened = opened

    async def close(self) -> None:
        """Vacate what was seen to expire, as far as that is quickly done; a cancellation waits for that."""
        opened, self._opened = self._opened, None
        if opened is not None:
            client = self.cluster.client if self.cluster.owns_client else None
            await outlast(asyncio.ensure_future(_close(opened, tidy=True, client=client)))

    def abandon(self) -> None:
        """Forget the connections of an event loop that is gone; those of a parent process are not touched."""
        opened, self._opened = self._opened, None
        if opened is not None and self._generation is lifecycle.generation:
            opened.hints.abandon()
            opened.requests.abandon()

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        return await self._get_open().table.acquire(name, holder, ttl, data, waiting=waiting)

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        opened = self._get_open()
        renewal = await opened.table.renew(lease, ttl, data)
        return None if renewal is None else self._woken(opened, *renewal)

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Renew each lease by its ttl, all at once; the survivors. See `LeaseStore.renew_many`."""
        opened = self._get_open()
        limit = min((ttl for _, ttl in renewals), default=0.0) * SHARE
        requests = [self._renew_within(opened, lease, ttl, limit) for lease, ttl in renewals]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        woken = [self._woken(opened, *answer) if isinstance(answer, tuple) else answer for answer in answers]
        return survivors_of(renewals, woken)

    async def _renew_within(self, opened: _Open, lease: Lease, ttl: float, limit: float) -> tuple[Lease, bool] | None:
        """Renew one of several leases: one that gets no answer in time is tried again with the next ones."""
        async with TimeLimit(self.clock, limit):
            return await opened.table.renew(lease, ttl, None)

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        opened = self._get_open()
        try:
            return await opened.table.release(lease, data)
        finally:  # also when it ends unknown: it may have been done
            opened.hints.send(self._topic(lease.name))

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        return await self._get_open().table.pass_on(lease, holder, ttl)

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        return await self._get_open().table.raise_fence(lease, least)

    async def drop(self, name: str) -> bool:
        """See `DroppingLeases.drop`."""
        return await self._get_open().table.drop(name)

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        return await self._get_open().table.read(name)

    def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        return self._get_open().table.scan(prefix)

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """See `LeaseStore.watch`; a release in this process is a hint at once, one elsewhere by the watch."""
        return self._watch(self._get_open(), name)

    @asynccontextmanager
    async def _watch(self, opened: _Open, name: str) -> AsyncIterator[Waiter]:
        async with opened.hints.watch(self._topic(name)) as waiter:
            yield _LeaseWaiter(waiter, opened.table, name, self.clock)

    def _woken(self, opened: _Open, lease: Lease, shortened: bool) -> Lease:
        """A renewed lease; who waits in this process for one that was shortened is woken."""
        if shortened:
            opened.hints.send(self._topic(lease.name))
        return lease

    def _topic(self, name: str) -> str:
        return lease_name(self.namespace, name)

    def _get_open(self) -> _Open:
        self.check_open()
        if self._opened is None:
            raise OutOfContextError("KubernetesStore is closing: keep it open until its users have ended")
        return self._opened


async def _close(opened: _Open, *, tidy: bool = False, client: ApiClient | None = None) -> None:
    try:
        await opened.hints.close()
        if tidy:
            async with asyncio.timeout(TIDY_LIMIT):
                await opened.table.tidy()
    except (CoordinationBackendError, TimeoutError) as error:
        logger.debug("expired leases were left as they are: %s", error)
    finally:
        await opened.requests.close()
        if client is not None:
            await client.close()
