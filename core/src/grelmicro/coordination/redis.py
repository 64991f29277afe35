"""The backends of the Redis store."""

from grelmicro.backends.redis import RedisLeaderElectionAdapter, RedisLockAdapter, RedisScheduleAdapter

__all__ = ["RedisLeaderElectionAdapter", "RedisLockAdapter", "RedisScheduleAdapter"]
