"""The connections to one Redis server: few, each for one request at a time, and each request within its time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

from grelmicro import lifecycle
from grelmicro.backends.redis.errors import ELSEWHERE, code, is_lasting, reason
from grelmicro.backends.redis.library import (
    AbstractConnection,
    AuthenticationError,
    BusyLoadingError,
    RedisError,
    ResponseError,
)
from grelmicro.backends.redis.request import Request, connect, disconnect, works
from grelmicro.backends.redis.server import RedisServer
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, OutcomeUnknownError
from grelmicro.leases.unsent import nothing_sent


def _ignore() -> None:
    """Nothing depends on these connections."""


Unanswered = Callable[["asyncio.Task[bool] | None"], None]
"""Is told of a request whose caller got no reply: with a task that ends when the last reply came (its result says
whether it did), None if none will come."""


class Connections:
    """Connections of redis-py, used without its client.

    The client takes and gives back a connection under several locks for each command, starts a task for each that has
    a time limit, and by default sends a command again when no reply came. Here a connection is taken from a list, and
    goes back only when every reply to it was read; and nothing is sent twice.

    Args:
        server: where they lead to.
    """

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.doubted: Callable[[], None] = _ignore
        """Called when connections that were made earlier may lead nowhere, or to a server that was demoted."""
        self._limit = server.limits.command_timeout
        self._generation = lifecycle.generation
        self._idle: list[AbstractConnection] = []  # the one that was used last is the last
        self._in_use: set[AbstractConnection] = set()
        self._places = asyncio.Semaphore(server.limits.max_connections)
        self._reserved = asyncio.Semaphore(1)
        self._closed = False
        self._background: set[asyncio.Task[Any]] = set()
        # It is cancelled at closing; and by `asyncio.run` in a program that closes nothing.
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="grelmicro-redis")

    async def close(self) -> None:
        """Close all of them, those in use too."""
        self._keeper.cancel()
        await asyncio.wait({self._keeper})

    async def ask(
        self,
        commands: bytes,
        replies: int,
        what: str,
        *,
        urgent: bool = False,
        changes: bool = True,
        unanswered: Unanswered | None = None,
    ) -> list[Any]:
        """Send commands; the reply to each, which is a `ResponseError` if the server refused it.

        When the caller is cancelled, the replies are read in the background, so that the connection can be used on.

        Args:
            commands: as they are sent.
            replies: how many they are.
            what: what they do, for error texts.
            urgent: whether the connection that is reserved for such requests may be used.
            changes: whether they change anything.
            unanswered: called when this ends without the replies, although something may have been sent.

        Raises:
            BackendUnavailableError: nothing was sent, or nothing was done.
            OutcomeUnknownError: they were sent, and not every reply came.
        """
        place = self._place(urgent)
        in_use = place.locked()
        request = Request(commands, replies)
        begun = monotonic()
        rest: asyncio.Task[bool] | None = None
        try:
            async with asyncio.timeout(self._limit) as limit:
                with nothing_sent(lambda: self._unsent(TimeoutError(), what, in_use, monotonic() - begun)):
                    await place.acquire()
                try:
                    with nothing_sent(lambda: self._unsent(TimeoutError(), what, False, monotonic() - begun)):
                        request.connection = await self._take()
                    await request.send()
                    await request.read()
                    self._give_back(request.connection, request.answers)
                except asyncio.CancelledError:
                    if request.is_sent and not limit.expired():
                        rest = self._in_background(self._read_rest(request, place, limit.when()))
                    raise
                finally:
                    if rest is None:
                        place.release()
        except BaseException as error:
            failed = isinstance(error, TimeoutError | RedisError | OSError)
            if request.connection is None:
                if isinstance(error, Exception) and failed:
                    raise self._unsent(error, what, in_use, self._limit) from error
                raise
            if rest is None:
                self._drop([request.connection])
                if failed:
                    self._suspect_others()
            if unanswered is not None:
                unanswered(rest)
            if isinstance(error, Exception) and failed:
                raise self._no_reply(error, what, changes and not _is_refusal(error, replies)) from error
            raise
        return request.answers

    @asynccontextmanager
    async def dedicated(self) -> AsyncIterator[AbstractConnection]:
        """A connection for something else than requests, beside all others."""
        connection = self.server.connection()
        self._in_use.add(connection)
        try:
            async with asyncio.timeout(self._limit):
                await connect(connection)
            yield connection
        finally:
            self._drop([connection])

    def _place(self, urgent: bool) -> asyncio.Semaphore:
        """What limits the requests of this kind; an urgent one uses whatever is free."""
        return self._reserved if urgent and (self._places.locked() or not self._reserved.locked()) else self._places

    async def _take(self) -> AbstractConnection:
        """A connection that works, as far as this side can tell."""
        while self._idle:
            connection = self._idle.pop()
            self._in_use.add(connection)
            try:
                if await works(connection):
                    return connection
            except BaseException:
                self._drop([connection])
                raise
            self._drop([connection])
        connection = self.server.connection()
        self._in_use.add(connection)
        try:
            await connect(connection)
        except BaseException:
            self._drop([connection])
            raise
        return connection

    def _give_back(self, connection: AbstractConnection, answers: list[Any]) -> None:
        """It can be used again. Nothing here waits, so that a cancellation cannot come between."""
        self._in_use.discard(connection)
        self._idle.append(connection)
        if any(isinstance(each, ResponseError) and code(each) in ELSEWHERE for each in answers):
            self._suspect_others()
        elif self._closed:
            self._drop_idle()

    def _suspect_others(self) -> None:
        """Close the idle connections, and have those for messages tested: they may have failed like the one in use.

        A load balancer forgets idle connections together and says nothing, and after a fail-over all of them lead to
        the demoted server.
        """
        self._drop_idle()
        self.doubted()

    def _drop_idle(self) -> None:
        self._drop(self._idle)
        self._idle = []

    def _drop(self, connections: Iterable[AbstractConnection]) -> None:
        if self._is_inherited:
            return
        for connection in connections:
            self._in_use.discard(connection)
            self._in_background(disconnect(connection))

    async def _read_rest(self, request: Request, place: asyncio.Semaphore, until: float | None) -> bool:
        """Read the replies that nobody waits for any more; whether all of them came."""
        assert request.connection is not None
        try:
            async with asyncio.timeout_at(until):
                await request.read()
        except (TimeoutError, RedisError, OSError):
            self._drop([request.connection])
            self._suspect_others()
            return False
        except BaseException:
            self._drop([request.connection])
            raise
        else:
            self._give_back(request.connection, request.answers)
            return True
        finally:
            place.release()

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _keep(self) -> None:
        """Wait until it is cancelled, and close every connection."""
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if self._is_inherited:
                return
            self._closed = True
            self._drop([*self._idle, *self._in_use])
            self._idle.clear()
            while self._background:
                await asyncio.wait(self._background)

    @property
    def _is_inherited(self) -> bool:
        """Whether a forked child runs or throws away what its parent had begun: the connections are the parent's."""
        return self._generation is not lifecycle.generation

    def _unsent(self, error: Exception, what: str, in_use: bool, waited: float) -> BackendUnavailableError:
        if isinstance(error, TimeoutError) and in_use:
            number = self.server.limits.max_connections
            return BackendUnavailableError(
                f"{what}: all {number} connections to {self.server.safe_url} were in use, and none became free within "
                f"{waited:.3g} s: raise max_connections, or find out why the server is slow"
            )
        if isinstance(error, TimeoutError):
            why = f"no connection within {waited:.3g} s: check the address and the network"
        elif isinstance(error, ResponseError | AuthenticationError | BusyLoadingError):
            why = reason(error)
        else:
            why = f"{str(error).rstrip('.')}: check that it runs, and the address"
        return BackendUnavailableError(
            f"{what}: {self.server.safe_url} cannot be used: {why}", lasting=is_lasting(error)
        )

    def _no_reply(self, error: Exception, what: str, changes: bool) -> CoordinationBackendError:
        if isinstance(error, TimeoutError):
            why = f"did not answer within {self._limit:g} s"
        elif isinstance(error, AuthenticationError | BusyLoadingError):
            why = f"refused it: {reason(error)}"
        else:
            why = "ended the connection before it answered"
        text = f"{what}: {self.server.safe_url} {why}"
        if changes:
            return OutcomeUnknownError(f"{text}; whether it was done is not known: check the server and the network")
        return BackendUnavailableError(text, lasting=is_lasting(error))


def _is_refusal(error: Exception, replies: int) -> bool:
    """Whether it is the server's answer to the only command, though redis-py takes it for a broken connection."""
    return replies == 1 and isinstance(error, AuthenticationError | BusyLoadingError)
