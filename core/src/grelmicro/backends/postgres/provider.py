"""The provider of a PostgreSQL table, and its backends."""

from typing import Self

from grelmicro.backends.postgres.library import Pool
from grelmicro.backends.postgres.store import PostgresStore
from grelmicro.backends.postgres.url import SCHEMA
from grelmicro.clock import Clock
from grelmicro.config import Duration
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider
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
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
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
    def from_pool(
        cls,
        pool: Pool,
        *,
        listen_url: str | None = None,
        command_timeout: Duration | None = None,
        schema: str = SCHEMA,
        auto_migrate: bool = True,
        namespace: str = "grelmicro",
    ) -> Self:
        """The provider that uses an application's own asyncpg pool, which the application opens and closes.

        A pool lends no connection for good, so `listen_url` is needed for hints and for renewals while the pool is
        exhausted; without it waiters poll.
        """
        return cls(
            pool=pool,
            listen_url=listen_url,
            command_timeout=command_timeout,
            schema=schema,
            auto_migrate=auto_migrate,
            namespace=namespace,
        )

    @property
    def table_sql(self) -> str:
        """The SQL that makes the table; see `PostgresStore.table_sql`."""
        return self.store.table_sql


class PostgresAdapter(LeaseAdapter):
    """An adapter on a PostgreSQL table; the arguments are those of `PostgresStore`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        schema: str = SCHEMA,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        super().__init__(PostgresStore(url, schema=schema, namespace=namespace, clock=clock, retention=retention))


class PostgresLockAdapter(PostgresAdapter, LockAdapter):
    """Locks in a PostgreSQL table; the arguments are those of `PostgresStore`."""


class PostgresLeaderElectionAdapter(PostgresAdapter, LeaderElectionAdapter):
    """Elections in a PostgreSQL table; the arguments are those of `PostgresStore`."""


class PostgresScheduleAdapter(PostgresAdapter, ScheduleAdapter):
    """Schedules in a PostgreSQL table; the arguments are those of `PostgresStore`."""
