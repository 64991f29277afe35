"""Leases in a SQLite file."""

from grelmicro.backends.sqlite.provider import (
    SQLiteLeaderElectionAdapter,
    SQLiteLockAdapter,
    SQLiteProvider,
    SQLiteScheduleAdapter,
)
from grelmicro.backends.sqlite.store import SQLiteStore

__all__ = ["SQLiteLeaderElectionAdapter", "SQLiteLockAdapter", "SQLiteProvider", "SQLiteScheduleAdapter", "SQLiteStore"]
