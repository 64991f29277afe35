"""One line of the result: a figure, what it is compared with, and what it has to reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a row's figure, or for its ratio."""

    limit: float
    on: Literal["figure", "ratio"] = "figure"
    at_least: bool = False

    def reached(self, row: "Row") -> bool:
        """Whether the row keeps it."""
        value = row.ours if self.on == "figure" else row.ratio
        if value is None:
            return False
        return value >= self.limit if self.at_least else value <= self.limit

    def text(self, row: "Row") -> str:
        """The limit, in the row's words."""
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.limit:g} {row.unit}" if self.on == "figure" else f"{sign} {self.limit:g} x {row.ratio_to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result."""

    store: str
    """"" for what no store has a part in."""
    what: str
    unit: str
    ours: float
    floor: float | None = None
    peer: float | None = None
    ratio: float | None = None
    """Ours divided by what `ratio_to` names."""
    ratio_to: str = "floor"
    target: Target | None = None


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which `share` of them lie."""
    return sorted(samples)[min(int(len(samples) * share), len(samples) - 1)]


def joined(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The samples of all rounds."""
    return [sample for samples in rounds for sample in samples]


def quietest(rounds: Sequence[Sequence[float]]) -> float:
    """The median of the best round: other programs on the machine can only make a round slower."""
    return min(median(samples) for samples in rounds)


def paired_ratio(ours: Sequence[Sequence[float]], floor: Sequence[Sequence[float]]) -> float:
    """How many times the floor's median ours is, by rounds: both of one round met the same noise."""
    return median(median(mine) / median(bare) for mine, bare in zip(ours, floor, strict=True))
