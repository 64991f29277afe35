"""A periodic task of a FastAPI application runs once per interval, however many workers serve that."""

import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.deployments.server import SOON, deployed
from tests.helpers.matrix import FURTHER
from tests.helpers.programs import Diary, Line
from tests.helpers.sites import any_url

__all__ = ["any_url"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.periodic_app:app"
INTERVAL = 0.25
LEASE = 2.4
RUNS = 8


def settings(folder: Path, url: str, lease: float) -> dict[str, str]:
    return {
        "URL": url,
        "DIARY": str(folder / "diary"),
        "INTERVAL": str(INTERVAL),
        "LEASE": str(lease),
    }


def runs(diary: Diary, task: str, since: float = 0.0) -> list[Line]:
    return [line for line in diary.lines() if line.what.split()[0] == task and line.at >= since]


def pids(lines: list[Line]) -> set[int]:
    return {line.pid for line in lines}


def most(seconds: float) -> float:
    """How often a task runs at most in some time; four workers on their own would do it four times as often."""
    return seconds / INTERVAL * 1.1 + 2


@pytest.mark.parametrize(
    ("name", "any_url"),
    [
        ("uvicorn workers", "redis"),
        ("gunicorn preload", "sqlite"),
        pytest.param("gunicorn", "sqlite", marks=FURTHER),
        pytest.param("gunicorn asgi", "postgres", marks=FURTHER),
    ],
    indirect=["any_url"],
)
def test_four_workers_run_it_once(tmp_path: Path, name: str, any_url: str) -> None:
    """Also when the leader is killed; and the process that starts the workers runs nothing."""
    diary = Diary(tmp_path / "diary")
    with deployed(name, APP, "--workers", 4, folder=tmp_path, **settings(tmp_path, any_url, LEASE)) as server:
        diary.wait(lambda _: len(pids(runs(diary, "everywhere"))) == 4)
        since = time.monotonic()
        diary.wait(lambda _: min(len(runs(diary, task, since)) for task in ("gated", "locked")) >= RUNS)
        took = time.monotonic() - since
        gated = runs(diary, "gated", since)
        assert len(gated) < most(took)
        assert len(runs(diary, "locked", since)) < most(took)
        assert len(runs(diary, "everywhere", since)) > 2 * RUNS
        assert len({line.what for line in gated}) == len(pids(gated)) == 1
        assert server.pid not in pids([line for line in diary.lines() if line.what != "imported"])

        (leader,) = pids(gated)
        killed = time.monotonic()
        os.kill(leader, signal.SIGKILL)
        diary.wait(lambda _: pids(runs(diary, "gated", killed)) - {leader})
        later = [line for line in runs(diary, "gated", killed) if line.pid != leader]
        assert later[0].at < killed + LEASE + SOON
        assert later[0].what > gated[-1].what  # a higher fence
        diary.wait(lambda _: len(runs(diary, "locked", killed)) >= 3)
        assert len(runs(diary, "locked", killed)) < most(time.monotonic() - killed)
    assert_alternating(diary)


def assert_alternating(diary: Diary) -> None:
    """No run of an older term follows one of a newer one."""
    fences = [int(line.what.split()[1]) for line in runs(diary, "gated")]
    assert all(earlier <= later for earlier, later in pairwise(fences))


def test_only_the_process_that_serves_runs_it_under_reload(tmp_path: Path) -> None:
    """When a file changes, its successor runs it within the lease, since the old one handed over."""
    diary = Diary(tmp_path / "diary")
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "change_me.py").touch()
    env = settings(tmp_path, f"sqlite:///{tmp_path}/locks.db", 15)
    with deployed("uvicorn", APP, "--reload", "--reload-dir", watched, folder=tmp_path, **env) as server:
        diary.wait(lambda _: len(runs(diary, "gated")) >= 3)
        (first,) = pids(diary.lines())
        assert first != server.pid

        future = time.time() + 10
        os.utime(watched / "change_me.py", (future, future))
        diary.wait(lambda _: pids(runs(diary, "gated")) - {first})
        _, started = diary.lines("imported")
        second = next(line for line in runs(diary, "gated") if line.pid != first)
        assert second.at < started.at + SOON  # the lease would last 15 s
        assert max(line.at for line in diary.lines() if line.pid == first) < started.at
        assert server.pid not in pids(diary.lines())
    assert_alternating(diary)
