"""Refusals as HTTP answers: problem documents (RFC 9457) that tell nothing about who holds what."""

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketState

from grelmicro.config import check_seconds
from grelmicro.coordination import (
    BackendUnavailableError,
    CoordinationBackendError,
    LeadershipLostError,
    LockNotOwnedError,
    NotLeaderError,
    OutcomeUnknownError,
    WouldBlockError,
)

logger = logging.getLogger("grelmicro.starlette")

TELL_AGAIN = 30.0
"""Seconds between two log lines about a store that goes on failing."""

TRY_AGAIN_LATER = 1013
"""The close code of a refused websocket."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a client is told."""

    kind: str
    status: int
    title: str
    detail: str


PROBLEMS: dict[type[Exception], Problem] = {
    WouldBlockError: Problem(
        "busy", 409, "Busy", "Another request is being served that excludes this one. Nothing was done."
    ),
    LockNotOwnedError: Problem(
        "lost", 503, "Interrupted", "The right to do this was lost on the way. It may have been done in part."
    ),
    LeadershipLostError: Problem(
        "leadership-lost", 503, "Interrupted", "This worker's duty ended on the way. It may have been done in part."
    ),
    NotLeaderError: Problem("not-leader", 503, "Not the leader", "Another worker has this duty. Nothing was done."),
    BackendUnavailableError: Problem(
        "unavailable", 503, "Coordination unavailable", "It could not be decided whose turn it is."
    ),
    OutcomeUnknownError: Problem(
        "unknown", 503, "Coordination unavailable", "It could not be learned in time whose turn it is."
    ),
    CoordinationBackendError: Problem(
        "unavailable", 503, "Coordination unavailable", "It could not be decided whose turn it is."
    ),
}


def exception_handlers(*, retry_after: float = 1) -> dict[Any, Any]:
    """The handlers that answer refusals, for the `exception_handlers=` of an application.

    Busy is 409; a lost lock, a worker that does not lead and a store that fails are 503. The body is
    `application/problem+json` with `type`, `title`, `status` and `detail`. A websocket gets the same as a denial
    response where the server can send one, and else the close code 1013.

    Args:
        retry_after: seconds that a client is told to wait, in whole seconds, rounded up.

    Raises:
        SettingsValidationError: `retry_after` is no number of seconds.
    """
    headers = {"retry-after": str(math.ceil(check_seconds("retry_after", retry_after, zero=True)))}

    trouble = _Trouble()

    async def refuse(connection: Request | WebSocket, error: Exception) -> JSONResponse | None:
        problem = _problem(error)
        if isinstance(error, CoordinationBackendError):
            trouble.tell(error)
        response = JSONResponse(
            {
                "type": f"urn:grelmicro:{problem.kind}",
                "title": problem.title,
                "status": problem.status,
                "detail": problem.detail,
            },
            status_code=problem.status,
            headers=headers,
            media_type="application/problem+json",
        )
        if isinstance(connection, WebSocket):
            await _deny(connection, response, problem)
            return None
        return response

    return dict.fromkeys((WouldBlockError, LockNotOwnedError, NotLeaderError, CoordinationBackendError), refuse)


class _Trouble:
    """Tells the log of a failing store: at first, and now and then while requests go on to be refused."""

    def __init__(self) -> None:
        self._told_at = -math.inf
        self._untold = 0

    def tell(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._told_at < TELL_AGAIN:
            self._untold += 1
            return
        logger.warning("a request was refused (and %d since the last word on it): %s", self._untold, error)
        self._told_at, self._untold = now, 0


def _problem(error: Exception) -> Problem:
    return next(PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)


async def _deny(websocket: WebSocket, response: JSONResponse, problem: Problem) -> None:
    if websocket.application_state is WebSocketState.CONNECTING:
        if "websocket.http.response" in websocket.scope.get("extensions", {}):
            await websocket.send_denial_response(response)
            return
    elif websocket.application_state is not WebSocketState.CONNECTED:
        return
    await websocket.close(TRY_AGAIN_LATER, problem.title)
