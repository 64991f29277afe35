"""Connections to one PostgreSQL server: how they are made, and given up."""

import logging
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from time import monotonic
from typing import Any

from grelmicro import lifecycle
from grelmicro.backends.postgres.errors import refusal
from grelmicro.backends.postgres.library import Connection, Statement, connect
from grelmicro.backends.postgres.url import Address
from grelmicro.errors import BackendUnavailableError

USUAL_LIMIT = 3.0
"""Seconds for what is asked without a limit of its own, such as asyncpg's request to end a statement."""

logger = logging.getLogger("grelmicro.coordination")


class Session(Connection):
    """A connection that a forked process cannot end for its parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._born_in = lifecycle.generation

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._born_in is not lifecycle.generation

    def terminate(self) -> None:
        """End it, unless it is the parent's."""
        if not self.is_inherited:
            super().terminate()

    def __del__(self) -> None:
        if not self.is_inherited:
            super().__del__()


class Link:
    """A connection, and what was prepared on it."""

    __slots__ = ("prepared", "preparing", "raw", "used_at")

    def __init__(self, raw: Connection) -> None:
        self.raw = raw
        self.prepared: dict[str, Statement] = {}
        self.preparing = False
        self.used_at = monotonic()


class Server:
    """How to reach a server, and what is known of it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.prepares = True
        """Whether what was prepared on a connection is there when it is used again."""

    async def connect(self, limit: float) -> Connection:
        """A new connection. Do not cancel it: asyncpg leaves things behind then.

        Raises:
            BackendUnavailableError: there is none within `limit` seconds.
        """
        try:
            return await connect(
                **self._address.arguments,
                timeout=min(limit, self._address.connect_timeout),
                command_timeout=USUAL_LIMIT,
                statement_cache_size=0,  # what is prepared here has names of its own
                connection_class=Session,
            )
        except Exception as error:
            raise refusal(error, "connecting to ", self._address.safe_url) from error

    def silent(self) -> BackendUnavailableError:
        """The error where it has not answered yet."""
        return refusal(TimeoutError(), "connecting to ", self._address.safe_url)

    def does_not_prepare(self) -> None:
        """Behind this connection it is not always the same server session."""
        if self.prepares:
            self.prepares = False
            logger.info("PostgreSQL: prepared statements get lost, as with a pooler: going on without them")


def forget(connection: Connection) -> None:
    """Give up a connection whose event loop is gone; one of the parent process is left as it is."""
    with suppress(RuntimeError):  # the loop is closed; the server was told before
        connection.terminate()


@lru_cache(maxsize=64)
def name_of(sql: str) -> str:
    """The name under which a statement is prepared."""
    return f"grelmicro_{blake2b(sql.encode(), digest_size=12).hexdigest()}"
