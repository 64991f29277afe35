"""Connections to PostgreSQL: a few of a store's own, each with its prepared statements."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from random import random
from time import monotonic
from typing import Any, TypeVar

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
from grelmicro.backends.postgres.library import Connection, Record
from grelmicro.backends.postgres.server import Link, Server, forget, name_of
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases.unsent import nothing_sent

RECOVERY = 1.0
"""Seconds within which a connection whose request was given up has to be of use again; else it is closed."""

IDLE = 30.0
"""Seconds without use after which a connection is tried before it is relied on: a firewall may have forgotten it."""

LONGEST_PAUSE = 0.01
"""Seconds before a transaction that the server undid is repeated, at most."""

T = TypeVar("T")

Args = Sequence[object]
Rows = list[Record]
Over = Callable[["asyncio.Task[bool] | None"], None]
"""Told of a statement that was sent and given up; the task, if any, tells whether the server is surely done with it."""


class Requests(ABC):
    """What takes requests to a server."""

    @abstractmethod
    async def fetch(self, sql: str, args: Args, limit: float, *, once: bool = False, over: Over | None = None) -> Rows:
        """The rows of one statement, within `limit` seconds; `once` says that it will not come again soon.

        It is repeated here only when it is certain that it changed nothing.

        Raises:
            BackendUnavailableError: it changed nothing: it was refused, or never sent.
            TimeoutError, OSError, PostgresError: it may have been carried out, or still be.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close what was opened here."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget the connections of an event loop that is gone, or of the parent process."""


