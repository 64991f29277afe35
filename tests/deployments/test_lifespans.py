"""Under a server the user's lifespan runs inside ours, whichever came first, and its failures close ours."""

import signal
from pathlib import Path

import pytest

from tests.deployments.server import deployed
from tests.helpers.programs import Diary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STARTED = ["ours opens", "mine starts, ours is open: True"]
ENDED = ["mine ends, ours is open: True", "ours closes"]


def app(name: str) -> str:
    return f"tests.deployments.lifespan_app:{name}"


def env(folder: Path, fails: str = "") -> dict[str, str]:
    return {"URL": f"sqlite:///{folder}/locks.db", "DIARY": str(folder / "diary"), "FAILS": fails}


def happened(folder: Path) -> list[str]:
    return [line.what for line in Diary(folder / "diary").lines()]


@pytest.mark.parametrize("order", ["user_first", "ours_first", "wrapped_afterwards"])
def test_both_run(tmp_path: Path, order: str) -> None:
    with deployed("uvicorn", app(order), folder=tmp_path, **env(tmp_path)) as server:
        answer = server.ask("/who").json()
        assert (answer["open"], answer["mine"]) == (True, "kept")
        assert happened(tmp_path) == STARTED
        server.send(signal.SIGTERM)
        server.wait()
    assert happened(tmp_path) == [*STARTED, *ENDED]


@pytest.mark.parametrize(
    ("name", "order"), [("uvicorn", "user_first"), ("uvicorn", "ours_first"), ("gunicorn", "user_first")]
)
def test_a_user_who_cannot_start_closes_ours(tmp_path: Path, name: str, order: str) -> None:
    with deployed(name, app(order), folder=tmp_path, answers=None, **env(tmp_path, "start")) as server:
        assert server.wait() != 0
        server.wait_said("mine cannot start")
    assert happened(tmp_path).count("ours closes") == happened(tmp_path).count("ours opens") >= 1


def test_a_user_who_cannot_stop_closes_ours(tmp_path: Path) -> None:
    with deployed("uvicorn", app("user_first"), folder=tmp_path, **env(tmp_path, "stop")) as server:
        server.send(signal.SIGTERM)
        server.wait()
        server.wait_said("mine cannot stop")
    assert happened(tmp_path) == [*STARTED, *ENDED]
