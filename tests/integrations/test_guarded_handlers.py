"""What `locked` and `leader_only` decorate: functions, methods, objects, and what others have decorated."""

import functools
import threading
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser, requires
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.testing.aids import held_elsewhere
from grelmicro_starlette import install, leader_only, locked

guard = locked("order:{order_id}", timeout=0)


async def show(request: Request) -> Response:
    return PlainTextResponse(f"{request.state.lock.valid} in the loop")


def show_in_thread(request: Request) -> Response:
    assert threading.current_thread() is not threading.main_thread()
    return PlainTextResponse(f"{request.state.lock.valid} in a thread")


class Orders(HTTPEndpoint):
    """Handlers that are methods."""

    @guard
    async def get(self, request: Request) -> Response:
        return await show(request)

    @guard
    def post(self, request: Request) -> Response:
        return show_in_thread(request)


class Showing:
    """A handler that is an object."""

    async def __call__(self, request: Request) -> Response:
        return await show(request)


def in_other_words(handler: Any) -> Any:
    """What many decorators are: a plain function around one that may be async."""

    @functools.wraps(handler)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs)

    return wrapper


HANDLERS = {
    "async": guard(show),
    "plain": guard(show_in_thread),
    "class": Orders,
    "object": guard(Showing()),
    "partial": guard(functools.partial(show)),
    "partial-plain": guard(functools.partial(show_in_thread)),
    "decorated": guard(in_other_words(show)),
    "decorated-plain": guard(in_other_words(show_in_thread)),
    "requires-inside": guard(requires("shop")(show)),
    "requires-inside-plain": guard(requires("shop")(show_in_thread)),
    "requires-outside": requires("shop")(guard(show)),
    "requires-outside-plain": requires("shop")(guard(show_in_thread)),
}


class Guests(AuthenticationBackend):
    """Lets everybody shop but strangers."""

    async def authenticate(self, connection: HTTPConnection) -> tuple[AuthCredentials, SimpleUser]:
        return AuthCredentials([] if "stranger" in connection.headers else ["shop"]), SimpleUser("guest")


def serving(micro: Grelmicro, endpoint: Any) -> TestClient:
    route = Route("/{order_id}", endpoint, methods=None if isinstance(endpoint, type) else ["GET", "POST"])
    app = Starlette(routes=[route], middleware=[Middleware(AuthenticationMiddleware, backend=Guests())])
    install(app, micro)
    return TestClient(app)


@pytest.mark.parametrize("kind", HANDLERS)
def test_handler_holds_the_lock_and_runs_where_it_would_without(kind: str) -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    with serving(micro, HANDLERS[kind]) as client:
        place = "in a thread" if "plain" in kind else "in the loop"
        assert client.get("/7").text == f"True {place}"
        if kind == "class":
            assert client.post("/7").text == "True in a thread"
        with held_elsewhere(micro, "order:7"):
            assert client.get("/7").status_code == 409
        if "requires" in kind:
            assert client.get("/7", headers={"stranger": "1"}).status_code == 403
        with held_elsewhere(micro, "order:7", timeout=0):
            pass


async def stream(request: Request) -> Any:
    yield b"."


def plain_stream(request: Request) -> Any:
    yield b"."


@pytest.mark.parametrize("decorate", [guard, leader_only(LeaderElection("feed"))], ids=["locked", "leader_only"])
@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (stream, "'stream' is a generator: locked"),
        (plain_stream, "'plain_stream' is a generator: locked"),
        (functools.partial(stream), "'stream' is a generator: locked"),
        (in_other_words(stream), "'stream' is a generator: locked"),
        (Orders, "'Orders' is a class: .* decorate its methods"),
    ],
    ids=["async", "plain", "partial", "decorated", "class"],
)
def test_what_has_not_ended_when_it_returns_is_refused(decorate: Any, handler: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        decorate(handler)
