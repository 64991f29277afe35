"""Scene 4: the worker that settles is killed, and the next one is stopped politely."""

import os
import signal
import time
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sample_apps.demo.claims import Claim
from sample_apps.fastapi_orders.demo.customers import until
from sample_apps.fastapi_orders.shop import Shop

PATIENCE = 15.0
"""Seconds after which a successor counts as missing."""

RUNS_SEEN = 5
"""Runs of one leader that are waited for before it is stopped."""


@dataclass(frozen=True, slots=True)
class Succession:
    """One leader's end and the next one's begin."""

    stopped: int
    """The worker that was stopped."""
    by: str
    """The signal."""
    successor: int
    after: float
    """Seconds from the signal to the begin of the successor's first run."""
    allowed: float
    """Seconds that it may take."""
    runs: int
    """Settlements that began between those of this scene's begin and its end."""
    overlaps: int
    """Runs that began while another worker's was going on, or under a term that was over."""


async def succeed(shop: Shop, number: signal.Signals, allowed: float) -> Succession:
    """Stop the worker that settles, once it has settled a few times, and wait for the next one."""
    first = _last_run(shop)
    await until(lambda: _last_run(shop) >= first + RUNS_SEEN or None, PATIENCE, "settlements")
    ((worker, term),) = shop.rows("SELECT worker, term FROM settlements ORDER BY id DESC LIMIT 1")
    stopped_at = time.monotonic()
    os.kill(worker, number)
    query = "SELECT worker, began FROM settlements WHERE term > ? ORDER BY id LIMIT 1"
    successor, began = await until(lambda: shop.row(query, term), PATIENCE, "another worker settles")
    again = _last_run(shop)
    await until(lambda: _last_run(shop) >= again + RUNS_SEEN or None, PATIENCE, "settlements of the successor")
    runs = shop.rows("SELECT worker, term, began, coalesce(ended, began) FROM settlements WHERE id > ?", first)
    return Succession(worker, number.name, successor, began - stopped_at, allowed, len(runs), overlaps(runs))


def takeover(seen: Succession, how: str) -> Claim:
    """Another worker settles soon, and never two at once."""
    return Claim(
        f"when the leader is {how}, another worker leads within {seen.allowed:g} s, and never two at once",
        seen.after <= seen.allowed and seen.overlaps == 0 and seen.successor != seen.stopped,
        f"after {seen.after:.2f} s, {seen.overlaps} overlaps in {seen.runs} runs",
        "run it again on a machine that is less busy, or look for a long pause in the log of the workers",
    )


def _last_run(shop: Shop) -> int:
    row = shop.row("SELECT max(id) FROM settlements")
    return (row[0] or 0) if row else 0


def overlaps(runs: list[tuple[Any, ...]]) -> int:
    """How many runs came under a term that was over, shared a term with another worker, or met another's run."""
    wrong = 0
    for (worker, term, began, ended), (other, other_term, other_began, other_ended) in combinations(runs, 2):
        if worker == other:
            continue
        in_order = term < other_term if began < other_began else other_term < term
        wrong += not in_order or (began < other_ended and other_began < ended)
    return wrong
