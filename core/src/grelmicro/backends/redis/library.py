"""What is used of redis-py; or how to install it."""

from grelmicro.errors import DependencyNotFoundError

try:
    from redis.asyncio import Connection, Redis, RedisCluster, SSLConnection, UnixDomainSocketConnection
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
except ImportError as error:
    raise DependencyNotFoundError(
        'the Redis store needs redis-py: install it with pip install "grelmicro-suite[redis]"'
    ) from error

__all__ = [
    "AbstractConnection",
    "AuthenticationError",
    "BusyLoadingError",
    "ClusterDownError",
    "Connection",
    "ConnectionError",
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
