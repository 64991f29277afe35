"""What a run is told as: a line now and then while it goes on, a table at its end."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from torture.check import Violation, in_time, overlaps
from torture.claims import History

WATCHED = {b'"what": "grant"': "grants", b'"what": "pause"': "pauses", b'"what": "kill"': "kills"}
"""What is counted while a run goes on."""

MOVED = 5
"""Milliseconds from which on it is told that the wall clock was set: servers count leases by it."""

SHOWN = 20
"""Violations that are printed."""

LINE_EVERY = 10.0
"""Seconds between two lines about a run that goes on, where no terminal can show more."""


def figures(history: History) -> dict[str, int]:
    """What happened in a run."""
    claims = [claim for claims in history.by_name() for claim in claims]
    takeovers = sum(before.who != after.who for claims in history.by_name() for before, after in pairwise(claims))
    lost = [claim for claim in claims if claim.lost]
    troubles = Counter(entry.facts["kind"] for entry in history.of_kind("trouble"))
    restarts = troubles.pop("server restarted", 0)
    walls = [entry.facts["wall"] for entry in history.of_kind("clock")]
    moved = round(1000 * (max(walls) - min(walls))) if walls else 0
    excused = sum(history.wiped(first.asked, second.granted) for first, second in overlaps(history))
    return {
        "grants": len(claims),
        "hand-overs to another process": takeovers,
        "terms of leadership": sum(claim.name == "chief" for claim in claims),
        "workers paused": len(history.of_kind("pause")),
        "workers killed": len(history.of_kind("kill")),
        "restarts of the store": restarts,
        "other faults of the store": troubles.total(),
        **{f"  {kind}": count for kind, count in sorted(troubles.items())},
        "deadlines compared with the store": sum(len(claim.records) for claim in claims),
        "losses": len(lost),
        "  in a process that ran in time": sum(map(in_time, lost)),
        "writes accepted": sum(write.accepted for write in history.writes),
        "stale writes refused": sum(not write.accepted for write in history.writes),
        **({"two holders, as the store forgot": excused} if history.wipes else {}),
        **({"milliseconds by which the wall clock was set": moved} if moved >= MOVED else {}),
    }


class Report:
    """The terminal, or the plain text of whoever reads a pipe."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._counts = dict.fromkeys(WATCHED.values(), 0)
        self._position = 0
        self._told_at = 0.0

    def begin(self, text: str) -> None:
        """A run begins."""
        self._console.print(text, markup=False)
        if self._console.is_terminal:
            self._status.start()

    def tell(self, seconds: float, log: Path) -> None:
        """It has been going on for `seconds`."""
        self._count(log)
        text = f"{seconds:.0f} s: " + ", ".join(f"{count} {what}" for what, count in self._counts.items())
        if self._console.is_terminal:
            self._status.update(text)
        elif seconds - self._told_at >= LINE_EVERY:
            self._told_at = seconds
            self._console.print(text)

    def end(self) -> None:
        """It is over."""
        self._status.stop()

    def verdict(self, history: History, violations: list[Violation]) -> None:
        """The figures, and what is wrong."""
        table = Table(box=box.SIMPLE_HEAD if self._console.is_terminal else None, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for what, figure in figures(history).items():
            table.add_row(what, str(figure))
        table.add_row("violations", str(len(violations)), style="bold red" if violations else "bold green")
        self._console.print(table)
        for violation in violations[:SHOWN]:
            self._console.print(str(violation), style="red", markup=False)
        if len(violations) > SHOWN:
            self._console.print(f"... and {len(violations) - SHOWN} more")

    def _count(self, log: Path) -> None:
        with log.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        self._position += len(new)
        for mark, what in WATCHED.items():
            self._counts[what] += new.count(mark)
