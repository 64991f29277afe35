"""What is used of asyncpg; or how to install it."""

from typing import TYPE_CHECKING

from grelmicro.backends.needed import needed

with needed("PostgreSQL", "asyncpg", "asyncpg", "postgres"):
    import asyncpg
    from asyncpg import (
        DataError,
        InterfaceError,
        InternalClientError,
        InvalidCachedStatementError,
        PostgresError,
        Record,
        connect,
    )
    from asyncpg.pool import PoolConnectionProxy
    from asyncpg.prepared_stmt import PreparedStatement

if TYPE_CHECKING:
    # Generic for type checkers only.
    Connection = asyncpg.Connection[Record]
    Pool = asyncpg.Pool[Record]
    Proxy = PoolConnectionProxy[Record]
    Statement = PreparedStatement[Record]
else:
    Connection = asyncpg.Connection
    Pool = asyncpg.Pool
    Proxy = PoolConnectionProxy
    Statement = PreparedStatement

__all__ = [
    "Connection",
    "DataError",
    "InterfaceError",
    "InternalClientError",
    "InvalidCachedStatementError",
    "Pool",
    "PostgresError",
    "Proxy",
    "Record",
    "Statement",
    "connect",
]
