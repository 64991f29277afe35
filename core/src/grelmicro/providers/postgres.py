"""The provider of the PostgreSQL store."""

from grelmicro.backends.postgres import PostgresProvider

__all__ = ["PostgresProvider"]
