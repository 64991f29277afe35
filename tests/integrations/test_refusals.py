"""Refusals: the documents are part of the interface, and tell nothing about who holds what."""

import logging
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from grelmicro.coordination import (
    BackendUnavailableError,
    CoordinationBackendError,
    LeadershipLostError,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    NotLeaderError,
    OutcomeUnknownError,
    WouldBlockError,
)
from grelmicro_starlette import exception_handlers

SECRET = "lock 'cart' is held by web-1:task:0123"

BUSY = {
    "type": "urn:grelmicro:busy",
    "title": "Busy",
    "status": 409,
    "detail": "Another request is being served that excludes this one. Nothing was done.",
}
LOST = {
    "type": "urn:grelmicro:lost",
    "title": "Interrupted",
    "status": 503,
    "detail": "The right to do this was lost on the way. It may have been done in part.",
}
UNAVAILABLE = {
    "type": "urn:grelmicro:unavailable",
    "title": "Coordination unavailable",
    "status": 503,
    "detail": "It could not be decided whose turn it is.",
}
UNKNOWN = {
    "type": "urn:grelmicro:unknown",
    "title": "Coordination unavailable",
    "status": 503,
    "detail": "It could not be learned in time whose turn it is.",
}
NOT_LEADER = {
    "type": "urn:grelmicro:not-leader",
    "title": "Not the leader",
    "status": 503,
    "detail": "Another worker has this duty. Nothing was done.",
}
LEADERSHIP_LOST = {
    "type": "urn:grelmicro:leadership-lost",
    "title": "Interrupted",
    "status": 503,
    "detail": "This worker's duty ended on the way. It may have been done in part.",
}

DOCUMENTS: list[tuple[type[Exception], dict[str, Any]]] = [
    (WouldBlockError, BUSY),
    (LockTimeoutError, BUSY),
    (LockNotOwnedError, LOST),
    (LockLostError, LOST),
    (BackendUnavailableError, UNAVAILABLE),
    (CoordinationBackendError, UNAVAILABLE),
    (OutcomeUnknownError, UNKNOWN),
    (NotLeaderError, NOT_LEADER),
    (LeadershipLostError, LEADERSHIP_LOST),
]


def client_of(error: Exception, *, accept: bool = False) -> TestClient:
    async def fail(request: Request) -> Response:
        raise error

    async def fail_socket(websocket: WebSocket) -> None:
        if accept:
            await websocket.accept()
        raise error

    routes = [Route("/", fail), WebSocketRoute("/ws", fail_socket)]
    return TestClient(Starlette(routes=routes, exception_handlers=exception_handlers()))


@pytest.mark.parametrize(("error", "document"), DOCUMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_document(error: type[Exception], document: dict[str, Any]) -> None:
    response = client_of(error(SECRET)).get("/")
    assert response.status_code == document["status"]
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == "1"
    assert response.json() == document


def test_programming_errors_are_no_refusals() -> None:
    with pytest.raises(LockReentrantError):
        client_of(LockReentrantError("twice")).get("/")


def test_log_is_told_why_the_store_failed_and_once_for_many_requests(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(BackendUnavailableError("the file is locked"))
    for _ in range(5):
        client.get("/")
    told = [(record.name, record.levelno) for record in caplog.records if "the file is locked" in record.message]
    assert told == [("grelmicro.starlette", logging.WARNING)]


@pytest.mark.parametrize("error", [WouldBlockError, NotLeaderError])
def test_turning_somebody_away_is_no_event_for_the_log(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    client_of(error("busy")).get("/")
    assert not [record for record in caplog.records if record.name.startswith("grelmicro")]


def test_websocket_is_denied_with_the_document() -> None:
    with pytest.raises(WebSocketDenialResponse) as denial, client_of(WouldBlockError(SECRET)).websocket_connect("/ws"):
        pass
    assert denial.value.status_code == 409
    assert denial.value.json() == BUSY


def test_accepted_websocket_is_closed() -> None:
    client = client_of(NotLeaderError(SECRET), accept=True)
    with client.websocket_connect("/ws") as socket, pytest.raises(WebSocketDisconnect) as closed:
        socket.receive_text()
    assert (closed.value.code, closed.value.reason) == (1013, "Not the leader")


async def test_websocket_of_a_server_without_denials_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "extensions": {}, "headers": [], "path": "/"}
    (refuse,) = set(exception_handlers().values())
    assert await refuse(WebSocket(scope, receive, send), WouldBlockError(SECRET)) is None
    assert sent == [{"type": "websocket.close", "code": 1013, "reason": "Busy"}]


async def test_closed_websocket_is_left_alone() -> None:
    async def send(message: Any) -> None:
        assert message["type"] == "websocket.close"

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    websocket = WebSocket({"type": "websocket", "headers": [], "path": "/"}, receive, send)
    await websocket.close()
    (refuse,) = set(exception_handlers().values())
    assert await refuse(websocket, WouldBlockError(SECRET)) is None
