"""Connections that an application's own asyncpg pool lends for one request each."""

import asyncio
from contextlib import suppress
from random import random
from time import monotonic

from grelmicro.backends.postgres.connections import LONGEST_PAUSE, RECOVERY, Args, Over, Requests, Rows
from grelmicro.backends.postgres.errors import (
    AGAIN,
    ELSEWHERE,
    NO_STATEMENT,
    code,
    is_refusal,
    is_stale,
    is_unsendable,
    is_unsent,
    refusal,
    unsendable,
)
from grelmicro.backends.postgres.library import InterfaceError, Pool, Proxy
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases.unsent import nothing_sent


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
                if not (is_refusal(error) or is_unsendable(error) or is_unsent(error)):
                    self._begin_recovery(connection, over)
                    raise
                if is_unsent(error):
                    _terminate(connection)
                if code(error) in ELSEWHERE:
                    await self._pool.expire_connections()  # before this one is given back, which is one of them
                await self._give_back(connection)
                if is_unsendable(error):
                    raise unsendable() from None
                if monotonic() >= until or not (code(error) in AGAIN or is_stale(error) or is_unsent(error)):
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
        """A connection of the pool that is outside of any transaction."""
        connection = await self._lent(until)
        if connection.is_in_transaction():
            # What is asked for in there is invisible to others, and undone when the pool resets the connection.
            _terminate(connection)
            await self._give_back(connection)
            raise BackendUnavailableError(
                "PostgreSQL: the pool lent a connection that is inside a transaction, in which no lease can be kept: "
                "let setup=, init= and reset= of the pool end the transactions that they begin",
                lasting=True,
            )
        return connection

    async def _lent(self, until: float) -> Proxy:
        begun = monotonic()
        try:
            with nothing_sent(lambda: self._lends_none(monotonic() - begun)):
                async with asyncio.timeout(max(until - begun, 0.0)):
                    return await self._pool.acquire()
        except TimeoutError:
            raise self._lends_none(monotonic() - begun) from None
        except InterfaceError as error:
            raise BackendUnavailableError(
                f"PostgreSQL: the pool lends no connection ({error}): open it before the store, and close it after"
            ) from error
        except Exception as error:
            raise refusal(error, "connecting to ") from error

    def _lends_none(self, waited: float) -> BackendUnavailableError:
        text = f"PostgreSQL: the pool lent no connection within {waited:.1f} s: "
        if self._pool.get_size() < self._pool.get_max_size():
            return BackendUnavailableError(f"{text}it does not get connected; check the address and the network")
        return BackendUnavailableError(f"{text}make it larger (max_size), or hold its connections for a shorter time")

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
            _terminate(connection)
        await self._give_back(connection)
        return done


def _terminate(connection: Proxy) -> None:
    """Close it; one that the server has ended the pool has taken back already."""
    with suppress(InterfaceError):
        connection.terminate()


def _explained(error: Exception) -> BackendUnavailableError:
    if code(error) in NO_STATEMENT:
        return BackendUnavailableError(
            "PostgreSQL: prepared statements get lost, as behind a pooler: make the pool with statement_cache_size=0"
        )
    return refusal(error)
