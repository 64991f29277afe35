"""Rows of taking and giving a lock: uncontended, and from one holder to the next."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import contention
from benchmarks.crew import Crew, Peer, Worker, for_each, in_turn
from benchmarks.places import Places
from benchmarks.plan import Scale
from benchmarks.rows import Row, Target, joined, paired_ratio, percentile, quietest

MICROSECONDS, MILLISECONDS = 1e6, 1e3

PAIR_TARGETS = {
    "memory": Target(5),
    "sqlite": Target(1.15, on="ratio"),
    "redis": Target(1.1, on="ratio"),
    "postgres": Target(1.15, on="ratio"),
    "kubernetes": Target(1.15, on="ratio"),
}
HANDOVER_TARGETS = {
    "memory": Target(0.2),
    "sqlite": Target(2),
    "redis": Target(2),
    "postgres": Target(3),
    "kubernetes": Target(30),
}
OTHER_PROCESS_TARGETS = {"sqlite": Target(2), "redis": Target(2), "postgres": Target(3), "kubernetes": Target(30)}
SPREAD_TARGET = Target(5, on="ratio")

# Seconds for which a lock is kept before it is handed over: longer than the pause of whoever waits for it, from a
# moment anywhere in that pause. The peer looks every 100 ms.
PAUSES = {"ours": (0.005, 0.035), "floor": (0.005, 0.035), "peer": (0.02, 0.22)}

Rounds = Mapping[str, Sequence[Any]]


def rows(store: str, scale: Scale, peer: Peer | None, places: Places) -> Iterator[Row]:
    """All rows of one store."""
    with Crew(store, peer, places, floor=True) as crew:
        pairs = crew.rounds(scale.rounds, "pairs", for_each("ours", "floor", "peer", count=scale.pairs[store]))
        yield from _pair_rows(store, pairs)
        yield from _handover_rows(store, scale, crew)
        floor_pair = median(joined(pairs["floor"]))
        yield from contention.rows(store, scale, crew, floor_pair)
        if store in OTHER_PROCESS_TARGETS:
            with Crew(store, peer, places) as others:
                yield from _other_process_rows(store, scale, crew, others, floor_pair)
                yield contention.two_processes_row(store, scale, crew, others, floor_pair)


def _pair_rows(store: str, pairs: Rounds) -> Iterator[Row]:
    p50 = {name: quietest(rounds) * MICROSECONDS for name, rounds in pairs.items()}
    p99 = {name: percentile(joined(rounds), 0.99) * MICROSECONDS for name, rounds in pairs.items()}
    yield Row(
        store=store,
        what="acquire + release, p50 of the quietest round",
        unit="us",
        ours=p50["ours"],
        floor=p50["floor"],
        peer=p50.get("peer"),
        ratio=paired_ratio(pairs["ours"], pairs["floor"]),
        target=PAIR_TARGETS[store],
    )
    yield Row(
        store=store,
        what="acquire + release, p99",
        unit="us",
        ours=p99["ours"],
        floor=p99["floor"],
        peer=p99.get("peer"),
        ratio=p99["ours"] / p99["floor"],
    )


def _handover_rows(store: str, scale: Scale, crew: Crew) -> Iterator[Row]:
    commands = {
        name: {"count": _how_many(name, scale), "shortest": shortest, "longest": longest}
        for name, (shortest, longest) in PAUSES.items()
        if name != "floor" or store == "memory"  # the other floors cannot wait
    }
    answers = crew.rounds(scale.rounds, "handovers", commands)
    return _latency_rows(store, "hand-over", answers, HANDOVER_TARGETS[store])


def _other_process_rows(store: str, scale: Scale, crew: Crew, others: Crew, floor_pair: float) -> Iterator[Row]:
    """Beside the floor's pair: the statements of a hand-over, without a hint."""
    answers: dict[str, list[list[float]]] = {name: [] for name in others.workers}
    for number in range(scale.rounds):
        for name in in_turn(list(answers), number):
            pair = crew.workers[name], others.workers[name]
            answers[name].append([_hand_over(*pair, *PAUSES[name]) for _ in range(_how_many(name, scale))])
    target = OTHER_PROCESS_TARGETS[store]
    return _latency_rows(store, "hand-over to another process", answers, target, floor_pair=floor_pair)


def _hand_over(holder: Worker, waiter: Worker, shortest: float, longest: float) -> float:
    """Seconds from the begin of a release in one process to the grant in another one."""
    holder.ask("take")
    waiter.send("wait")
    time.sleep(random.uniform(shortest, longest))
    given_at: float = holder.ask("give")
    taken_at: float = waiter.answer()
    return taken_at - given_at


def _how_many(name: str, scale: Scale) -> int:
    """Hand-overs in a round: fewer of the peer's, which take a hundred times as long."""
    return scale.handovers // 4 + 1 if name == "peer" else scale.handovers


def _latency_rows(
    store: str, what: str, answers: Rounds, target: Target, *, floor_pair: float | None = None
) -> Iterator[Row]:
    p50, p99 = (
        {name: percentile(joined(rounds), share) * MILLISECONDS for name, rounds in answers.items()}
        for share in (0.5, 0.99)
    )
    floor = p50.get("floor") if floor_pair is None else floor_pair * MILLISECONDS
    yield Row(
        store=store,
        what=f"{what}, p50",
        unit="ms",
        ours=p50["ours"],
        floor=floor,
        peer=p50.get("peer"),
        ratio=p50["ours"] / floor if floor else None,
        ratio_to="floor" if floor_pair is None else "floor pair",
        target=target,
    )
    yield Row(
        store=store,
        what=f"{what}, p99",
        unit="ms",
        ours=p99["ours"],
        floor=p99.get("floor"),
        peer=p99.get("peer"),
        ratio=p99["ours"] / p50["ours"],
        ratio_to="p50",
        target=SPREAD_TARGET,
    )
