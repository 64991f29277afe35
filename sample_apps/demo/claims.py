"""What the demonstration claims. Each claim is computed from what the workers answered and wrote."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that should hold."""

    text: str
    held: bool
    found: str
    """What was seen."""
    next_step: str
    """What to do when it does not hold."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How durations are spread: how many there are, the middle one, and the one that 99 of 100 stay below. Seconds."""

    count: int
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        """The spread of these durations."""
        ranked = sorted(seconds) or [0.0]
        p50, p99 = (ranked[min(int(share * len(ranked)), len(ranked) - 1)] for share in (0.5, 0.99))
        return cls(len(seconds), p50, p99)

    def __str__(self) -> str:
        return f"p50 {1000 * self.p50:.0f} p99 {1000 * self.p99:.0f} ms"
