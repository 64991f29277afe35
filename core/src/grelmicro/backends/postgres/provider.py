"""The provider of a PostgreSQL table, and its backends."""

from typing import Self

from grelmicro.backends.postgres.library import Pool
from grelmicro.backends.postgres.store import PostgresStore
from grelmicro.backends.postgres.url import ENV_PREFIX, SCHEMA
from grelmicro.clock import Clock
from grelmicro.config import Duration
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider, shared_store
from grelmicro.errors import OutOfContextError
from grelmicro.leases import LeaseStore
from grelmicro.leases.retention import RETENTION


class PostgresProvider(Provider):
    """One PostgreSQL table for locks, elections and schedules; the arguments are those of `PostgresStore`.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    store: PostgresStore

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
        self.env_prefix = env_prefix
        store = PostgresStore(
            url,
            host=host,
            port=port,
            database=database,
            user=user,
            password=password,
            pool=pool,
            listen_url=listen_url,
            command_timeout=command_timeout,
            schema=schema,
            auto_migrate=auto_migrate,
            env_prefix=env_prefix,
            namespace=namespace,
            clock=clock,
            retention=retention,
        )
        super().__init__(store, url="postgresql://" if store.address is None else store.address.safe_url)

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "grelmicro") -> Self:
        """The provider of a URL.

        Raises:
            SettingsValidationError: the URL has another form.
        """
        return cls(url, namespace=namespace)

    @classmethod
    def from_client(
        cls,
        client: Pool,
        *,
        own: bool = False,
        listen_url: str | None = None,
        command_timeout: Duration | None = None,
        schema: str = SCHEMA,
        auto_migrate: bool = True,
        namespace: str = "grelmicro",
    ) -> Self:
        """The same as `from_pool`."""
        return cls.from_pool(
            client,
            own=own,
            listen_url=listen_url,
            command_timeout=command_timeout,
            schema=schema,
            auto_migrate=auto_migrate,
            namespace=namespace,
        )

    @classmethod
    def from_pool(
        cls,
        pool: Pool,
        *,
        own: bool = False,
        listen_url: str | None = None,
        command_timeout: Duration | None = None,
        schema: str = SCHEMA,
        auto_migrate: bool = True,
        namespace: str = "grelmicro",
    ) -> Self:
        """The provider that uses an application's own asyncpg pool.

        A pool lends no connection for good, so `listen_url` is needed for hints and for renewals while the pool is
        exhausted; without it waiters poll.

        Args:
            pool: what `asyncpg.create_pool` returns.
            own: open the pool, and close it for good, together with the provider; else the application does both.
            listen_url: see `PostgresStore`, as for the rest.
            command_timeout: see there.
            schema: see there.
            auto_migrate: see there.
            namespace: see there.
        """
        provider = cls(
            pool=pool,
            listen_url=listen_url,
            command_timeout=command_timeout,
            schema=schema,
            auto_migrate=auto_migrate,
            namespace=namespace,
        )
        provider.store.owns_pool = own
        return provider

    @property
    def client(self) -> Pool:
        """The asyncpg pool that it was given.

        Raises:
            OutOfContextError: it was given none: its own connections are for leases alone.
        """
        if self.store.pool is None:
            raise OutOfContextError(
                "PostgresProvider has no client: its connections are for leases alone; make a pool with "
                "asyncpg.create_pool() and give it to PostgresProvider.from_pool()"
            )
        return self.store.pool

    @property
    def table_sql(self) -> str:
        """The SQL that makes the table; see `PostgresStore.table_sql`."""
        return self.store.table_sql


class PostgresAdapter(LeaseAdapter):
    """An adapter on a PostgreSQL table.

    The arguments are those of `PostgresStore`, or a provider whose store it shares.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        provider: PostgresProvider | None = None,
        schema: str = SCHEMA,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        if provider is None:
            store: LeaseStore = PostgresStore(url, schema=schema, namespace=namespace, clock=clock, retention=retention)
        else:
            alone = (url, schema, namespace, clock, retention) == (None, SCHEMA, "grelmicro", None, RETENTION)
            store = shared_store(provider, PostgresProvider, type(self).__name__, alone=alone)
        super().__init__(store)
        self.provider = provider


class PostgresLockAdapter(PostgresAdapter, LockAdapter):
    """Locks in a PostgreSQL table; the arguments are those of `PostgresStore`."""


class PostgresLeaderElectionAdapter(PostgresAdapter, LeaderElectionAdapter):
    """Elections in a PostgreSQL table; the arguments are those of `PostgresStore`."""


class PostgresScheduleAdapter(PostgresAdapter, ScheduleAdapter):
    """Schedules in a PostgreSQL table; the arguments are those of `PostgresStore`."""
