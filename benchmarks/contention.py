"""Rows of many tasks that want one lock, beside the serial ceiling: one body after the other."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.crew import Crew, Worker, for_each, in_turn
from benchmarks.plan import Scale
from benchmarks.rows import Row, Target

TASKS = 16
"""How many tasks compete."""

TARGET = Target(0.85, on="ratio", at_least=True)

Rounds = Mapping[str, Sequence[Any]]


def rows(store: str, scale: Scale, crew: Crew, floor_pair: float) -> Iterator[Row]:
    """All tasks in one process.

    The ceiling has nothing but the floor's pair between two bodies, as it is when one pair follows the other at once.
    The floor is slower, too, when the processor rested during a body: that is the second row, measured with one task.
    """
    commands = for_each("ours", "peer", tasks=TASKS, each=scale.grants) | for_each(
        "floor", tasks=1, each=scale.grants * 4
    )
    answers = crew.rounds(scale.rounds, "contended", commands)
    rates = _rates(answers)
    yield _row(store, f"{TASKS} tasks with a body of 1 ms", answers, floor_pair, TARGET)
    yield Row(
        store=store,
        what="  beside the floor with one task",
        unit="grants/s",
        ours=rates["ours"],
        floor=rates["floor"],
        peer=rates.get("peer"),
        ratio=rates["ours"] / rates["floor"],
    )


def two_processes_row(store: str, scale: Scale, crew: Crew, others: Crew, floor_pair: float) -> Row:
    """As many tasks, half of them in each of two processes."""
    answers: dict[str, list[Any]] = {name: [] for name in others.workers}
    for number in range(scale.rounds):
        for name in in_turn(list(answers), number):
            answers[name].append(_compete(scale, crew.workers[name], others.workers[name]))
    return _row(store, f"{TASKS} tasks in two processes", answers, floor_pair, TARGET)


def _compete(scale: Scale, *workers: Worker) -> dict[str, float]:
    for worker in workers:
        worker.send("contended", tasks=TASKS // len(workers), each=scale.grants)
    answers = [worker.answer() for worker in workers]
    return {
        "grants": sum(answer["grants"] for answer in answers),
        "seconds": max(answer["seconds"] for answer in answers),
        "body": mean(answer["body"] for answer in answers),
    }


def _row(store: str, what: str, answers: Rounds, floor_pair: float, target: Target | None) -> Row:
    rates = _rates(answers)
    ceiling = 1 / (floor_pair + mean(answer["body"] for answer in answers["ours"]))
    return Row(
        store=store,
        what=what,
        unit="grants/s",
        ours=rates["ours"],
        floor=ceiling,
        peer=rates.get("peer"),
        ratio=rates["ours"] / ceiling,
        ratio_to="ceiling",
        target=target,
    )


def _rates(answers: Rounds) -> dict[str, float]:
    return {name: median(answer["grants"] / answer["seconds"] for answer in rounds) for name, rounds in answers.items()}
