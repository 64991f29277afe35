"""Locked routes under real servers: many at once, a worker that stands still, and one that forks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from grelmicro.testing import held_elsewhere
from tests.deployments.server import deployed
from tests.helpers.matrix import further
from tests.helpers.programs import Diary, Line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = "tests.deployments.lock_app:app"
MANY = 60


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/locks.db"


def env(folder: Path) -> dict[str, str]:
    return {"URL": url(folder), "DIARY": str(folder / "diary"), "ORDERS": str(folder / "orders.db")}


def test_waiting_for_a_lock_takes_no_thread(tmp_path: Path) -> None:
    """There are 40 threads, and 60 plain functions want one lock."""
    diary = Diary(tmp_path / "diary")
    with deployed("uvicorn", APP, folder=tmp_path, **env(tmp_path)) as server, ThreadPoolExecutor(MANY) as pool:
        with Grelmicro(uses=[Coordination.from_url(url(tmp_path))]) as micro, held_elsewhere(micro, "till"):
            answers = [pool.submit(server.ask, "/till", "POST", 60) for _ in range(MANY)]
            while server.ask("/who").json()["present"] <= MANY:
                assert not any(answer.done() for answer in answers)
            assert server.ask("/thread").json() == "a thread was free"
        fences = sorted(answer.result().json() for answer in answers)
    assert_one_at_a_time(diary)
    assert len(set(fences)) == MANY


def test_plain_functions_of_four_workers_take_turns(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary")
    four = deployed("uvicorn workers", APP, "--workers", 4, folder=tmp_path, **env(tmp_path))
    with four as server, ThreadPoolExecutor(MANY) as pool:
        answers = list(pool.map(lambda _: server.ask("/till", "POST", 60), range(MANY)))
    assert [answer.status_code for answer in answers] == [200] * MANY
    assert len({answer.json() for answer in answers}) == MANY
    assert_one_at_a_time(diary)


def assert_one_at_a_time(diary: Diary) -> None:
    """Each run ended before the next one began."""
    assert [line.what for line in diary.lines()] == ["begins", "ends"] * MANY


def test_a_worker_that_stands_still_loses_the_lock(tmp_path: Path) -> None:
    """Another one takes over; the first knows that it lost, its fence is refused, and it is cancelled."""
    diary = Diary(tmp_path / "diary")
    with deployed("uvicorn workers", APP, folder=tmp_path, **env(tmp_path)) as server, ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(server.ask, "/order?blocks=5", "POST", 60)
        (first,) = diary.wait(len)
        other = server.ask("/order", "POST", 60)
        assert not blocked.done()
        assert other.json()["pid"] != first.pid
        assert other.json()["fence"] > fence_of(first)
        refusal = blocked.result()
        server.wait_said("the event loop was blocked: leases are looked after")
    assert (refusal.status_code, refusal.json()["type"]) == (503, "urn:grelmicro:lost")
    assert [line.what for line in diary.lines() if line.pid == first.pid] == [
        first.what,
        f"goes on {fence_of(first)}, lost True, written False",
    ]


def fence_of(line: Line) -> int:
    return int(line.what.split()[1])


@pytest.mark.parametrize("how", ["os.fork", *further("multiprocessing")])
def test_a_child_has_no_part_in_what_its_parent_holds(tmp_path: Path, how: str) -> None:
    diary = Diary(tmp_path / "diary")
    with deployed("uvicorn", APP, folder=tmp_path, **env(tmp_path)) as server:
        answer = server.ask(f"/fork?how={how}&lasts=2", "POST", 60)
        assert answer.json() is True
        assert server.ask(f"/fork?how={how}", "POST", 60).json() is True, "it was released"
    assert [line.what for line in diary.lines()][:5] == [
        "child: lost True, valid False, files of the store 0",
        "child: extend refused",
        "child: release refused",
        "child: the parent holds it",
        "child: ended",
    ]
