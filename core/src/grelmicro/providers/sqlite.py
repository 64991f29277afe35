"""The provider of the SQLite store."""

from grelmicro.backends.sqlite import SQLiteProvider

__all__ = ["SQLiteProvider"]
