"""The provider of a SQLite file, and its backends."""

import os
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from grelmicro.backends.sqlite.store import ENV_PREFIX, SQLiteStore, path_of_environment
from grelmicro.clock import Clock
from grelmicro.config import Duration, check_env_prefix
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider, shared_store
from grelmicro.errors import SettingsValidationError
from grelmicro.leases import LeaseStore
from grelmicro.leases.retention import RETENTION
from grelmicro.urls import check_url

FOREIGN_OPTIONS = ("cached_statements", "check_same_thread", "detect_types", "isolation_level", "timeout")
"""Options of a URL that are for the connections of SQLAlchemy's drivers."""


class SQLiteProvider(Provider):
    """One SQLite file for locks, elections and schedules.

    Args:
        path: the file; None: that of the environment variable SQLITE_PATH.
        env_prefix: what the name of that variable begins with, such as `JOBS_SQLITE_` for a second file.
        namespace: separates applications that share one file.
        clock: the time of leases; tests give one that they move.
        retention: seconds for which a free lock's record is kept.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        env_prefix: str = ENV_PREFIX,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        self.env_prefix = check_env_prefix("SQLite", env_prefix)
        path = path_of_environment(env_prefix) if path is None else path
        store = SQLiteStore(path, namespace=namespace, clock=clock, retention=retention)
        super().__init__(store, url=f"sqlite:///{quote(store.path)}")

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "grelmicro") -> Self:
        """The provider of `sqlite:///relative.db` or `sqlite:////absolute.db`.

        The driver of a URL for SQLAlchemy, as in `sqlite+aiosqlite:///shop.db`, and options for that are not used.

        Raises:
            SettingsValidationError: the URL has another form, or an option that is not known.
        """
        parts = urlsplit(check_url("SQLite", url, "sqlite:///locks.db"))
        if (
            parts.scheme.partition("+")[0] != "sqlite"
            or parts.netloc
            or parts.fragment
            or not parts.path.startswith("/")
        ):
            raise SettingsValidationError(
                "SQLite: url should be sqlite:/// and a path: sqlite:///locks.db for a file in the working directory, "
                "sqlite:////var/lib/shop/locks.db for any other"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if options.keys() - {"namespace", *FOREIGN_OPTIONS}:
            raise SettingsValidationError("SQLite: url has an option that is not known: the only one is namespace")
        return cls(unquote(parts.path[1:]), namespace=options.get("namespace", namespace))


class SQLiteAdapter(LeaseAdapter):
    """An adapter on a SQLite file; the arguments are those of `SQLiteStore`, or a provider whose store it shares."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        provider: SQLiteProvider | None = None,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        if provider is None:
            store: LeaseStore = SQLiteStore(path, namespace=namespace, clock=clock, retention=retention)
        else:
            alone = (path, namespace, clock, retention) == (None, "grelmicro", None, RETENTION)
            store = shared_store(provider, SQLiteProvider, type(self).__name__, alone=alone)
        super().__init__(store)
        self.provider = provider


class SQLiteLockAdapter(SQLiteAdapter, LockAdapter):
    """Locks in a SQLite file; the arguments are those of `SQLiteStore`."""


class SQLiteLeaderElectionAdapter(SQLiteAdapter, LeaderElectionAdapter):
    """Elections in a SQLite file; the arguments are those of `SQLiteStore`."""


class SQLiteScheduleAdapter(SQLiteAdapter, ScheduleAdapter):
    """Schedules in a SQLite file; the arguments are those of `SQLiteStore`."""
