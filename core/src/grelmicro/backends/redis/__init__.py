"""Leases on a Redis server."""

from grelmicro.backends.redis.provider import (
    RedisLeaderElectionAdapter,
    RedisLockAdapter,
    RedisProvider,
    RedisScheduleAdapter,
)
from grelmicro.backends.redis.store import RedisStore

__all__ = ["RedisLeaderElectionAdapter", "RedisLockAdapter", "RedisProvider", "RedisScheduleAdapter", "RedisStore"]
