"""The benchmarks run, and print figures that can be read; how fast anything is does not matter here."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.report import Machine, as_json, print_table
from benchmarks.rows import Row, Target
from tests.helpers.matrix import further
from tests.repo.source import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),  # a quick run of four stores, servers included
    pytest.mark.xdist_group("benchmarks"),  # one such run for all of them
]

COMPARED = ("acquire + release, p50 of the quietest round", "16 tasks with a body of 1 ms")


def benchmarks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What `python -m benchmarks` did."""
    inherited = {name: value for name, value in os.environ.items() if name != "PEER"}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True, check=False
    )


STORES = ("memory", "sqlite", "redis", "postgres")


@pytest.fixture(scope="module", params=[STORES[:2], *further(STORES)], ids=len)
def stores(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The stores that are measured."""
    named: tuple[str, ...] = request.param
    return named


@pytest.fixture(scope="module")
def rows(stores: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every row of a quick run."""
    done = benchmarks("--quick", "--json", *stores)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


def test_every_figure_is_a_number(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        figures = [row[name] for name in ("ours", "floor", "ratio") if row[name] is not None]
        assert all(math.isfinite(figure) and figure >= 0 for figure in figures), row
        assert row["ours"] > 0 or "idle" in row["what"], row


def test_every_store_is_compared_with_its_floor(rows: list[dict[str, Any]], stores: tuple[str, ...]) -> None:
    compared = {(row["store"], row["what"]) for row in rows if row["floor"] and row["ratio"] and row["target"]}
    assert {(store, what) for store in stores for what in COMPARED} <= compared


def test_every_framework_is_measured_with_a_lock_and_without(rows: list[dict[str, Any]]) -> None:
    compared = [row["ratio_to"] for row in rows if " route " in row["what"]]
    assert compared == ["bare app", "by hand"] * 2


def test_every_target_has_a_verdict(rows: list[dict[str, Any]], stores: tuple[str, ...]) -> None:
    assert all((row["target"] is None) == (row["reached"] is None) for row in rows)
    assert sum(row["target"] is not None for row in rows) >= 7 * len(stores)


def test_without_a_peer_there_are_no_figures_of_one(rows: list[dict[str, Any]]) -> None:
    assert {row["peer"] for row in rows} == {None}


def test_an_unknown_store_is_refused() -> None:
    done = benchmarks("--quick", "mongodb")
    assert done.returncode == 2
    assert "the stores are memory, sqlite, redis, postgres, kubernetes" in done.stderr


def test_a_peer_without_the_package_is_refused() -> None:
    done = benchmarks("--quick", PEER=sys.executable)
    assert done.returncode == 1
    assert "has no package grelmicro" in done.stderr


def test_a_row_is_printed_with_what_it_is_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(store="memory", what="pair", unit="us", ours=8.0, floor=2.0, ratio=4.0, target=Target(5))
    print_table([row], None, Machine.look())
    printed = capsys.readouterr().out
    assert "pair" in printed
    assert "4.00 x floor" in printed
    assert "<= 5 us" in printed
    assert "NO" in printed
    assert json.loads(as_json([row], None, Machine.look(), quick=True))["rows"][0]["reached"] is False


@pytest.mark.parametrize(
    ("target", "reached"),
    [
        (Target(8), True),
        (Target(7.9), False),
        (Target(4, on="ratio"), True),
        (Target(3.9, on="ratio"), False),
        (Target(4, on="ratio", at_least=True), True),
        (Target(4.1, on="ratio", at_least=True), False),
    ],
)
def test_a_target_is_a_limit_for_the_figure_or_for_the_ratio(target: Target, reached: bool) -> None:
    row = Row(store="memory", what="pair", unit="us", ours=8.0, ratio=4.0)
    assert target.reached(row) is reached
