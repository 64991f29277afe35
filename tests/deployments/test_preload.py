"""Workers that were forked from a process which had imported the application share nothing but its code."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deployments.server import Deployment, deployed
from tests.helpers.matrix import FURTHER
from tests.helpers.programs import PATIENCE
from tests.helpers.sites import Site, any_site, any_url

__all__ = ["any_site", "any_url"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.duty_app:app"


def workers(server: Deployment) -> list[int]:
    """The processes of the four workers."""
    until = time.monotonic() + PATIENCE
    while len(found := [child.pid for child in psutil.Process(server.pid).children()]) != 4:
        assert time.monotonic() < until, f"there are {len(found)} workers"
        time.sleep(0.05)
    return found


def descriptors(pid: int) -> Counter[str]:
    """The sockets, files and pipes that a process has open."""
    folder = Path(f"/proc/{pid}/fd")
    return Counter(os.readlink(path) for path in folder.iterdir() if path.is_symlink())


@pytest.mark.parametrize(
    ("any_url", "worker"),
    [pytest.param("sqlite", "", marks=FURTHER), ("redis", "web-1")],
    indirect=["any_url"],
    ids=["random workers on sqlite", "one worker for all on redis"],
)
def test_four_identities_and_one_leader(any_site: Site, tmp_path: Path, worker: str) -> None:
    """Also when all of them are given one name."""
    env = {"URL": any_site.url, "DIARY": str(any_site.diary.path)}
    if worker:
        env |= {"GREL_LEADERELECTION_JOB_WORKER": worker, "GREL_LOCK_WORKER": worker}
    with deployed("gunicorn preload", APP, "--workers", 4, folder=tmp_path, **env) as server:
        any_site.diary.wait(lambda lines: len(lines) == 4, "stands")
        any_site.wait_led(len)
        pids = workers(server)
        answers: list[dict[str, Any]] = [server.ask_worker(pid, "/who") for pid in pids]

        assert {answer["imported by"] for answer in answers} == {server.pid}
        assert len({minted(answer["token"]) for answer in answers}) == 4
        assert len({answer["candidate"] for answer in answers}) == (1 if worker else 4)
        assert [answer["pid"] for answer in answers if answer["leads"]] == [any_site.led()[0].pid]
        assert_nothing_is_shared(server.pid, pids)
    assert any_site.most_at_once() == 1


def minted(token: str) -> str:
    """The random bits of the process in a holder's name, without the count that follows them."""
    return token.rpartition(":")[2][:16]


def assert_nothing_is_shared(server: int, workers: list[int]) -> None:
    """No two workers have a connection in common, and the process that forked them has none to the store."""
    inherited = descriptors(server)
    assert not [path for path in inherited if "leases.db" in path]
    own = [
        {name for name in descriptors(pid) if name.startswith("socket:") and name not in inherited} for pid in workers
    ]
    assert len(set().union(*own)) == sum(map(len, own))
    connections = psutil.Process(server).net_connections("tcp")
    assert {connection.status for connection in connections} <= {psutil.CONN_LISTEN}
