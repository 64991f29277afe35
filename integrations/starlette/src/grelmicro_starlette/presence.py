"""Requests whose client may leave: then nothing is waited for any more."""

import asyncio
from types import TracebackType

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from grelmicro.errors import GrelmicroError
from grelmicro.presence import Presence

KEY = "grelmicro.presence"
"""Where the scope of a request or websocket has its `Presence`."""

AT_ONCE = 0.02
"""Seconds within which a lock that is free is got as a rule: before that a client is not watched."""


class ClientLeftError(GrelmicroError, ClientDisconnect):
    """The client went away while its request waited for a lock: it was not taken, and the handler did not run."""


class WhilePresent:
    """A block that waits for the lock `title`, and ends with `ClientLeftError` when the client leaves.

    Its task is cancelled and that taken back, as `asyncio.timeout` does.
    """

    __slots__ = ("_cancelling", "_client", "_left", "_loop", "_start", "_task", "_title")

    def __init__(self, client: Presence, title: str) -> None:
        self._client = client
        self._title = title
        self._left = False

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("there is nothing to cancel outside a task")
        self._task = task
        self._cancelling = task.cancelling()
        # What never waits never comes here, and is spared the timer.
        self._start: asyncio.Handle = self._loop.call_soon(self._watch_later)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._start.cancel()
        self._client.unwatch(self._leave)
        if self._left and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise ClientLeftError(f"the client left while its request waited for lock '{self._title}'") from None

    def _watch_later(self) -> None:
        self._start = self._loop.call_later(AT_ONCE, self._client.watch, self._leave)

    def _leave(self) -> None:
        self._left = True
        self._task.cancel()


def presence(connection: HTTPConnection) -> Presence | None:
    """Of the client of a request or websocket; None where it is not served by `watched`."""
    found = connection.scope.get(KEY)
    return found if isinstance(found, Presence) else None


async def watched(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request or websocket with `app`, and let its client be watched; once is enough, however apps nest."""
    if KEY in scope:
        await app(scope, receive, send)
        return
    client = scope[KEY] = Presence(receive)
    try:
        await app(scope, client.receive, client.noting(send) if scope["type"] == "websocket" else send)
    finally:
        client.close()
