"""Rows of what waiters cost while nothing happens."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.crew import Crew, Peer, for_each
from benchmarks.places import Places
from benchmarks.plan import Scale
from benchmarks.rows import Row, Target

CROWD = 1000
"""How many wait for one name."""

SETTLE = 0.5
"""Seconds until a waiter has nothing more to do."""


def idle_rows(stores: list[str], scale: Scale, peer: Peer | None, places: Places) -> Iterator[Row]:
    """One waiter at the default lease. All contenders wait at the same time, since they hardly do anything."""
    with ExitStack() as stack:
        crews = {store: stack.enter_context(Crew(store, peer, places, count=True)) for store in stores}
        for crew in crews.values():
            crew.send("waiters", count=1, settle=SETTLE, seconds=scale.idle_seconds)
        answers = {store: crew.answers() for store, crew in crews.items()}
    for store in stores:
        yield from _idle_rows_of(store, answers[store])


def _idle_rows_of(store: str, answers: Mapping[str, Any]) -> Iterator[Row]:
    calls, probes, processor = (_share(answers, what) for what in ("calls", "probes", "processor"))
    yield Row(
        store=store,
        what="one idle waiter: store calls",
        unit="/s",
        ours=calls["ours"],
        peer=calls.get("peer"),
        target=Target(0.2),
    )
    if store == "sqlite":
        yield Row(store=store, what="one idle waiter: probes", unit="/s", ours=probes["ours"])
    share = {name: 100 * value for name, value in processor.items()}
    yield Row(
        store=store,
        what="one idle waiter: processor",
        unit="%",
        ours=share["ours"],
        peer=share.get("peer"),
        target=Target(0.5),
    )


def _share(answers: Mapping[str, Any], what: str) -> dict[str, float]:
    """How much of it there was in a second, by contender."""
    return {name: answer[what] / answer["seconds"] for name, answer in answers.items()}


def crowd_rows(store: str, scale: Scale, peer: Peer | None, places: Places) -> Iterator[Row]:
    """Many waiters for one name, beside one; the first try of each counts."""
    with Crew(store, peer, places, count=True) as crew:
        # One after the other: the peer's crowd leaves little of the machine to anybody else.
        one, many = (
            crew.rounds(1, "waiters", for_each("ours", "peer", count=count, settle=0, seconds=scale.crowd_seconds))
            for count in (1, CROWD)
        )
    calls = {name: answer["calls"] for name, (answer,) in many.items()}
    yield Row(
        store=store,
        what=f"{CROWD:,} waiters for one name: store calls",
        unit=f"in {scale.crowd_seconds:g} s",
        ours=calls["ours"],
        peer=calls.get("peer"),
        ratio=calls["ours"] / max(one["ours"][0]["calls"], 1),
        ratio_to="one waiter",
        target=Target(1, on="ratio"),
    )
