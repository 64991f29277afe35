"""What tests of the PostgreSQL store do beside it: as an administrator, or as a stranger to it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

TABLE = "public.grelmicro_leases"


@asynccontextmanager
async def stranger(url: str) -> AsyncIterator[Any]:
    """A connection that somebody else has to the database."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close(timeout=5)


async def fetchval(url: str, sql: str, *args: object) -> Any:
    """One value of the database."""
    async with stranger(url) as connection:
        return await connection.fetchval(sql, *args)


def as_role(url: str, role: str) -> str:
    """The same database for another role."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{quote(role)}@{parts.netloc.rpartition('@')[2]}"))


def with_settings(url: str, **settings: str) -> str:
    """The same database, in sessions with these settings."""
    options = "&".join(f"{name}={quote(value, safe='')}" for name, value in settings.items())
    return f"{url}{'&' if '?' in url else '?'}{options}"


@asynccontextmanager
async def role(url: str, name: str, *grants: str) -> AsyncIterator[str]:
    """A role that may do no more than the grants say; the URL for it."""
    async with stranger(url) as connection:
        await connection.execute(f'CREATE ROLE "{name}" LOGIN')
        for grant in grants:
            await connection.execute(f'GRANT {grant} TO "{name}"')
        try:
            yield as_role(url, name)
        finally:
            await connection.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')
