"""Connections that an application's own asyncpg pool lends for one request each."""

import asyncio
from contextlib import suppress
from random import random
from time import monotonic

from grelmicro.backends.postgres.connections import LONGEST_PAUSE, RECOVERY, Args, Over, Requests, Rows
from grelmicro.backends.postgres.errors import (
    AGAIN,
    NO_STATEMENT,
    code,
    is_refusal,
    is_stale,
    is_unsendable,
    refusal,
    unsendable,
)
from grelmicro.backends.postgres.library import InterfaceError, Pool, Proxy
from grelmicro.errors import BackendUnavailableError


class BorrowedConnections(Requests):
    """The pool of an application, used as it is; the application opens and closes it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._recoveries: set[asyncio.Task[bool]] = set()

    async def fetch(self, sql: str, args: Args, limit: float, *, once: bool = False, over: Over | None = None) -> Rows:
        """See `Requests.fetch`."""
        until = monotonic() + limit
        while True:
            connection = await self._borrow(until)
            try:
                rows = await connection.fetch(sql, *args, timeout=until - monotonic())
            except Exception as error:
                if not (is_refusal(error) or is_unsendable(error) or isinstance(error, InterfaceError)):
                    self._begin_recovery(connection, over)
                    raise
                await self._give_back(connection)
                if is_unsendable(error):
                    raise unsendable() from None
                if monotonic() >= until or not (code(error) in AGAIN or is_stale(error)):
                    raise _explained(error) from error
            except BaseException:
                self._begin_recovery(connection, over)
                raise
            else:
                await self._give_back(connection)
                return rows
            await asyncio.sleep(random() * LONGEST_PAUSE)

    async def close(self) -> None:
        """Give back what is still out; the pool stays open."""
        if self._recoveries:
            await asyncio.wait(self._recoveries, timeout=2 * RECOVERY)

    def abandon(self) -> None:
        """The pool is the application's."""
        self._recoveries.clear()

    async def _borrow(self, until: float) -> Proxy:
        waited = max(until - monotonic(), 0.0)
        try:
            async with asyncio.timeout(waited):
                return await self._pool.acquire()
        except TimeoutError:
            raise BackendUnavailableError(
                f"PostgreSQL: the pool lent no connection within {waited:.1f} s: make it larger (max_size), or hold "
                "its connections for a shorter time"
            ) from None
        except InterfaceError as error:
            raise BackendUnavailableError(
                f"PostgreSQL: the pool lends no connection ({error}): open it before the store, and close it after"
            ) from error
        except Exception as error:
            raise refusal(error, "connecting to ") from error

    async def _give_back(self, connection: Proxy) -> None:
        with suppress(Exception):  # asyncpg has closed it then
            await self._pool.release(connection, timeout=RECOVERY)

    def _begin_recovery(self, connection: Proxy, over: Over | None) -> None:
        task = asyncio.get_running_loop().create_task(self._recover(connection), name="grelmicro-postgres-recovery")
        self._recoveries.add(task)
        task.add_done_callback(self._recoveries.discard)
        if over is not None:
            over(task)

    async def _recover(self, connection: Proxy) -> bool:
        """Give back a connection whose statement was given up; whether the server is done with that statement."""
        done = False
        with suppress(Exception):
            async with asyncio.timeout(RECOVERY):
                await connection.execute("SELECT 1")
            done = True
        if not done:
            connection.terminate()
        await self._give_back(connection)
        return done


def _explained(error: Exception) -> BackendUnavailableError:
    if code(error) in NO_STATEMENT:
        return BackendUnavailableError(
            "PostgreSQL: prepared statements get lost, as behind a pooler: make the pool with statement_cache_size=0"
        )
    return refusal(error)
