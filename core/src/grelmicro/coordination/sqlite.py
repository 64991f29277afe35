"""The backends of the SQLite store."""

from grelmicro.backends.sqlite import SQLiteLeaderElectionAdapter, SQLiteLockAdapter, SQLiteScheduleAdapter

__all__ = ["SQLiteLeaderElectionAdapter", "SQLiteLockAdapter", "SQLiteScheduleAdapter"]
