"""Leaders in processes of their own while the server is paused, killed and started again."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.helpers.matrix import FURTHER, further
from tests.helpers.programs import Line, Program
from tests.helpers.sites import Site
from tests.servers.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LEASE = 3.0
"""Seconds; a leader that cannot renew gives up after two thirds of it."""

SETTLE = 1.0
"""Seconds for which what comes late is waited for."""

RETURN = 15.0
"""Seconds within which somebody leads again once the server answers; the machine may be busy."""


@pytest.fixture(
    params=[
        "redis",
        *further("postgres"),
        # Its tests share a server that takes long to start, one test after the other.
        pytest.param("kubernetes", marks=[FURTHER, pytest.mark.xdist_group("kubernetes")]),
    ]
)
def server(request: pytest.FixtureRequest) -> Server:
    """A server for this test alone, which keeps what it confirmed."""
    started = request.getfixturevalue(f"start_{request.param}")()
    assert isinstance(started, Server)
    return started


@pytest.fixture
def crew(server: Server, tmp_path: Path) -> Iterator[Site]:
    """Three workers, of which one leads."""
    site = Site(tmp_path, server.url)
    with three(site):
        site.wait_led(len)
        yield site


@contextmanager
def three(site: Site) -> Iterator[list[Program]]:
    with ExitStack() as stack:
        yield [stack.enter_context(site.worker(LEASE)) for _ in range(3)]


def wait_leader(site: Site) -> Line:
    """Whoever leads, as soon as somebody does."""
    until = time.monotonic() + RETURN
    while (leader := site.leader()) is None:
        assert time.monotonic() < until, f"nobody leads; the diary: {site.diary.lines()}"
        time.sleep(0.01)
    return leader


def check_terms(site: Site) -> None:
    """No two overlapped, and the fences rose."""
    assert site.most_at_once() == 1
    fences = site.fences()
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("seconds", [0.5, *further(LEASE * 2 / 3, LEASE), LEASE + 1.5])
def test_a_paused_server_lets_no_two_lead(server: Server, crew: Site, seconds: float) -> None:
    """What the leader and the others asked meanwhile is answered all at once."""
    before = wait_leader(crew)
    server.pause()
    time.sleep(seconds)
    server.resume()
    after = wait_leader(crew)
    time.sleep(SETTLE)
    check_terms(crew)
    if seconds < 1.0:
        assert wait_leader(crew) == before, "the term goes on"
    if seconds > LEASE:
        assert after.at > before.at, "it was another term"


@pytest.mark.parametrize("seconds", [0.0, LEASE + 1.0], ids=["at once", "after the lease"])
def test_a_server_that_is_killed_and_started_again_lets_no_two_lead(server: Server, crew: Site, seconds: float) -> None:
    for _ in range(2):
        before = wait_leader(crew)
        server.kill()
        time.sleep(seconds)
        if seconds > LEASE:
            assert crew.leader() is None, "nobody leads without the server"
        server.start()
        after = wait_leader(crew)
        time.sleep(SETTLE)
        check_terms(crew)
        assert seconds == 0.0 or after.at > before.at


def test_a_leader_that_is_cut_off_by_a_dead_server_knows_before_its_lease_ends(server: Server, crew: Site) -> None:
    wait_leader(crew)
    server.pause()
    paused = time.monotonic()
    (stopped,) = crew.diary.wait(len, "stops", patience=RETURN)
    assert stopped.at < paused + LEASE
    server.resume()
    assert wait_leader(crew).at > stopped.at
    check_terms(crew)
