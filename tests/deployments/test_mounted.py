"""Under a server, which runs the lifespan of the root application alone, those below it coordinate all the same."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.deployments.server import deployed
from tests.helpers.programs import Diary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.mounted_app"


def env(folder: Path) -> dict[str, str]:
    return {"PATH_OF_STORE": str(folder / "locks.db"), "DIARY": str(folder / "diary")}


def test_they_share_what_the_root_opened(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    with deployed("uvicorn", f"{APP}:app", folder=tmp_path, answers="/carts/1", **env(tmp_path)) as server:
        assert [server.ask(path + "/carts/7").status_code for path in ("", "/first", "/second")] == [200, 200, 200]
        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(server.ask, "/first/carts/7?seconds=2")
            diary.wait(len, "held")
            refusals = [server.ask(path + "/carts/7").status_code for path in ("", "/first", "/second")]
            assert not holding.done()
            assert refusals == [409, 409, 409]
            assert holding.result().json() == "cart:7"
        server.send(signal.SIGTERM)
        server.wait()
    assert [line.what for line in diary.lines() if line.what != "held"] == [
        "store opens",
        "root starts, open: True True",
        "root ends, open: True True",
        "store closes",
    ]


def test_below_a_root_that_opens_nothing_the_first_use_says_what_to_do(tmp_path: Path) -> None:
    with deployed("uvicorn", f"{APP}:without_install", folder=tmp_path, answers="/", **env(tmp_path)) as server:
        assert server.ask("/below/carts/7", timeout=5).status_code == 500
        server.wait_said("call install() on that one")
    assert Diary(tmp_path / "diary").lines() == []
