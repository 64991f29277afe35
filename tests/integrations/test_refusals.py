"""Refusals: the documents are part of the interface, and tell nothing about who holds what."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from grelmicro import Grelmicro
from grelmicro.coordination import (
    BackendUnavailableError,
    Coordination,
    CoordinationBackendError,
    LeadershipLostError,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    NotLeaderError,
    OutcomeUnknownError,
    TaskLock,
    WouldBlockError,
)
from grelmicro.errors import SettingsValidationError
from grelmicro.problems import KINDS
from grelmicro.testing import held_elsewhere
from grelmicro_starlette import Problem, exception_handlers, install, locked
from grelmicro_starlette.presence import ClientLeftError
from tests.integrations.asgi import client_of as running
from tests.integrations.callers import Caller

SECRET = "lock 'cart' is held by web-1:task:0123"

BUSY = {
    "type": "urn:grelmicro:busy",
    "title": "Busy",
    "status": 409,
    "detail": "Something is under way, or was just done, that excludes this request.",
}
LOST = {
    "type": "urn:grelmicro:lost",
    "title": "Interrupted",
    "status": 503,
    "detail": "The right to do this was lost on the way. It may have been done, or a part of it.",
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
    "detail": "This worker does not have this duty now.",
}
LEADERSHIP_LOST = {
    "type": "urn:grelmicro:leadership-lost",
    "title": "Interrupted",
    "status": 503,
    "detail": "This worker's duty ended on the way. It may have been done, or a part of it.",
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


def client_of(error: Exception, *, accept: bool = False, **settings: Any) -> TestClient:
    async def fail(request: Request) -> Response:
        raise error

    async def fail_socket(websocket: WebSocket) -> None:
        if accept:
            await websocket.accept()
        raise error

    routes = [Route("/", fail), WebSocketRoute("/ws", fail_socket)]
    return TestClient(Starlette(routes=routes, exception_handlers=exception_handlers(**settings)))


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


def test_store_that_fails_is_one_line_for_many_requests(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(BackendUnavailableError("the file is locked"))
    for _ in range(5):
        client.get("/")
    assert [(record.name, record.levelno, record.message) for record in caplog.records if "/" in record.message] == [
        (
            "grelmicro.starlette",
            logging.WARNING,
            "GET / was refused with 503 (and 0 other requests since the last word on it): the file is locked",
        )
    ]


@pytest.mark.parametrize(
    ("error", "level", "told"),
    [
        (WouldBlockError, logging.DEBUG, "was refused with 409"),
        (LockTimeoutError, logging.DEBUG, "was refused with 409"),
        (NotLeaderError, logging.DEBUG, "was refused with 503"),
        (LockLostError, logging.WARNING, "was interrupted, and answered with 503"),
        (LeadershipLostError, logging.WARNING, "was interrupted, and answered with 503"),
    ],
)
def test_log_names_the_route(error: type[Exception], level: int, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """Contention is no event for the log of a service at its usual level."""
    caplog.set_level(logging.DEBUG, "grelmicro")
    client_of(error("why")).get("/")
    lines = [(record.levelno, record.message) for record in caplog.records if record.name.startswith("grelmicro")]
    assert lines == [(level, f"GET / {told}: why")]


@locked("cart:{cart_id}", timeout=0)
async def checkout(request: Request) -> Response:
    raise AssertionError("must not run")


class Carts(HTTPEndpoint):
    get = checkout


def test_log_names_the_route_by_its_template(caplog: pytest.LogCaptureFixture) -> None:
    """What the client chose may be a secret, and forge lines of the log."""
    caplog.set_level(logging.DEBUG, "grelmicro")
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    below, included, root = FastAPI(), APIRouter(), FastAPI()
    included.add_api_route("/carts/{cart_id}", checkout)
    below.include_router(included, prefix="/included")
    below.add_api_route("/carts/{cart_id}", checkout, methods=["PUT", "POST"])
    plain = Starlette(routes=[Route("/carts/{cart_id:int}", Carts)])
    root.mount("/below", below)
    root.mount("/plain/{shop}", plain)
    for app in (below, plain, root):
        install(app, micro)
    with TestClient(root) as client, held_elsewhere(micro, "cart:7"):
        assert client.get("/below/included/carts/7").status_code == 409
        assert client.post("/below/carts/7").status_code == 409
        assert client.get("/plain/a%0Ab/carts/7").status_code == 409
    told = [record.message.partition(" was refused")[0] for record in caplog.records if "refused" in record.message]
    assert told == [
        "GET /below/included/carts/{cart_id}",
        "POST /below/carts/{cart_id}",
        "GET /plain/a%0Ab/carts/{cart_id:int}",
    ]


def test_log_names_what_was_called_where_no_route_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "grelmicro")
    app = Starlette(routes=[Mount("/", app=fail_below)], exception_handlers=exception_handlers())
    TestClient(app).get("/secret")
    assert [record.message for record in caplog.records if record.name == "grelmicro.starlette"] == [
        "GET fail_below was refused with 409: busy"
    ]


async def fail_below(scope: Scope, receive: Receive, send: Send) -> None:
    raise WouldBlockError("busy")


def test_log_names_websockets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "grelmicro")
    with pytest.raises(WebSocketDenialResponse), client_of(WouldBlockError("busy")).websocket_connect("/ws"):
        pass
    assert "websocket /ws was refused with 409: busy" in [record.message for record in caplog.records]


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
    refuse = exception_handlers()[WouldBlockError]
    assert await refuse(WebSocket(scope, receive, send), WouldBlockError(SECRET)) is None
    assert sent == [{"type": "websocket.close", "code": 1013, "reason": "Busy"}]


async def test_closed_websocket_is_left_alone() -> None:
    async def send(message: Any) -> None:
        assert message["type"] == "websocket.close"

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    websocket = WebSocket({"type": "websocket", "headers": [], "path": "/"}, receive, send)
    await websocket.close()
    for error in (WouldBlockError(SECRET), ClientLeftError(SECRET)):
        assert await exception_handlers()[type(error)](websocket, error) is None


@pytest.mark.parametrize(
    ("setting", "busy_for", "told"),
    [(1, None, "1"), (0.2, None, "1"), (1, 0.0, "1"), (1, 41.2, "42"), (5, 3.0, "5"), (0, None, "0"), (0, 0.1, "1")],
)
def test_a_minimum_hold_is_told_where_it_is_longer(setting: float, busy_for: float | None, told: str) -> None:
    error = WouldBlockError(SECRET)
    error.retry_after, error.busy_for = 3600.0, busy_for  # how long the lease lasts promises nothing
    assert client_of(error, retry_after=setting).get("/").headers["retry-after"] == told


async def test_a_job_that_ran_tells_when_it_can_run_again() -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    report = TaskLock("report", min_hold_duration=300, lease_duration=600)

    async def run(request: Request) -> Response:
        async with report:
            return Response()

    app = FastAPI(routes=[Route("/report", run)])
    install(app, micro)
    async with running(app) as client:
        assert (await client.get("/report")).status_code == 200
        refusal = await client.get("/report")
    assert refusal.status_code == 409
    assert refusal.headers["retry-after"] == "300"


async def test_a_lock_that_is_held_promises_nothing() -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])

    @locked("cart", timeout=0)
    async def checkout(request: Request) -> Response:
        return Response()

    app = FastAPI(routes=[Route("/", checkout)])
    install(app, micro)
    async with running(app) as client, held_elsewhere(micro, "cart", lease_duration=3600):
        assert (await client.get("/")).headers["retry-after"] == "1"


def envelope(connection: HTTPConnection, problem: Problem) -> Response:
    """An answer in an application's own way."""
    error = {"code": problem.kind.upper(), "path": connection.url.path, "message": problem.detail}
    return JSONResponse({"error": error}, 423, {"x-wait": str(problem.retry_after)})


