"""Leases in a PostgreSQL table: for all hosts that reach the server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NamedTuple

from grelmicro import lifecycle
from grelmicro.backends import inherited
from grelmicro.backends.hints import Hints
from grelmicro.backends.postgres.borrowed import BorrowedConnections
from grelmicro.backends.postgres.connections import OwnConnections, Requests
from grelmicro.backends.postgres.errors import refusal
from grelmicro.backends.postgres.feed import PostgresFeed
from grelmicro.backends.postgres.library import Pool
from grelmicro.backends.postgres.server import Server
from grelmicro.backends.postgres.statements import Statements
from grelmicro.backends.postgres.table import Table, topic_of
from grelmicro.backends.postgres.url import ENV_PREFIX, SCHEMA, Settings, check_schema, limit_of, listening
from grelmicro.backends.sweeper import Sweeper
from grelmicro.clock import Clock
from grelmicro.config import Duration, check_env_prefix, check_seconds
from grelmicro.errors import GrelmicroError, OutOfContextError
from grelmicro.leases.lease import Lease, LeaseStore, Waiter
from grelmicro.leases.retention import RETENTION
from grelmicro.lifecycle import outlast

logger = logging.getLogger("grelmicro.coordination")

CONNECTIONS = 5
"""Connections for ordinary requests, at most; each takes about a millisecond."""

RENEWAL_CONNECTIONS = 2
"""Connections for renewals, which must not wait for anything else, at most."""

LAST_LIMIT = 1.0
"""Seconds for which closing tries to vacate what expired."""

SILENCE = "behind a pooler, listen_url= has to lead to the server itself"
"""What may be wrong where no messages come: a pooler in transaction mode passes none on."""


class _Open(NamedTuple):
    """What an open store has."""

    table: Table
    connections: tuple[Requests, ...]
    hints: Hints | None
    sweeper: Sweeper[str]


class PostgresStore(LeaseStore):
    """Leases in a table of a PostgreSQL database, shared by all that reach it.

    A lease is judged by the server's clock. All namespaces of a database share one table.

    Args:
        url: `postgresql://user:password@host:5432/database`; that of SQLAlchemy will do. Its options may be those
            that PostgreSQL knows, and `namespace` and `schema`. Without `url`, `host` and `pool`: what the environment
            says in POSTGRES_URL, or POSTGRES_HOST with POSTGRES_PORT, _DB, _USER and _PASSWORD.
        host: the server, in the place of a URL, with the following four.
        port: 5432 by default.
        database: the name of the database.
        user: the role.
        password: its password.
        pool: an application's own asyncpg pool, in the place of all these; the application opens and closes it.
        listen_url: the server itself, where `url` leads to a pooler, or beside `pool`: connections for hints (and,
            beside `pool`, for renewals) are made to it. Without it, or POSTGRES_LISTEN_URL, that is `url`.
        command_timeout: seconds after which an operation is given up; POSTGRES_COMMAND_TIMEOUT, or 5 by default.
        schema: where the table is; the same for all processes, whatever their `search_path`.
        auto_migrate: make the table if it is missing; else opening raises an error with the SQL.
        env_prefix: what the names of environment variables begin with, such as `JOBS_POSTGRES_` for a second server.
        namespace: separates applications that share one database; 1 to 63 letters, digits, `_`, `-` or `.`.
        clock: the time of this process.
        retention: seconds for which a free lock's record is kept.

    Raises:
        SettingsValidationError: a setting breaks a rule; opening raises it when the table is not right.
    """

    scope = "cluster"
    resolution = 0.001
    ordered = True  # an undo is final once the server surely does nothing about the acquire any more
    notice = 0.01

    def __init__(
        self,
        url: str | None = None,
        *,
        host: str | None = None,
        port: int | str | None = None,
        database: str | None = None,
        user: str | None = None,
        password: str | None = None,
        pool: Pool | None = None,
        listen_url: str | None = None,
        command_timeout: Duration | None = None,
        schema: str = SCHEMA,
        auto_migrate: bool = True,
        env_prefix: str = ENV_PREFIX,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        settings = Settings(url, host, port, database, user, password, check_env_prefix("PostgreSQL", env_prefix))
        if pool is not None:
            settings.check_unset("pool")
        self.address = settings.address() if pool is None else None
        options = {} if self.address is None else self.address.options
        super().__init__(namespace=options.get("namespace", namespace), clock=clock)
        self.pool = pool
        self.owns_pool = False
        """Whether the pool is opened and closed with the store."""
        self._listen = listening(listen_url, env_prefix) or self.address
        self._limit = limit_of(command_timeout, env_prefix)
        self._schema = check_schema(options.get("schema", schema))
        self._create = auto_migrate
        self._retention = check_seconds("retention", retention)
        self._statements = Statements(self._schema, self.namespace)
        self.outage.title = "PostgreSQL"
        if self.address is not None:
            self.place = (self.address.safe_url, self._schema, self.namespace)
        self._opened: _Open | None = None

    @property
    def table_sql(self) -> str:
        """The SQL that makes the table, for those who do not let an application do so; see `auto_migrate`."""
        return f"{self._statements.create};"

    async def open(self) -> None:
        """Connect, and see that the table is there.

        Raises:
            SettingsValidationError: the table is missing and cannot be made here, or it is something else.
            BackendUnavailableError: the server does not answer, or takes no writes.
        """
        opened = self._make()
        inherited.opened(opened)
        try:
            if self.pool is not None and self.owns_pool:
                await self.pool
            await opened.table.open(self._schema, create=self._create)
            if opened.hints is not None:
                await opened.hints.start()
        except BaseException as error:
            await outlast(asyncio.ensure_future(_close(opened)))
            if isinstance(error, Exception) and not isinstance(error, GrelmicroError):
                raise refusal(error, "opening ") from error
            raise
        if opened.hints is None:
            logger.warning(
                "PostgreSQL: waiters poll, since hints need a connection that no pool lends: give listen_url="
            )
        self._opened = opened

    async def close(self) -> None:
        """Vacate what expired, if the server answers in a moment, and close the connections, which is not cut short."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            await opened.sweeper.close()
            await opened.table.vacate(LAST_LIMIT)
        except Exception as error:  # what expired is free anyway
            logger.debug("closing PostgreSQL: expired leases stay as they are: %s", error)
        finally:
            await outlast(asyncio.ensure_future(_close(opened, self.pool if self.owns_pool else None)))

    def abandon(self) -> None:
        """Forget the connections and waiters of a loop that is gone; those of a parent process are not touched."""
        opened, self._opened = self._opened, None
        if opened is not None and self._generation is lifecycle.generation:
            inherited.closed(opened)
            for connections in opened.connections:
                connections.abandon()
            if opened.hints is not None:
                opened.hints.abandon()

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseStore.acquire`."""
        opened = self._get_open()
        lease = await opened.table.acquire(name, holder, max(ttl, self.resolution), data, waiting)
        opened.sweeper.begin_if_due()
        return lease

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseStore.renew`."""
        opened = self._get_open()
        if not lease.holder:
            return None
        answer = await opened.table.renew(lease, max(ttl, self.resolution), data)
        if answer is None:
            return None
        if answer.shortened:
            _wake(opened.hints, lease.name)
        return answer.lease

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Renew each lease by its ttl: in one statement, but for those that are locked by somebody, or end sooner."""
        if not renewals:
            return []
        asked = [(lease, max(ttl, self.resolution)) for lease, ttl in renewals]
        survivors = await self._get_open().table.renew_many(asked)
        done = {(lease.name, lease.holder) for lease in survivors}
        for lease, ttl in asked:
            if (lease.name, lease.holder) not in done and (renewed := await self.renew(lease, ttl)) is not None:
                survivors.append(renewed)
        return survivors

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseStore.release`."""
        opened = self._get_open()
        if not lease.holder:
            return False
        try:
            return await opened.table.release(lease, data)
        finally:
            # Not before: what is asked in the same moment mostly gets the row first. And also when the answer is not
            # known, since it may have been done.
            _wake(opened.hints, lease.name)

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """See `PassingLeases.pass_on`."""
        return await self._get_open().table.pass_on(lease, holder, max(ttl, self.resolution))

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """See `RaisingLeases.raise_fence`."""
        return await self._get_open().table.raise_fence(lease, least)

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""
        return await self._get_open().table.read(name)

    async def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """See `LeaseStore.scan`."""
        table = self._get_open().table
        # A page begins after a name, and the prefix may be one itself.
        first = await table.read(prefix) if prefix else None
        page = [] if first is None else [first]
        after = prefix
        while True:
            for lease in page:
                yield lease
            page = await table.page(after, prefix)
            if not page:
                return
            after = page[-1].name

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """See `LeaseStore.watch`; the server tells of a release when somebody waits."""
        hints = self._get_open().hints
        return super().watch(name) if hints is None else hints.watch(topic_of(name))

    def _make(self) -> _Open:
        """What an open store has, without any connection yet."""
        listen = None if self._listen is None else Server(self._listen)
        requests: Requests
        if self.pool is not None:
            requests = BorrowedConnections(self.pool)
            renewals = requests if listen is None else OwnConnections(listen, RENEWAL_CONNECTIONS, "renewals")
        else:
            assert self.address is not None
            server = Server(self.address)
            requests = OwnConnections(server, CONNECTIONS, "requests")
            renewals = OwnConnections(server, RENEWAL_CONNECTIONS, "renewals")
        hints = None
        if listen is not None:
            feed = PostgresFeed(listen, requests, self._statements)
            hints = Hints(feed, self.clock, self.outage, silence=SILENCE)
        table = Table(self._statements, self.namespace, requests, renewals, self.clock, self._limit)
        sweeper = Sweeper(partial(table.sweep, retention=self._retention), "", self.clock, "PostgreSQL")
        return _Open(table, (requests, renewals), hints, sweeper)

    def _get_open(self) -> _Open:
        self.check_open()
        if self._opened is None:
            raise OutOfContextError("PostgresStore is closing: keep it open until its users have ended")
        return self._opened


def _wake(hints: Hints | None, name: str) -> None:
    """Wake those in this process who wait for `name`; without hints they poll."""
    if hints is not None and hints.used:
        hints.send(topic_of(name))


async def _close(opened: _Open, pool: Pool | None = None) -> None:
    """Close what an open store has; all of it, also where the event loop ends and cancels this."""
    try:
        if opened.hints is not None:
            await opened.hints.close()
    finally:
        await asyncio.gather(*(connections.close() for connections in opened.connections))
        inherited.closed(opened)
        if pool is not None:
            try:
                async with asyncio.timeout(LAST_LIMIT):
                    await pool.close()
            except Exception:  # one of its connections is in use
                pool.terminate()
