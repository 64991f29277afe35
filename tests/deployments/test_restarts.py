"""While a server replaces its workers, the leader's duty goes from one to another, and never waits for a lease."""

import signal
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from tests.deployments.server import deployed
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
        site.diary.wait(lambda lines: len(lines) == 4, "stands")
        site.wait_led(len)
        old = {line.pid for line in site.diary.lines("stands")}
        server.send(signal.SIGHUP)
        site.diary.wait(lambda lines: {line.pid for line in lines} >= old, "closes")
        site.diary.wait(lambda lines: len(lines) >= 8, "stands")
        site.wait_led(lambda led: led[-1].pid not in old)
        assert longest_wait(site) < SOON
    assert site.most_at_once() == 1
    assert all(earlier < later for earlier, later in pairwise(site.fences()))


@pytest.mark.timeout(240)
def test_a_leader_that_has_served_its_share_of_requests(site: Site, tmp_path: Path) -> None:
    """No signal comes then: the worker ends in order."""
    with deployed("uvicorn workers", APP, "--limit-max-requests", 5, folder=tmp_path, **env(site)) as server:
        (first,) = site.wait_led(len)
        until = time.monotonic() + 3 * PATIENCE  # four workers start anew meanwhile
        while len(site.led()) < 2:
            with suppress(httpx2.TransportError):  # some ask a worker that ends
                server.ask("/who", timeout=5)
            assert time.monotonic() < until
        assert first.pid in {line.pid for line in site.diary.lines("closes")}
        assert longest_wait(site) < SOON
    assert site.most_at_once() == 1