class OwnConnections(Requests):
    """At most `size` connections to one server, opened when they are needed.

    Args:
        server: whose connections.
        size: how many at most.
        purpose: what they are for, in error texts.
    """

    def __init__(self, server: Server, size: int, purpose: str) -> None:
        self._server = server
        self._size = size
        self._purpose = purpose
        self._free = size  # how many more may be in use
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle: list[Link] = []  # the last one used is used next
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def fetch(self, sql: str, args: Args, limit: float, *, once: bool = False, over: Over | None = None) -> Rows:
        """See `Requests.fetch`."""
        until = monotonic() + limit
        while True:
            link = self._take_at_once() or await self._take(until)
            try:
                statement = link.prepared.get(sql)
                if statement is None:
                    rows = await self._ask(link, sql, args, once, until)
                else:
                    rows = await statement.fetch(*args, timeout=until - monotonic())
            except BaseException as error:
                self._failed(link, error, over, until)
            else:
                self._put_back(link)
                return rows
            await asyncio.sleep(random() * LONGEST_PAUSE)

    async def close(self) -> None:
        """Close all connections; one that is in use is closed when it is given back."""
        self._closed = True
        for link in self._idle:
            link.raw.terminate()
        self._idle.clear()
        if self._background:
            await asyncio.wait(self._background, timeout=RECOVERY)
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)
        await asyncio.sleep(0)  # transports close in the next round of the loop

    def abandon(self) -> None:
        """See `Requests.abandon`."""
        self._closed = True
        links, self._idle = self._idle, []
        for link in links:
            forget(link.raw)

    # One request

    async def _ask(self, link: Link, sql: str, args: Args, once: bool, until: float) -> Rows:
        """The rows of a statement that is not prepared on this connection; it is prepared now, if that is of use."""
        if once or not self._server.prepares:
            return await link.raw.fetch(sql, *args, timeout=until - monotonic())
        # Named by what it says: where a pooler mixes sessions up, another client's statement of that name is the same
        # one, and never another.
        link.preparing = True
        statement = await link.raw.prepare(sql, name=name_of(sql), timeout=until - monotonic())
        link.prepared[sql], link.preparing = statement, False
        return await statement.fetch(*args, timeout=until - monotonic())

    def _failed(self, link: Link, error: BaseException, over: Over | None, until: float) -> None:
        """Return if the request is to be repeated, or raise what has become of it."""
        if is_refusal(error):
            self._refused(link, error, until)
        elif is_unsendable(error):
            self._put_back(link)
            raise unsendable() from None
        elif is_unsent(error):
            self._drop(link)
            if monotonic() >= until:
                raise refusal(error) from error
        elif link.preparing:
            self._drop(link)  # whether the statement is prepared there now is not known; it was not carried out
            if isinstance(error, Exception):
                raise refusal(error) from error
            raise error
        else:
            recovery = None if link.raw.is_closed() else self._in_background(self._recover(link))
            if recovery is None:
                self._drop(link)
            if over is not None:
                over(recovery)
            raise error

    def _refused(self, link: Link, error: BaseException, until: float) -> None:
        """The server said no, and the connection is as good as before."""
        answer = code(error)
        link.preparing = False
        if answer in NO_STATEMENT:
            self._server.does_not_prepare()
            link.prepared.clear()
        if answer in ELSEWHERE or is_stale(error):
            self._drop(link)
        else:
            self._put_back(link)
        if answer in ELSEWHERE:
            for idle in self._idle:
                idle.raw.terminate()
            self._idle.clear()
        if monotonic() >= until or not (answer in AGAIN | NO_STATEMENT or is_stale(error)):
            raise refusal(error) from error

    # Connections

    def _take_at_once(self) -> Link | None:
        """A connection that is of use, if one is idle; the caller gives it back."""
        if not self._idle or not self._free:
            return None
        link = self._idle[-1]
        if link.raw.is_closed() or monotonic() - link.used_at >= IDLE:
            return None
        self._free -= 1
        return self._idle.pop()

    async def _take(self, until: float) -> Link:
        """A connection that is of use, which the caller gives back."""
        if self._free:
            self._free -= 1
        else:
            await self._wait_for_slot(until)
        try:
            while self._idle:
                link = self._idle.pop()
                if link.raw.is_closed():
                    continue
                if monotonic() - link.used_at < IDLE or await self._answers(link, until):
                    return link
        except BaseException:
            self._free_slot()
            raise
        return await self._connect(until)

    async def _connect(self, until: float) -> Link:
        """A new connection; one that comes after its caller was cancelled is kept for the next one."""
        task = self._in_background(self._server.connect(max(until - monotonic(), 0.001)))
        try:
            with nothing_sent(self._server.silent):
                return Link(await asyncio.shield(task))
        except asyncio.CancelledError:
            task.add_done_callback(self._adopt)
            raise
        except BaseException:
            self._free_slot()
            raise

    def _adopt(self, task: "asyncio.Task[Connection]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._free_slot()
        else:
            self._put_back(Link(task.result()))

    async def _wait_for_slot(self, until: float) -> None:
        begun = monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            with nothing_sent(lambda: self._all_busy(monotonic() - begun)):
                async with asyncio.timeout(max(until - begun, 0.0)):
                    await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self._free_slot()
            if not isinstance(error, TimeoutError):
                raise
            raise self._all_busy(monotonic() - begun) from None

    def _all_busy(self, waited: float) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"PostgreSQL: none of the {self._size} connections for {self._purpose} became free within {waited:.1f} s: "
            "the server is slow; look for what it waits for"
        )

    def _free_slot(self) -> None:
        """Let the next one that waits have a connection."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _answers(self, link: Link, until: float) -> bool:
        """Whether a connection that was not used for a while still leads to the server; if not, it is closed."""
        try:
            async with asyncio.timeout(min(RECOVERY, until - monotonic())):
                await link.raw.execute("SELECT 1")
        except Exception:
            link.raw.terminate()
            return False
        except BaseException:
            link.raw.terminate()
            raise
        return True

    def _put_back(self, link: Link) -> None:
        if self._closed:
            link.raw.terminate()
        else:
            link.used_at = monotonic()
            self._idle.append(link)
        self._free_slot()

    def _drop(self, link: Link) -> None:
        link.raw.terminate()
        self._free_slot()

    def _in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work, name="grelmicro-postgres", context=Context())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _recover(self, link: Link) -> bool:
        """Whether the server is done with the statement that was given up: then the connection goes on.

        asyncpg asks the server to end the statement, and waits for its answer before it sends anything else.
        """
        try:
            done = await self._answers(link, monotonic() + RECOVERY)
        except BaseException:
            self._free_slot()
            raise
        if done:
            self._put_back(link)
        else:
            self._free_slot()
        return done