def test_the_application_decides_how_a_refusal_looks() -> None:
    error = WouldBlockError(SECRET)
    error.busy_for = 8.5
    response = client_of(error, refusal=envelope).get("/")
    assert (response.status_code, response.headers["content-type"]) == (423, "application/json")
    assert response.json() == {"error": {"code": "BUSY", "path": "/", "message": BUSY["detail"]}}
    assert response.headers["x-wait"] == "9"
    assert "retry-after" not in response.headers


def test_the_application_decides_for_websockets_too() -> None:
    client = client_of(WouldBlockError(SECRET), refusal=envelope)
    with pytest.raises(WebSocketDenialResponse) as denial, client.websocket_connect("/ws"):
        pass
    assert (denial.value.status_code, denial.value.json()["error"]["path"]) == (423, "/ws")


@pytest.mark.parametrize(("error", "document"), DOCUMENTS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_refusal_goes_through_one_place(error: type[Exception], document: dict[str, Any]) -> None:
    seen: list[Problem] = []

    def mine(connection: HTTPConnection, problem: Problem) -> Response:
        seen.append(problem)
        return problem.response(type=f"https://errors.example/{problem.kind}", instance=connection.url.path)

    response = client_of(error(SECRET), refusal=mine).get("/")
    kind = document["type"].removeprefix("urn:grelmicro:")
    assert seen == [Problem(kind, document["status"], document["title"], document["detail"], 1)]
    assert response.json() == {**document, "type": f"https://errors.example/{kind}", "instance": "/"}
    assert response.headers["content-type"] == "application/problem+json"


def test_texts_can_be_translated() -> None:
    def german(connection: HTTPConnection, problem: Problem) -> Response:
        return replace(problem, title="Belegt").response()

    response = client_of(WouldBlockError(SECRET), refusal=german).get("/")
    assert response.json() == {**BUSY, "title": "Belegt"}
    assert response.headers["retry-after"] == "1"


def test_install_takes_it_too() -> None:
    async def busy(request: Request) -> Response:
        raise WouldBlockError(SECRET)

    app = Starlette(routes=[Route("/", busy)])
    install(app, Grelmicro(uses=[Coordination.from_url("memory://")]), refusal=envelope)
    with TestClient(app) as client:
        assert client.get("/").status_code == 423


async def coroutine(connection: HTTPConnection, problem: Problem) -> Response:
    return Response()


class Coroutine:
    async def __call__(self, connection: HTTPConnection, problem: Problem) -> Response:
        return Response()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (3, "not int"),
        (Response(), "not Response"),
        (coroutine, "not a coroutine function"),
        (partial(coroutine), "not partial"),
        (Coroutine(), "not Coroutine"),
    ],
    ids=["number", "response", "coroutine", "partial", "object"],
)
def test_what_cannot_make_an_answer_is_refused_before_the_start(wrong: Any, told: str) -> None:
    app, micro = Starlette(), Grelmicro(uses=[Coordination.from_url("memory://")])
    for refused in (lambda: exception_handlers(refusal=wrong), lambda: install(app, micro, refusal=wrong)):
        with pytest.raises(SettingsValidationError, match=f"refusal= should be a function .*, {told}$"):
            refused()
    assert (app.user_middleware, app.exception_handlers) == ([], {})


