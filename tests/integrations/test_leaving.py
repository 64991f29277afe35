"""A real server, and clients that go away while their request waits for a lock, and while it holds one."""

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, LockTimeoutError
from grelmicro.task import Tasks
from grelmicro.testing.aids import held_elsewhere
from tests.deployments.server import SOON, Deployment, deployed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MIDDLEWARE = ["none", "base", "cancel"]

ONE_WORKER = {"uvicorn": (), "gunicorn asgi": ("--workers", 1)}
"""What each server needs so that the test meets one process only."""

UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + "A" * 22 + "=="
)


class Site:
    """A server, and another worker on the same store."""

    def __init__(self, server: Deployment, elsewhere: Grelmicro) -> None:
        self.server = server
        self.elsewhere = elsewhere

    def state(self, query: str = "") -> dict[str, Any]:
        """What the server says of itself."""
        answer: dict[str, Any] = self.server.ask(f"/state?{query}").json()
        return answer

    def wait(self, condition: Callable[[dict[str, Any]], bool], text: str) -> None:
        """Wait until the server is in some state."""
        until = time.monotonic() + 30
        while not condition(self.state()):
            assert time.monotonic() < until, f"{text}: {self.state()}"
            time.sleep(0.02)

    def is_free(self, name: str, within: float) -> bool:
        """Whether another worker gets a lock within some seconds."""
        try:
            with held_elsewhere(self.elsewhere, name, timeout=within):
                return True
        except LockTimeoutError:
            return False

    def send(self, text: str) -> socket.socket:
        """Open a connection and send this."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(text.encode())
        return connection

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.server.url.rpartition(":")[2])


def post(path: str, body: str = "{}", length: int | None = None) -> str:
    """A request, whose body may be shorter than it says."""
    fields = f"Host: test\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n{body}"


@contextmanager
def site(folder: Path, middleware: str = "none", server: str = "uvicorn") -> Iterator[Site]:
    store = f"sqlite:///{folder}/locks.db"
    app = "tests.integrations.left_app:app"
    with (
        deployed(
            server, app, *ONE_WORKER[server], folder=folder, answers="/state", STORE=store, MIDDLEWARE=middleware
        ) as deployment,
        Grelmicro(uses=[Coordination.from_url(store)]) as elsewhere,
    ):
        yield Site(deployment, elsewhere)


@pytest.mark.parametrize(
    ("server", "middleware"), [*(("uvicorn", each) for each in MIDDLEWARE), ("gunicorn asgi", "none")]
)
def test_client_that_leaves_while_it_waits_leaves_the_queue(server: str, middleware: str, tmp_path: Path) -> None:
    requests = [
        post("/starlette/1/buy"),
        post("/starlette/1/buy", length=100),  # most of its body never comes
        post("/fastapi/1/buy"),
        f"GET /chat/1 HTTP/1.1\r\nHost: test\r\n{UPGRADE}\r\n\r\n",
        f"GET /follow/1 HTTP/1.1\r\nHost: test\r\n{UPGRADE}\r\n\r\n",
    ]
    with site(tmp_path, middleware, server) as shop:
        with held_elsewhere(shop.elsewhere, "cart:1"), held_elsewhere(shop.elsewhere, "room:1"):
            for request in requests:
                connection = shop.send(request)
                shop.wait(lambda state: state["waiting"] == 1, "it waits")
                time.sleep(0.1)  # by then it is watched
                connection.close()
                shop.wait(lambda state: state["waiting"] == 0, "it left")
        assert shop.is_free("cart:1", within=SOON)
        assert shop.is_free("room:1", within=SOON)
        assert shop.state()["seen"] == []
        shop.wait(lambda state: "Presence._read" not in state["tasks"], "nobody reads ahead any more")
        assert "ERROR" not in shop.server.log
        assert "Traceback" not in shop.server.log


@pytest.mark.parametrize("middleware", MIDDLEWARE)
def test_client_that_leaves_while_it_holds(middleware: str, tmp_path: Path) -> None:
    """Its handler ends as if nothing had happened, unless somebody cancels it; then the lock is free."""
    with site(tmp_path, middleware) as shop:
        for path in ("/starlette/1/pay", "/fastapi/1/pay"):
            connection = shop.send(post(path))
            shop.wait(lambda state: state["seen"] == ["began"], "it holds")
            connection.close()
            if middleware == "cancel":
                shop.wait(lambda state: state["seen"] == ["began", "cancelled"], "it is cancelled")
            else:
                assert not shop.is_free("cart:1", within=0.2)
                assert shop.state("finish=1")["seen"] == ["began"]
                shop.wait(lambda state: state["seen"] == ["began", "ended"], "it ends")
            assert shop.is_free("cart:1", within=SOON)
            shop.state("forget=1")


def test_websocket_frees_its_lock_when_its_client_leaves(tmp_path: Path) -> None:
    with site(tmp_path) as shop:
        for path in ("/chat/1", "/follow/1"):
            with connect(f"ws://127.0.0.1:{shop.port}{path}", proxy=None) as socket:
                assert not shop.is_free("room:1", within=0)
                socket.socket.shutdown(2)  # the network is gone
                assert shop.is_free("room:1", within=SOON)


def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    with site(tmp_path) as shop:
        with held_elsewhere(shop.elsewhere, "cart:1"):
            connection = shop.send("".join(post("/starlette/1/buy", json.dumps({"item": item})) for item in "abc"))
            shop.wait(lambda state: state["waiting"] == 1, "the first one waits")
            time.sleep(0.2)
        heard = b""
        while heard.count(b"bought") < 3:
            assert (part := connection.recv(4096)), heard
            heard += part
        connection.close()
        assert [heard.index(f'bought {{"item": "{item}"}}'.encode()) for item in "abc"] == sorted(
            heard.index(f'bought {{"item": "{item}"}}'.encode()) for item in "abc"
        )
        assert shop.is_free("cart:1", within=SOON)


@contextmanager
def idle_websockets(shop: Site, holder: str) -> Iterator[list[ClientConnection]]:
    """Three of them, and the first holds a lock that the test asks for."""
    url = f"ws://127.0.0.1:{shop.port}"
    with (
        connect(f"{url}/{holder}/1", proxy=None) as first,
        connect(f"{url}/{holder}/2", proxy=None) as second,
        connect(f"{url}/{holder}/3", proxy=None) as third,
    ):
        yield [first, second, third]


@contextmanager
def successor(shop: Site, folder: Path) -> Iterator[LeaderElection]:
    """Another worker that leads when the server does not."""
    leader = LeaderElection("duty")
    with Grelmicro(uses=[Coordination.from_url(f"sqlite:///{folder}/locks.db"), Tasks(tasks=[leader])]):
        yield leader


def wait_to_lead(leader: LeaderElection, within: float) -> None:
    until = time.monotonic() + within
    while not leader.is_leader():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_idle_websockets_end_at_the_signal_and_free_what_they_hold(tmp_path: Path) -> None:
    """Those that listen are told that the server stops."""
    with site(tmp_path) as shop:
        shop.wait(lambda state: bool(state["leads"]), "it leads")
        with successor(shop, tmp_path) as leader, idle_websockets(shop, "chat") as sockets:
            assert not shop.is_free("room:1", within=0)
            shop.server.send_all(signal.SIGTERM)
            wait_to_lead(leader, within=SOON)
            assert shop.is_free("room:1", within=SOON)
            with pytest.raises(ConnectionClosed):
                sockets[0].recv(timeout=SOON)
            shop.server.process.wait(20)


def test_deaf_websockets_block_the_stop_but_not_the_leader_and_a_kill_frees_the_lock(tmp_path: Path) -> None:
    with site(tmp_path) as shop:
        shop.wait(lambda state: bool(state["leads"]), "it leads")
        with successor(shop, tmp_path) as leader, idle_websockets(shop, "deaf"):
            shop.server.send_all(signal.SIGTERM)
            wait_to_lead(leader, within=SOON)  # its lease lasts 15 s
            assert not shop.is_free("room:1", within=2.5)  # it is renewed: the lease lasts 2 s
            assert shop.server.process.poll() is None, "the server has not stopped"
            shop.server.send_all(signal.SIGKILL)
            killed_at = time.monotonic()
            assert shop.is_free("room:1", within=30)
            assert time.monotonic() - killed_at < 2 + SOON
