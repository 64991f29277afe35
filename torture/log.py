"""The log of a run: one line for each thing that happened, appended by all processes, read by the checker."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds on a clock that all processes of this host share, so that their stamps can be compared."""
    return time.clock_gettime(CLOCK)


class Log:
    """The log, as one process writes it. A line is one system call, so lines of several processes never mix.

    Args:
        path: the file.
        who: this process: its slot, and which life in that slot.
    """

    def __init__(self, path: Path, who: str) -> None:
        self.who = who
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, what: str, at: float | None = None, **facts: object) -> None:
        """Append what happened at `at`, or happens now."""
        line = json.dumps({"at": now() if at is None else at, "who": self.who, "what": what, **facts})
        # The line break comes first: should a kill ever cut a line short, the next one is whole all the same.
        os.write(self._file, b"\n" + line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    line: int
    at: float
    who: str
    what: str
    facts: Facts


def read(path: Path) -> Iterator[Entry]:
    """The lines of a log in the order in which they were written; one that cannot be read is called `unreadable`."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _entry(number, line)


def _entry(number: int, line: str) -> Entry:
    try:
        facts: Facts = json.loads(line)
        return Entry(number, float(facts.pop("at")), str(facts.pop("who")), str(facts.pop("what")), facts)
    except (ValueError, TypeError, KeyError, AttributeError):
        return Entry(number, 0.0, "", "unreadable", {})
