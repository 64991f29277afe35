"""The last run of a task, as the record of its lock keeps it: how it ended, and for how long it holds the lock."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from grelmicro.leases import Lease


class FireOutcome(StrEnum):
    """How a due fire of a task ended."""

    SUCCESS = "success"
    """The function returned."""
    ERROR = "error"
    """The function raised, or was cancelled at shutdown."""
    LOST = "lost"
    """The lease or the leadership under which the function ran ended before it."""
    SKIPPED = "skipped"
    """It was another worker's turn."""
    MISSED = "missed"
    """This worker was busy or asleep when the fire was due."""
    COORDINATION_ERROR = "coordination_error"
    """The store could not tell whose turn it was, so the function did not run."""


@dataclass(frozen=True, slots=True)
class TaskRun:
    """A run of a task that is over. Times are those of the worker's clock, for display."""

    task: str
    """The name of the task."""
    started_at: datetime
    """When the function was called."""
    ended_at: datetime
    """When it ended."""
    outcome: FireOutcome
    """How it ended."""
    worker: str
    """The worker on which it ran."""
    error: str = ""
    """The class of the error with which it ended."""
    hold: float = 0.0
    """Seconds from its due time for which it keeps other runs away: the interval of the task, unless set otherwise."""
    fence: int = 0
    """The fencing token, or the number of the term, under which it ran."""

    @property
    def duration(self) -> float:
        """Seconds that it took."""
        return (self.ended_at - self.started_at).total_seconds()

    def beside(self, data: Mapping[str, str]) -> Mapping[str, str]:
        """`data` of a record with this run in place of the task's last one."""
        text = json.dumps(
            {
                "started": self.started_at.timestamp(),
                "ended": self.ended_at.timestamp(),
                "outcome": self.outcome.value,
                "worker": self.worker,
                "error": self.error,
                "hold": self.hold,
                "fence": self.fence,
            }
        )
        return {**data, _key(self.task): text}

    @classmethod
    def of(cls, task: str, lease: Lease) -> "TaskRun | None":
        """The last run of `task` that `lease` knows of; None when there is none, or it cannot be read."""
        text = lease.data.get(_key(task))
        if text is None:
            return None
        try:
            stored = json.loads(text)
            return cls(
                task,
                datetime.fromtimestamp(stored["started"], UTC),
                datetime.fromtimestamp(stored["ended"], UTC),
                FireOutcome(stored["outcome"]),
                stored["worker"],
                stored["error"],
                float(stored["hold"]),
                int(stored["fence"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError):  # written by another version
            return None

    def holds(self, lease: Lease) -> bool:
        """Whether `lease`, if it is held, is what this run left behind, and not that of a run which goes on."""
        return self.fence == lease.fence


def _key(task: str) -> str:
    return f"task:{task}"
