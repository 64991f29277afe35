"""The provider of a SQLite file, and its backends."""

import os
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from grelmicro.backends.sqlite.store import SQLiteStore
from grelmicro.clock import Clock
from grelmicro.config import Duration
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider
from grelmicro.errors import SettingsValidationError
from grelmicro.leases.retention import RETENTION
from grelmicro.urls import check_url

FOREIGN_OPTIONS = ("cached_statements", "check_same_thread", "detect_types", "isolation_level", "timeout")
"""Options of a URL that are for the connections of SQLAlchemy's drivers."""


class SQLiteProvider(Provider):
    """One SQLite file for locks, elections and schedules.

    Args:
        path: the file; None: that of the environment variable SQLITE_PATH.
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
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
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
    """An adapter on a SQLite file; the arguments are those of `SQLiteStore`."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        super().__init__(SQLiteStore(path, namespace=namespace, clock=clock, retention=retention))


class SQLiteLockAdapter(SQLiteAdapter, LockAdapter):
    """Locks in a SQLite file; the arguments are those of `SQLiteStore`."""


class SQLiteLeaderElectionAdapter(SQLiteAdapter, LeaderElectionAdapter):
    """Elections in a SQLite file; the arguments are those of `SQLiteStore`."""


class SQLiteScheduleAdapter(SQLiteAdapter, ScheduleAdapter):
    """Schedules in a SQLite file; the arguments are those of `SQLiteStore`."""
