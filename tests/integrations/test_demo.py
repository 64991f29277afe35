"""The demonstration: its claims hold, can fail, and are computed; and it leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from sample_apps.demo.claims import Spread
from sample_apps.fastapi_orders.demo.customers import Answer
from sample_apps.fastapi_orders.demo.freezing import Freeze, overwriting, refusal
from sample_apps.fastapi_orders.demo.leading import Succession, overlaps, takeover
from sample_apps.fastapi_orders.demo.play import length, part_of, place_of
from sample_apps.fastapi_orders.demo.selling import Selling, danger, safety, summary
from sample_apps.fastapi_orders.shop import Receipt, Shop
from tests.repo.source import ROOT

WORKERS = 3
"""The settling worker, which is killed, the next one, which is stopped, and the one that settles then."""

COMMAND = [sys.executable, "-m", "sample_apps.fastapi_orders.demo", "--requests", "96", "--workers", str(WORKERS)]


def workers_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_claim_holds_and_nothing_is_left() -> None:
    with subprocess.Popen([*COMMAND, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while len(workers := workers_of(process)) < WORKERS + 1:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the workers do not start"
            time.sleep(0.05)
        output, _ = process.communicate(timeout=200)
    document = json.loads(output)
    assert [claim for claim in document["claims"] if not claim["held"]] == []
    assert len(document["claims"]) == 6
    assert process.returncode == 0
    assert document["figures"]["with_lock"]["sold"] == document["figures"]["with_lock"]["stock"] == 24
    assert not [worker for worker in workers if worker.is_running()]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_interrupted_it_stops_its_workers_and_begins_to_speak_at_once() -> None:
    began = time.monotonic()
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert f"{WORKERS} uvicorn workers" in first
        assert time.monotonic() - began < 20  # 3, were the machine quiet
        deadline = time.monotonic() + 60
        while len(workers := workers_of(process)) < WORKERS + 1:
            assert time.monotonic() < deadline, "the workers do not start"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not [worker for worker in workers if worker.is_running()]


def sale(item_id: int, began: float, ended: float, fence: int) -> Answer:
    receipt = Receipt(item_id=item_id, fence=fence, worker=1, began=began, ended=ended)
    return Answer(item_id, 1, 0.0, receipt=receipt)


def test_figures_of_a_rush() -> None:
    answers = [sale(1, 1, 2, 7), sale(1, 2.5, 3, 8), sale(2, 1.5, 2.6, 4), sale(1, 4, 5, 10)]
    answers += [Answer(1, 2, 0.0, sold_out=True), Answer(1, 3, 0.0, error="status 503")]
    seen = summary(answers, stock=4, sold=4)
    assert (seen.customers, seen.promised, seen.sold_out, seen.errors) == (6, 4, 1, 1)
    assert seen.first_error == "status 503"
    assert seen.served_per_worker == [4, 1, 1]
    assert seen.items_at_once == 2
    assert (seen.fences_rise, seen.fence_gaps) == (True, 1)
    assert (seen.hand_over.count, seen.hand_over.p99) == (2, 1.0)
    assert not summary([sale(1, 1, 2, 8), sale(1, 3, 4, 7)], stock=2, sold=2).fences_rise


GOOD = Selling(8, 2, 2, 2, 6, 0, "", [4, 4], 2, True, 0, Spread.of([0.1]), Spread.of([]))


@pytest.mark.parametrize(
    "change",
    [
        {"sold": 3},
        {"sold": 1},
        {"promised": 1},
        {"errors": 1},
        {"sold_out": 5},
        {"served_per_worker": [8]},
        {"items_at_once": 1},
        {"fences_rise": False},
    ],
)
def test_safety_is_not_claimed_of(change: dict[str, object]) -> None:
    assert safety(GOOD, 2).held
    assert not safety(replace(GOOD, **change), 2).held  # type: ignore[arg-type]


def test_danger_is_not_claimed_of_an_exact_sale() -> None:
    assert not danger(GOOD).held
    assert danger(replace(GOOD, sold=3)).held


FROZEN = Freeze(True, 5, 6, "refused", "lost", 1.5, 9)


@pytest.mark.parametrize(
    "change", [{"late_write": "written"}, {"new_fence": 5}, {"stock_after": 10}, {"answer": "status 200"}]
)
def test_refusal_is_not_claimed_of(change: dict[str, object]) -> None:
    assert refusal(FROZEN).held
    assert not refusal(replace(FROZEN, **change)).held  # type: ignore[arg-type]


def test_overwriting_is_claimed_of_what_was_overwritten() -> None:
    assert not overwriting(FROZEN).held
    assert overwriting(replace(FROZEN, fenced=False, late_write="written", stock_after=10)).held


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([(1, 7, 0.0, 0.1), (1, 7, 0.2, 0.3), (2, 8, 1.0, 1.1)], 0),
        ([(1, 7, 0.0, 0.3), (2, 8, 0.2, 0.4)], 1),
        ([(1, 8, 0.0, 0.1), (2, 7, 0.2, 0.3)], 1),
        ([(1, 7, 0.0, 0.1), (2, 7, 0.2, 0.3)], 1),
        ([(1, 7, 0.0, 0.9), (1, 7, 0.2, 0.3), (2, 8, 0.5, 0.6)], 1),
    ],
)
def test_two_at_once_are_seen(runs: list[tuple[int, int, float, float]], found: int) -> None:
    assert overlaps(list(runs)) == found


@pytest.mark.parametrize("change", [{"after": 3.1}, {"overlaps": 1}, {"successor": 1}])
def test_takeover_is_not_claimed_of(change: dict[str, object]) -> None:
    seen = Succession(1, "SIGKILL", 2, 2.5, 3, 10, 0)
    assert takeover(seen, "killed").held
    assert not takeover(replace(seen, **change), "killed").held  # type: ignore[arg-type]


def test_what_it_says_about_the_source_is_read_there() -> None:
    source = (ROOT / "sample_apps/fastapi_orders/app.py").read_text().splitlines()
    for words in ("LockDep(", "leader=leader"):
        _, _, number = place_of(words).partition(":")
        assert words in source[int(number) - 1]
    assert part_of("LockDep(") == 'LockDep("item:{item_id}")'
    assert 40 < length() < 90


def test_fence_refuses_what_an_older_holder_writes(tmp_path: object) -> None:
    shop = Shop(f"{tmp_path}/orders.db")
    shop.restock(5, 1)
    assert shop.sell(1, 4, 10)
    assert shop.sell(1, 3, 10)
    assert not shop.sell(1, 9, 9)
    assert shop.stock(1) == 3
    shop.close()
