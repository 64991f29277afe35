"""Rows of a request to a route, with a lock and without."""

import sys
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.crew import Worker
from benchmarks.plan import Scale
from benchmarks.rows import Row, Target, paired_ratio, quietest

MICROSECONDS, MILLISECONDS = 1e6, 1e3

FRAMEWORKS = {"fastapi": "FastAPI", "starlette": "Starlette"}

WORK = 0.001
"""Seconds for which a handler works that works."""

INSTALLED_TARGET = Target(1.03, on="ratio")
LOCK_TARGET = Target(1.15, on="ratio")

Rounds = Mapping[str, Sequence[Sequence[float]]]


def rows(scale: Scale) -> Iterator[Row]:
    """All of them, on the memory store: others take their time for the lock, however it is taken."""
    with Worker(sys.executable, "web") as worker:
        worker.ask("requests", count=1, seconds=0)  # what is made at the first request is made
        idle = _rounds(worker, scale, count=scale.requests, seconds=0)
        working = _rounds(worker, scale, count=scale.requests // 10, seconds=WORK)
    for name, title in FRAMEWORKS.items():
        installed, lock, bare, by_hand = (f"{name} {what}" for what in ("installed", "lock", "bare", "by hand"))
        what = f"{title} route without a lock, in an installed app"
        # Starlette's own route takes so little that the price of any middleware is seen.
        yield _row(what, idle, installed, bare, "bare app", target=INSTALLED_TARGET if name == "fastapi" else None)
        what = f"{title} route with a lock, handler of {WORK * MILLISECONDS:g} ms"
        yield _row(what, working, lock, by_hand, "by hand", target=LOCK_TARGET)
        yield _row("  handler that does nothing", idle, lock, by_hand, "by hand")
        if name == "fastapi":
            yield _row("  beside a dependency of one's own", idle, lock, "fastapi own", "own")


def _rounds(worker: Worker, scale: Scale, *, count: int, seconds: float) -> Rounds:
    answers = [worker.ask("requests", count=count, seconds=seconds) for _ in range(scale.rounds)]
    return {name: [answer[name] for answer in answers] for name in answers[0]}


def _row(what: str, samples: Rounds, ours: str, other: str, ratio_to: str, *, target: Target | None = None) -> Row:
    return Row(
        store="memory",
        what=what,
        unit="us",
        ours=quietest(samples[ours]) * MICROSECONDS,
        floor=quietest(samples[other]) * MICROSECONDS,
        ratio=paired_ratio(samples[ours], samples[other]),
        ratio_to=ratio_to,
        target=target,
    )
