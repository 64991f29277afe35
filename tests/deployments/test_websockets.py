"""Open websockets keep a server from ending: leadership does not wait for it, and locks last no longer than a lease."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockTimeoutError
from tests.deployments.server import SOON, Deployment, deployed
from tests.helpers.matrix import further
from tests.helpers.sites import Site, site

__all__ = ["site"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.duty_app:app"
LEASE = 2.0


@contextmanager
def open_socket(server: Deployment, path: str, pid: int) -> Iterator[None]:
    """A websocket to the worker of this process; others close it at once."""
    url = f"{server.url.replace('http', 'ws')}{path}pid={pid}"
    for _ in range(200):
        with connect(url, proxy=None, open_timeout=30) as client:
            if answers(client):
                yield
                return
    raise AssertionError(f"{pid} does not answer")


def answers(client: ClientConnection) -> bool:
    """Whether a message comes before the end."""
    try:
        client.recv(30)
    except ConnectionClosed:
        return False
    return True


@pytest.mark.parametrize("name", ["uvicorn workers", *further("gunicorn")])
def test_leadership_is_handed_over_at_the_signal_and_locks_are_free_after_a_lease(
    site: Site, tmp_path: Path, name: str
) -> None:
    """The leadership's lease lasts 15 seconds, that of the locks 2."""
    micro = Grelmicro(uses=[Coordination.from_url(site.url)])
    env = {"URL": site.url, "DIARY": str(site.diary.path)}
    with deployed(name, APP, folder=tmp_path, **env) as server, ExitStack() as stack:
        (first,) = site.wait_led(len)
        for path in ("/idle?", "/idle?lock=left&", "/deaf?lock=kept&"):
            stack.enter_context(open_socket(server, path, first.pid))
        with site.worker() as other, micro:
            at = server.send(signal.SIGTERM)
            led = site.wait_led(lambda led: led[-1].pid == other.pid)
            assert led[-1].at < at + SOON
            Lock("left").from_thread.acquire(timeout=SOON)  # its websocket was told that the server stops
            with pytest.raises(LockTimeoutError):
                Lock("kept").from_thread.acquire(timeout=LEASE * 1.25)  # its work goes on, and so do renewals
            assert server.process.poll() is None
            server.send_all(signal.SIGKILL)
            Lock("kept").from_thread.acquire(timeout=LEASE + SOON)
    assert site.most_at_once() == 1
