"""While a server replaces its workers, the leader's duty goes from one to another, and never waits for a lease."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from tests.deployments.server import WORKERS, Deployment, deployed
from tests.helpers.matrix import further
from tests.helpers.programs import PATIENCE
from tests.helpers.sites import Site, site

__all__ = ["site"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.duty_app:app"

LEASE = 60.0

SOON = LEASE / 4
"""Seconds within which a busy machine hands over while it starts workers; who waits for the lease waits far longer."""


def env(site: Site) -> dict[str, str]:
    return {"URL": site.url, "DIARY": str(site.diary.path), "LEASE": str(LEASE)}


def longest_wait(site: Site) -> float:
    """Seconds for which a successor stood, and nobody led, at most."""
    stands = {line.pid: line.at for line in site.diary.lines("stands")}
    successions = zip(site.diary.lines("stops"), site.led()[1:], strict=False)
    return max(begun.at - max(ended.at, stands[begun.pid]) for ended, begun in successions)


@pytest.mark.parametrize("name", ["gunicorn", *further("uvicorn workers")])
def test_a_reload_of_all_workers(site: Site, tmp_path: Path, name: str) -> None:
    with deployed(name, APP, folder=tmp_path, **env(site)) as server:
        site.diary.wait(lambda lines: len(lines) == WORKERS, "stands")
        site.wait_led(len)
        old = {line.pid for line in site.diary.lines("stands")}
        server.send(signal.SIGHUP)
        site.diary.wait(lambda lines: {line.pid for line in lines} >= old, "closes")
        site.diary.wait(lambda lines: len(lines) >= 2 * WORKERS, "stands")
        site.wait_led(lambda led: led[-1].pid not in old)
        assert longest_wait(site) < SOON
    assert site.most_at_once() == 1
    assert all(earlier < later for earlier, later in pairwise(site.fences()))


@contextmanager
def client_of(server: Deployment, pid: int) -> Iterator[httpx2.Client]:
    """A client whose connection is to the worker of this process. The others answer a few requests meanwhile."""
    until = time.monotonic() + PATIENCE
    while True:
        with (
            suppress(httpx2.TransportError),  # the worker that was asked ended
            httpx2.Client(base_url=server.url, timeout=PATIENCE, trust_env=False, verify=False) as client,
        ):
            if client.get("/who").json()["pid"] == pid:
                yield client
                return
        assert time.monotonic() < until, f"{pid} does not answer"


SHARE = 100
"""Requests after which a worker ends; the other one answers fewer while the leader is looked for."""


def test_a_leader_that_has_served_its_share_of_requests(site: Site, tmp_path: Path) -> None:
    """No signal comes then: the worker ends in order."""
    options = ("--limit-max-requests", SHARE)
    with deployed("uvicorn workers", APP, *options, folder=tmp_path, **env(site)) as server:
        site.diary.wait(lambda lines: len(lines) == WORKERS, "stands")
        (first,) = site.wait_led(len)
        with client_of(server, first.pid) as client:
            for _ in range(SHARE):
                client.get("/who")
        site.wait_led(lambda led: len(led) > 1)
        assert first.pid in {line.pid for line in site.diary.lines("closes")}
        assert longest_wait(site) < SOON
    assert site.most_at_once() == 1
