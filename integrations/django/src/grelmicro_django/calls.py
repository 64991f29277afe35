"""The database calls of a thread, and how another thread ends them."""

import threading
from contextlib import suppress
from time import monotonic
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created


class Calls:
    """The database calls of the thread that makes this, on connections that it has and on those that it opens later."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._databases = list(connections.all(initialized_only=True))
        connection_created.connect(self._add)

    def forget(self) -> None:
        """Follow the thread no longer."""
        connection_created.disconnect(self._add)

    def cancel(self, limit: float) -> None:
        """End what is executed now; a server that does not answer is waited for `limit` seconds."""
        until = monotonic() + limit
        cancelling = [
            threading.Thread(target=_cancel, args=[database], name="grelmicro-cancel", daemon=True)
            for database in tuple(self._databases)
        ]
        for thread in cancelling:
            thread.start()
        for thread in cancelling:
            thread.join(max(until - monotonic(), 0.0))

    def _add(self, *, connection: BaseDatabaseWrapper, **_: Any) -> None:
        if threading.get_ident() == self._thread and connection not in self._databases:
            self._databases.append(connection)


def _cancel(database: BaseDatabaseWrapper) -> None:
    driver: Any = database.connection
    cancel = getattr(driver, "cancel", None) or getattr(driver, "interrupt", None)
    if cancel is not None:
        with suppress(Exception):
            cancel()


def drop_connections() -> None:
    """Close the database connections of this thread so that no other work reuses them, not even by a pool."""
    for database in connections.all(initialized_only=True):
        if database.connection is None or database.in_atomic_block:
            continue
        with suppress(Exception):
            database.connection.close()
        with suppress(Exception):
            database.close()
