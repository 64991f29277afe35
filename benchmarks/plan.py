"""How much is measured: the stores, and the sizes of a full and of a quick run."""

from dataclasses import dataclass, replace
from typing import Self

STORES = ("memory", "sqlite", "redis", "postgres", "kubernetes")


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of one run. A round measures each contender once, so that all of them meet the same noise."""

    rounds: int
    pairs: dict[str, int]
    """Acquisitions with their release in a round, by store."""
    handovers: int
    """Hand-overs in a round."""
    grants: int
    """How often each of the tasks that compete gets the lock in a round."""
    constructions: int
    """Locks built in a round."""
    requests: int
    """Requests to each web application in a round; a tenth of them to handlers that work."""
    idle_seconds: float
    crowd_seconds: float

    def of(self, store: str) -> Self:
        """The sizes for one store: a request to Kubernetes takes as long as ten to another server."""
        if store != "kubernetes":
            return self
        return replace(
            self,
            rounds=max(self.rounds // 2, 2),
            handovers=max(self.handovers // 2, 2),
            grants=max(self.grants // 5, 1),
        )


FULL = Scale(
    rounds=10,
    pairs={"memory": 4000, "sqlite": 200, "redis": 200, "postgres": 150, "kubernetes": 20},
    handovers=20,
    grants=15,
    constructions=2000,
    requests=400,
    # Two of the polls by which a waiter guards against a lost hint fall into it.
    idle_seconds=25.0,
    crowd_seconds=2.0,
)

QUICK = Scale(
    rounds=2,
    pairs={"memory": 500, "sqlite": 20, "redis": 20, "postgres": 20, "kubernetes": 5},
    handovers=3,
    grants=2,
    constructions=200,
    requests=20,
    idle_seconds=1.0,
    crowd_seconds=0.3,
)
