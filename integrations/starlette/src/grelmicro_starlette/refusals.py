"""Refusals as HTTP answers: problem documents (RFC 9457) that tell nothing about who holds what."""

import inspect
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from grelmicro import problems
from grelmicro.callables import runs_in_thread
from grelmicro.config import Duration, check_seconds
from grelmicro.coordination import (
    CoordinationBackendError,
    LeadershipLostError,
    LockNotOwnedError,
    NotLeaderError,
    WouldBlockError,
)
from grelmicro.errors import SettingsValidationError
from grelmicro.presence import Presence
from grelmicro.problems import MEDIA_TYPE, Trouble
from grelmicro_starlette.presence import ClientLeftError, presence
from grelmicro_starlette.serving import WEBSOCKET, route_title

logger = logging.getLogger("grelmicro.starlette")

TRY_AGAIN_LATER = 1013
"""The close code of a refused websocket."""

CLIENT_LEFT = 499
"""The status of a request whose client left."""

GONE = (OSError, WebSocketDisconnect)
"""What sending raises when the client has left: the server's own, and what Starlette makes of it."""


class Problem(problems.Problem):
    """Why a client is refused. It says nothing of who holds what, or where the store is."""

    __slots__ = ()

    def response(self, **members: object) -> Response:
        """The problem document (RFC 9457) with `Retry-After`; `members` are added to it, or replace what it has."""
        headers = {"retry-after": str(self.retry_after)}
        return JSONResponse(self.document(**members), self.status, headers, MEDIA_TYPE)


Refusal = Callable[[HTTPConnection, Problem], Response]


def exception_handlers(*, retry_after: Duration = 1, refusal: Refusal | None = None) -> dict[Any, Any]:
    """The handlers that answer refusals, for the `exception_handlers=` of an application.

    Busy is 409; a lost lock, a worker that does not lead and a store that fails are 503. A websocket gets the same as a
    denial response where the server can send one, and else the close code 1013 with the title. A client that has left
    gets nothing, for which 499 stands in the log.

    Args:
        retry_after: seconds that a client is told to wait, in whole seconds, rounded up. Where a task lock stays held
            longer for its minimum hold, that is told.
        refusal: a plain function that makes the answer of a request or websocket and its `Problem`; None:
            `Problem.response()`. That is the answer also where the function fails, which is logged.

    Raises:
        SettingsValidationError: `retry_after` is no number of seconds, or `refusal` no such function.
    """
    least = check_seconds("retry_after", retry_after, zero=True)
    answer = None if refusal is None else _Answer(refusal)
    store = Trouble()

    async def refuse(connection: Request | WebSocket, error: Exception) -> Response | None:
        problem = Problem.of(error, retry_after=least)
        _log(connection, problem, error, store)
        response = problem.response() if answer is None else answer(connection, problem)
        if isinstance(connection, WebSocket):
            await _deny(connection, response, problem)
            return None
        return response

    refused = (WouldBlockError, LockNotOwnedError, NotLeaderError, CoordinationBackendError)
    return {**dict.fromkeys(refused, refuse), ClientLeftError: _say_nothing}


def _log(connection: HTTPConnection, problem: Problem, error: Exception, store: Trouble) -> None:
    """Write one line that names the route. Contention is no trouble, and a store that fails does so for all routes."""
    if isinstance(error, CoordinationBackendError):
        if (untold := store.untold()) is not None:
            logger.warning(
                "%s was refused with %d (and %d other requests since the last word on it): %s",
                route_title(connection),
                problem.status,
                untold,
                error,
            )
    elif isinstance(error, LockNotOwnedError | LeadershipLostError):
        logger.warning("%s was interrupted, and answered with %d: %s", route_title(connection), problem.status, error)
    elif logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s was refused with %d: %s", route_title(connection), problem.status, error)


async def _say_nothing(connection: Request | WebSocket, error: Exception) -> Response | None:
    """The client has left: nobody reads an answer, but logs and middleware see the status."""
    return Response(status_code=CLIENT_LEFT) if isinstance(connection, Request) else None


class _Answer:
    """The answer that `refusal` makes. A client gets one in any case: refusals are rare, and so are tests of them."""

    def __init__(self, refusal: Refusal) -> None:
        if not callable(refusal) or not runs_in_thread(refusal):
            given = "a coroutine function" if inspect.isroutine(refusal) else type(refusal).__name__
            raise SettingsValidationError(
                "refusal= should be a function (not async) that takes the request or websocket and a Problem, and "
                f"returns a Response, not {given}"
            )
        self._refusal = refusal
        self._trouble = Trouble()

    def __call__(self, connection: HTTPConnection, problem: Problem) -> Response:
        try:
            response: object = self._refusal(connection, problem)
            if isinstance(response, Response):
                return response
            if isinstance(response, Coroutine):
                response.close()
            raise TypeError(f"refusal= returned {type(response).__name__} and no Response")
        except Exception as error:
            if (untold := self._trouble.untold()) is not None:
                logger.exception(
                    "refusal= failed (and %d times since the last word on it): %s; the client got the default answer",
                    untold,
                    error,
                )
            return problem.response()


async def _deny(websocket: WebSocket, response: Response, problem: Problem) -> None:
    """Refuse a websocket, or close one that is open; nothing happens when its client has gone, or goes meanwhile."""
    used: WebSocket = websocket.scope.get(WEBSOCKET, websocket)
    client = presence(used)
    if _is_over(used, client):
        return
    is_open = used.application_state is WebSocketState.CONNECTED or (client is not None and client.is_accepted)
    with suppress(*GONE):
        if not is_open and "websocket.http.response" in used.scope.get("extensions", {}):
            await used.send_denial_response(response)
        else:
            await used.close(TRY_AGAIN_LATER, problem.title)


def _is_over(websocket: WebSocket, client: Presence | None) -> bool:
    """Whether either side is known to have ended it: some servers take for an error what is sent then."""
    return (
        websocket.client_state is WebSocketState.DISCONNECTED
        or websocket.application_state in (WebSocketState.DISCONNECTED, WebSocketState.RESPONSE)
        or (client is not None and (client.has_left or client.is_ended))
    )
