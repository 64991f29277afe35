"""Leases in a PostgreSQL table."""

from grelmicro.backends.postgres.provider import (
    PostgresLeaderElectionAdapter,
    PostgresLockAdapter,
    PostgresProvider,
    PostgresScheduleAdapter,
)
from grelmicro.backends.postgres.store import PostgresStore

__all__ = [
    "PostgresLeaderElectionAdapter",
    "PostgresLockAdapter",
    "PostgresProvider",
    "PostgresScheduleAdapter",
    "PostgresStore",
]