@pytest.mark.parametrize("answer", [None, {"code": "busy"}], ids=["nothing", "dict"])
def test_a_refusal_that_is_no_response_does_not_cost_the_client_its_answer(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(WouldBlockError(SECRET), refusal=lambda connection, problem: answer)
    for _ in range(3):
        response = client.get("/")
        assert (response.status_code, response.json(), response.headers["retry-after"]) == (409, BUSY, "1")
    (told,) = [record for record in caplog.records if record.name == "grelmicro.starlette"]
    assert told.levelno == logging.ERROR
    assert f"refusal= returned {type(answer).__name__} and no Response" in told.getMessage()


def test_a_refusal_that_fails_does_not_either(caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(WouldBlockError(SECRET), refusal=lambda connection, problem: Response(problem["kind"]))
    with pytest.raises(WebSocketDenialResponse) as denial, client.websocket_connect("/ws"):
        pass
    assert denial.value.json() == BUSY
    (told,) = [record for record in caplog.records if record.name == "grelmicro.starlette"]
    assert "refusal= failed" in told.getMessage()
    assert told.exc_info
    assert told.exc_info[0] is TypeError


def test_a_coroutine_that_is_returned_is_told_like_any_other_answer(caplog: pytest.LogCaptureFixture) -> None:
    """One that stays behind without being awaited would be a warning, and so an error here."""
    client = client_of(WouldBlockError(SECRET), refusal=lambda connection, problem: coroutine(connection, problem))
    assert client.get("/").json() == BUSY
    assert "refusal= returned coroutine and no Response" in caplog.text


def test_an_answer_tells_nothing_of_what_the_route_did_before() -> None:
    """The lock may have been taken inside the route, when it had done something."""
    for kind in KINDS.values():
        assert "othing was done" not in kind.detail


def test_a_client_that_left_gets_nothing() -> None:
    response = client_of(ClientLeftError(SECRET), refusal=envelope).get("/")
    assert (response.status_code, response.content) == (499, b"")


@pytest.mark.parametrize("ended_by", ["client", "app"])
async def test_a_websocket_that_is_over_is_told_nothing_more(ended_by: str) -> None:
    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        if ended_by == "client":
            await websocket.receive()
        else:
            await websocket.close()
        raise LockLostError(SECRET)

    app = Starlette(routes=[WebSocketRoute("/", talk)], exception_handlers=exception_handlers())
    caller = Caller("/", kind="websocket")
    caller.connect()
    caller.leave()
    await caller.call(app)
    assert [message.get("code") for message in caller.sent] == ([None] if ended_by == "client" else [None, 1000])


async def test_a_handshake_whose_client_left_is_not_answered() -> None:
    """Servers take the lost connection for its end, and what is sent to it for an error."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.disconnect", "code": 1005}

    scope = {"type": "websocket", "extensions": {"websocket.http.response": {}}, "headers": [], "path": "/"}
    handler = exception_handlers()[ClientLeftError]
    assert await handler(WebSocket(scope, receive, send), ClientLeftError(SECRET)) is None
    assert sent == []
