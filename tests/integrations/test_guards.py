"""`locked` and `leader_only` on Starlette handlers."""

import asyncio
import threading
import time
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, LeadershipLostError, LockHandle
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.testing.aids import held_elsewhere
from grelmicro_starlette import install, leader_only, lifespan, locked


def new() -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")])


def serving(micro: Grelmicro, *routes: Any) -> TestClient:
    app = Starlette(routes=routes)
    install(app, micro)
    return TestClient(app)


@locked("order:{order_id}", timeout=0.1)
async def ship(request: Request) -> Response:
    """Ship an order."""
    held: LockHandle = request.state.lock
    return PlainTextResponse(f"{held.name} {held.valid}")


@locked("order:{order_id}", timeout=0.1)
def ship_in_thread(request: Request) -> Response:
    assert threading.current_thread() is not threading.main_thread()
    return PlainTextResponse(f"{request.state.lock.name} {request.state.lock.valid}")


class Orders(HTTPEndpoint):
    @locked("order:{order_id}", timeout=0.1)
    async def post(self, request: Request) -> Response:
        return PlainTextResponse(f"{request.state.lock.name} {request.state.lock.valid}")


@pytest.mark.parametrize(
    "route",
    [
        Route("/orders/{order_id}", ship, methods=["POST"]),
        Route("/orders/{order_id}", ship_in_thread, methods=["POST"]),
        Route("/orders/{order_id}", Orders),
    ],
    ids=["async", "plain", "class"],
)
def test_handler_runs_under_the_lock(route: Route) -> None:
    micro = new()
    with serving(micro, route) as client:
        for _ in range(2):
            assert client.post("/orders/7").text == "order:7 True"
        with held_elsewhere(micro, "order:7"):
            assert client.post("/orders/7").status_code == 409
            assert client.post("/orders/8").text == "order:8 True"
        assert client.post("/orders/7").text == "order:7 True"


@pytest.mark.skipif(not hasattr(State, "__getitem__"), reason="the request state of this Starlette is no mapping")
def test_state_is_read_as_a_mapping() -> None:
    @locked("order:{order_id}")
    async def show(request: Request) -> Response:
        return PlainTextResponse(str(request.state["lock"] is request.state.lock))

    with serving(new(), Route("/orders/{order_id}", show)) as client:
        assert client.get("/orders/7").text == "True"


def test_websocket_holds_the_lock_while_it_is_open() -> None:
    @locked("room:{room}", timeout=0.1)
    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(websocket.state.lock.name)
        await websocket.receive_text()
        await websocket.close()

    with serving(new(), WebSocketRoute("/{room}", chat)) as client:
        with client.websocket_connect("/a") as socket:
            assert socket.receive_text() == "room:a"
            with pytest.raises(WebSocketDenialResponse), client.websocket_connect("/a"):
                pass
            socket.send_text("bye")
        with client.websocket_connect("/a") as socket:
            assert socket.receive_text() == "room:a"
            socket.send_text("bye")


def test_convertor_makes_one_lock_of_two_spellings() -> None:
    with serving(new(), Route("/orders/{order_id:int}", ship, methods=["POST"])) as client:
        assert client.post("/orders/042").text == client.post("/orders/42").text == "order:42 True"


def test_decorated_handler_keeps_its_name_and_text() -> None:
    assert ship.__name__ == "ship"
    assert ship.__doc__ == "Ship an order."


def test_lock_is_free_after_an_error() -> None:
    @locked("order:{order_id}", timeout=0)
    async def fail(request: Request) -> Response:
        raise ValueError("broken")

    with serving(new(), Route("/{order_id}", fail)) as client:
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                client.get("/7")


def test_field_that_is_no_path_parameter_is_told() -> None:
    told = pytest.raises(SettingsValidationError, match="no such path parameter: it has other")
    with serving(new(), Route("/{other}", ship)) as client, told:
        client.get("/7")


def test_handler_without_request_is_told() -> None:
    with pytest.raises(TypeError, match="called without a request"):
        asyncio.run(ship("no request"))


@pytest.mark.parametrize("settings", [{"timeout": -1}, {"lease_duration": 0}])
def test_bad_settings_are_refused_where_they_are_written(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsValidationError):
        locked("order:{order_id}", **settings)


def test_leader_only() -> None:
    leader = LeaderElection("feed")

    @leader_only(leader)
    async def rebuild(request: Request) -> Response:
        return PlainTextResponse(f"{request.state.leader.holder == leader.guard().holder}")

    @leader_only(leader)
    def rebuild_in_thread(request: Request) -> Response:
        return PlainTextResponse(f"{request.state.leader.fence == leader.guard().fence}")

    micro = new()
    app = Starlette(
        routes=[Route("/async", rebuild), Route("/plain", rebuild_in_thread)],
        lifespan=lifespan(micro, lead={leader: asyncio.Event().wait}),
    )
    with TestClient(app) as client:
        until = time.monotonic() + 10
        while not leader.is_leader():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert client.get("/async").text == "True"
        assert client.get("/plain").text == "True"


def test_leader_only_elsewhere() -> None:
    leader, other = LeaderElection("feed"), LeaderElection("feed")

    @leader_only(other)
    async def rebuild(request: Request) -> Response:
        raise AssertionError("must not run")

    micro = new()
    app = Starlette(routes=[Route("/", rebuild)])
    app.router.lifespan_context = lifespan(micro, lead={leader: asyncio.Event().wait})
    install(app, micro)
    app.router.lifespan_context = lifespan(micro, app.router.lifespan_context, lead={other: asyncio.Event().wait})
    with TestClient(app) as client:
        until = time.monotonic() + 10
        while not leader.is_leader() or other.record is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        refusal = client.get("/")
    assert refusal.status_code == 503
    assert refusal.json()["type"] == "urn:grelmicro:not-leader"


def test_election_that_never_started_is_told() -> None:
    @leader_only(LeaderElection("feed"))
    async def rebuild(request: Request) -> Response:
        raise AssertionError("must not run")

    with serving(new(), Route("/", rebuild)) as client, pytest.raises(OutOfContextError, match="never started"):
        client.get("/")


@pytest.mark.parametrize("wrong", [ship, "feed", LeaderElection, None], ids=["bare", "name", "class", "none"])
def test_something_that_is_no_election_is_refused_where_it_is_written(wrong: Any) -> None:
    with pytest.raises(
        SettingsValidationError, match=r"leader_only\(\) takes a LeaderElection, not .*@leader_only\(leader\)"
    ):
        leader_only(wrong)


async def test_lost_term_ends_the_handler() -> None:
    leader = LeaderElection("feed")
    ended = asyncio.Event()

    @leader_only(leader)
    async def rebuild(request: Request) -> Response:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError("must not come here")

    micro = new()
    stop = asyncio.Event()
    async with micro:
        election = asyncio.create_task(leader(stop=stop))
        await leader.wait_for_leader()
        request = Request({"type": "http", "headers": [], "state": {"grelmicro": micro}})
        handler = asyncio.create_task(rebuild(request))
        await asyncio.sleep(0.05)
        stop.set()
        with pytest.raises(LeadershipLostError, match="lost while its work was running"):
            await asyncio.wait_for(handler, 10)
        assert ended.is_set()
        await election
