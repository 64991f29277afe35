"""Tasks of a web application with several worker processes run once per interval over all of them."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.programs import Diary, Line, program

APP = "tests.helpers.task_program:app"
INTERVAL = 0.5
LEASE = 3.0

SERVERS = {
    "uvicorn": ["uvicorn", APP, "--workers", 4, "--log-level", "error", "--uds"],
    "gunicorn": ["gunicorn", APP, "-k", "asgi", "-w", 4, "--log-level", "error", "-b"],
}


def runs(diary: Diary, what: str, since: float = 0.0, until: float = float("inf")) -> list[Line]:
    """The runs of a task in some time."""
    return [line for line in diary.lines() if line.what.split()[0] == what and since <= line.at < until]


def pids(lines: list[Line]) -> set[int]:
    return {line.pid for line in lines}


def expected(since: float, until: float) -> tuple[float, float]:
    """How many runs there are at least and at most; without a guard there would be four times as many."""
    number = (until - since) / INTERVAL
    return number * 0.5 - 2, number * 1.1 + 2


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("server", "any_url"),
    [("uvicorn", "sqlite"), ("gunicorn", "sqlite"), ("uvicorn", "redis"), ("gunicorn", "postgres")],
    indirect=["any_url"],
)
def test_four_workers_run_it_once(tmp_path: Path, server: str, any_url: str) -> None:
    """Also when the one that leads is killed; and the process that starts the workers runs nothing."""
    diary = Diary(tmp_path / "diary")
    env = {
        "URL": any_url,
        "DIARY": str(diary.path),
        "INTERVAL": str(INTERVAL),
        "LEASE_DURATION": str(LEASE),
    }
    at_socket = tmp_path / "s" if server == "uvicorn" else f"unix:{tmp_path / 's'}"
    with program(*map(str, SERVERS[server]), at_socket, env=env) as supervisor:
        diary.wait(lambda _: len(pids(runs(diary, "everywhere"))) == 4)
        diary.wait(lambda _: runs(diary, "gated") and runs(diary, "locked"))
        since = time.monotonic()
        time.sleep(4.0)
        until = time.monotonic()

        least, most = expected(since, until)
        gated, locked = runs(diary, "gated", since, until), runs(diary, "locked", since, until)
        assert least < len(gated) < most
        assert least < len(locked) < most
        assert len(runs(diary, "everywhere", since, until)) > 2 * len(locked)
        assert len(pids(gated)) == 1
        assert supervisor.pid not in pids(runs(diary, "everywhere") + gated + locked)

        (leader,) = pids(gated)
        fence = gated[-1].what
        os.kill(leader, signal.SIGKILL)
        killed = time.monotonic()
        diary.wait(lambda _: any(line.what > fence for line in runs(diary, "gated", killed)))
        successor = runs(diary, "gated", killed)[-1]
        assert successor.pid != leader
        assert killed + LEASE * 0.2 < successor.at < killed + LEASE + 5.0
        time.sleep(2.0)
        least, most = expected(killed, time.monotonic())
        assert least - LEASE / INTERVAL < len(runs(diary, "locked", killed)) < most
        assert len({line.what for line in runs(diary, "gated")}) == len(pids(runs(diary, "gated"))) == 2

        supervisor.send(signal.SIGTERM)
        supervisor.wait()
        ended = time.monotonic()
        time.sleep(2 * INTERVAL)
        assert not [line for line in diary.lines() if line.at > ended]
