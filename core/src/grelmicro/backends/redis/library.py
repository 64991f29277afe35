"""What is used of redis-py; or how to install it."""

from grelmicro.backends.needed import needed

with needed("Redis", "redis-py", "redis", "redis"):
    from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster, SSLConnection, UnixDomainSocketConnection
    from redis.asyncio.connection import AbstractConnection
    from redis.exceptions import (
        AuthenticationError,
        BusyLoadingError,
        ClusterDownError,
        ConnectionError,
        MasterDownError,
        MovedError,
        NoPermissionError,
        NoScriptError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
        ResponseError,
    )

__all__ = [
    "AbstractConnection",
    "AuthenticationError",
    "BusyLoadingError",
    "ClusterDownError",
    "Connection",
    "ConnectionError",
    "ConnectionPool",
    "MasterDownError",
    "MovedError",
    "NoPermissionError",
    "NoScriptError",
    "OutOfMemoryError",
    "ReadOnlyError",
    "Redis",
    "RedisCluster",
    "RedisError",
    "ResponseError",
    "SSLConnection",
    "UnixDomainSocketConnection",
]
