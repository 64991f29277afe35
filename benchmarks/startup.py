"""Rows of what an application pays before it uses a lock: the import, and a lock built for one request."""

import subprocess
import sys
from statistics import median
from time import perf_counter

from benchmarks.crew import Crew, Peer, clean_environment, for_each
from benchmarks.places import Places
from benchmarks.plan import Scale
from benchmarks.rows import Row, Target

MICROSECONDS, MILLISECONDS = 1e6, 1e3


def rows(scale: Scale, peer: Peer | None, places: Places) -> list[Row]:
    """Both rows."""
    return [_import(scale, peer, places), _construction(scale, peer, places)]


def _import(scale: Scale, peer: Peer | None, places: Places) -> Row:
    interpreters = {"ours": sys.executable, **({"peer": peer.interpreter} if peer else {})}
    runs: dict[tuple[str, str], list[float]] = {
        (name, code): [] for name in interpreters for code in ("pass", "import grelmicro")
    }
    for name, code in runs:  # compiles what was not yet
        _seconds(interpreters[name], code, places)
    for number in range(scale.rounds):
        for name, code in sorted(runs, key=lambda run: run[1], reverse=number % 2 == 1):
            runs[name, code].append(_seconds(interpreters[name], code, places))
    more = {name: median(runs[name, "import grelmicro"]) - median(runs[name, "pass"]) for name in interpreters}
    return Row(
        store="",
        what="import, more than the bare interpreter",
        unit="ms",
        ours=more["ours"] * MILLISECONDS,
        floor=median(runs["ours", "pass"]) * MILLISECONDS,
        peer=more["peer"] * MILLISECONDS if peer else None,
        target=Target(150),
    )


def _seconds(interpreter: str, code: str, places: Places) -> float:
    """How long an interpreter takes to start, run some code and end."""
    start = perf_counter()
    subprocess.run([interpreter, "-c", code], cwd=places.folder, env=clean_environment(), check=True)
    return perf_counter() - start


def _construction(scale: Scale, peer: Peer | None, places: Places) -> Row:
    with Crew("memory", peer, places) as crew:
        answers = crew.rounds(scale.rounds, "construct", for_each("ours", "peer", count=scale.constructions))
    return Row(
        store="",
        what="Lock(f'order:{i}'), quietest round",
        unit="us",
        ours=min(answers["ours"]) * MICROSECONDS,
        peer=min(answers["peer"]) * MICROSECONDS if peer else None,
        target=Target(10),
    )
