"""What `Tasks` runs, and what became of each fire."""

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from grelmicro.coordination.taskruns import FireOutcome
from grelmicro.errors import TaskError

Outcome = FireOutcome
"""The former name of `FireOutcome`."""


def no_outcomes() -> dict[str, int]:
    """How often each outcome came about, before the first fire."""
    return {outcome.value: 0 for outcome in FireOutcome}


class Task(Protocol):
    """Something that runs from the start to the end of `Tasks`, such as a `LeaderElection`."""

    @property
    def name(self) -> str:
        """Its name, unique within its `Tasks`."""

    async def __call__(self, *, ready: asyncio.Future[None] | None = None, stop: asyncio.Event | None = None) -> None:
        """Run until `stop` is set, or until cancelled; complete `ready` once it runs."""


def check_task(task: object) -> None:
    """Raise `TaskError` unless `task` can be run by `Tasks`, as far as that can be seen."""
    if not (callable(task) and isinstance(getattr(task, "name", None), str)):
        raise TaskError(
            f"Tasks run an object with a name, such as LeaderElection('feed'), not {type(task).__name__}: "
            "declare a function with @tasks.every(seconds=60)"
        )


@dataclass(frozen=True, slots=True)
class Fire:
    """One due fire that is over."""

    started_at: datetime
    outcome: FireOutcome
    duration: float
    """Seconds that it took."""
    lateness: float = 0.0
    """Seconds from its due time until the function was called, or it was clear that it is not."""
