"""The backends of the PostgreSQL store."""

from grelmicro.backends.postgres import PostgresLeaderElectionAdapter, PostgresLockAdapter, PostgresScheduleAdapter

__all__ = ["PostgresLeaderElectionAdapter", "PostgresLockAdapter", "PostgresScheduleAdapter"]
