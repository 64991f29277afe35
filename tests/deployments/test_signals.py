"""At the first signal a server's leader hands over, whatever the server still serves; at the second all of it ends."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import httpx2
import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from grelmicro.testing.aids import held_elsewhere
from tests.deployments.server import SOON, WORKERS, Deployment, alive_in, deployed
from tests.helpers.matrix import FURTHER, further
from tests.helpers.programs import Diary
from tests.helpers.sites import Site, site

__all__ = ["site"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.duty_app:app"


@contextmanager
def open_request_to(server: Deployment, pid: int) -> Iterator[None]:
    """A request that the worker of this process goes on answering; no other worker has one."""
    for _ in range(200):
        with httpx2.stream("GET", server.url + "/stream", timeout=30, trust_env=False, verify=False) as response:
            lines = response.iter_lines()
            if int(next(lines)) == pid:
                yield
                del lines  # which would have closed the connection before
                return
    raise AssertionError(f"{pid} does not answer")


def env(site: Site, **more: str) -> dict[str, str]:
    return {"URL": site.url, "DIARY": str(site.diary.path), **more}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("uvicorn workers", signal.SIGTERM),
        ("gunicorn", signal.SIGTERM),
        ("gunicorn asgi", signal.SIGTERM),
        ("granian", signal.SIGTERM),
        ("hypercorn", signal.SIGTERM),
        pytest.param("granian", signal.SIGINT, marks=FURTHER),
        pytest.param("hypercorn", signal.SIGINT, marks=FURTHER),
        pytest.param("uvicorn workers", signal.SIGINT, marks=FURTHER),
        pytest.param("gunicorn", signal.SIGINT, marks=FURTHER),
        # Its worker ends the lifespan at this signal, requests or not, and the app hands over as it closes.
        pytest.param("gunicorn asgi", signal.SIGINT, marks=FURTHER),
    ],
    ids=str,
)
def test_successor_leads_at_the_first(site: Site, tmp_path: Path, name: str, number: int) -> None:
    """The lease lasts 15 seconds, and the leader's worker has a request that never ends."""
    with deployed(name, APP, folder=tmp_path, **env(site)) as server:
        site.diary.wait(lambda lines: len(lines) == WORKERS, "stands")  # one that stood later could be the successor
        (first,) = site.wait_led(len)
        with open_request_to(server, first.pid), site.worker() as other:
            at = server.send(number)
            led = site.wait_led(lambda led: led[-1].pid == other.pid)
            assert led[-1].at < at + SOON
    assert site.most_at_once() == 1


# Later Pythons let a server wait for its connections, so uvicorn does at the second interrupt too.
REQUEST = pytest.param(
    open_request_to, "connections to close", id="request", marks=pytest.mark.skipif("sys.version_info >= (3, 12)")
)
WORK = pytest.param(lambda *_: nullcontext(), "application shutdown", id="work")


@pytest.mark.parametrize("name", ["uvicorn workers", *further("uvicorn", "gunicorn")])
@pytest.mark.parametrize(("busy", "said"), [REQUEST, WORK])
def test_second_interrupt_ends_all_of_it(
    site: Site, tmp_path: Path, name: str, busy: Callable[[Deployment, int], AbstractContextManager[None]], said: str
) -> None:
    """Neither a request that never ends nor work of the leader that takes a minute to end holds it up."""
    with deployed(name, APP, folder=tmp_path, **env(site, SLOWNESS="60", LEASE="3")) as server:
        (first,) = site.wait_led(len)
        with busy(server, first.pid), site.worker(3.0) as other:
            server.send_all(signal.SIGINT)
            server.wait_said(f"Waiting for {said}")
            assert server.process.poll() is None
            at = server.send_all(signal.SIGINT)
            while alive_in(server.pid):
                server.process.poll()
                assert time.monotonic() < at + SOON, "it runs on"
                time.sleep(0.02)
            led = site.wait_led(lambda led: led[-1].pid == other.pid)
            assert led[-1].at < at + 3.0 + SOON


@pytest.mark.parametrize(("name", "workers"), [("uvicorn", 1), ("uvicorn workers", WORKERS)])
def test_second_interrupt_does_not_wait_for_tasks_and_frees_their_locks(
    tmp_path: Path, name: str, workers: int
) -> None:
    """The first one does wait, also when the process that starts the workers sends them another signal after it."""
    diary, url = Diary(tmp_path / "diary"), f"sqlite:///{tmp_path}/locks.db"
    with deployed(name, "tests.deployments.closing_app:app", folder=tmp_path, URL=url, DIARY=str(diary.path)) as server:
        diary.wait(lambda lines: [line.what for line in lines] == ["began"])
        server.wait_said("Application startup complete.", workers)
        server.send_all(signal.SIGINT)
        server.wait_said("Waiting for application shutdown", workers)
        if workers > 1:
            server.wait_said("Terminated child process", workers)
        time.sleep(0.3)
        assert [line.what for line in diary.lines()] == ["began"]
        at = server.send_all(signal.SIGINT)
        while alive_in(server.pid):
            server.process.poll()
            assert time.monotonic() < at + SOON, "it runs on"
            time.sleep(0.02)
        with Grelmicro(uses=[Coordination.from_url(url)]) as elsewhere, held_elsewhere(elsewhere, "work", timeout=0):
            assert diary.lines()[-1].what == "cancelled"
        assert "Traceback" not in server.log
