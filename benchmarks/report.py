"""Print the rows: as a table for people, or as one JSON document."""

import json
import os
import platform
import sqlite3
from dataclasses import asdict, dataclass
from typing import Self

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.crew import Peer
from benchmarks.rows import Row

PLAIN_WIDTH = 160
"""Columns of a table that goes into a file or a pipe, whose own width is unknown."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    python: str
    sqlite: str
    cores: int
    load: float
    """How many programs wanted a core before anything was measured: figures of a busy machine are too high."""

    @classmethod
    def look(cls) -> Self:
        """This machine as it is now."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return cls(platform.python_version(), sqlite3.sqlite_version, os.cpu_count() or 1, load)


def as_json(rows: list[Row], peer: Peer | None, machine: Machine, *, quick: bool) -> str:
    """One document with everything."""
    document = {
        "machine": asdict(machine),
        "peer": None if peer is None else {"version": peer.version, "python": peer.python},
        "quick": quick,
        "rows": [_described(row) for row in rows],
    }
    return json.dumps(document, indent=2)


def print_table(rows: list[Row], peer: Peer | None, machine: Machine) -> None:
    """A table, in colour on a terminal and plain elsewhere."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH, color_system=None)
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        title=f"Python {machine.python}, SQLite {machine.sqlite}, {machine.cores} cores, load {machine.load:.1f}",
        title_justify="left",
        caption=_about_peer(peer),
        caption_justify="left",
    )
    for heading in ("store", "what"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours", "floor", "peer", "ratio", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("reached")
    before = ""
    for row in rows:
        if row.store != before:
            table.add_section()
        table.add_row(row.store if row.store != before else "", *_cells(row))
        before = row.store
    console.print(table)


def _about_peer(peer: Peer | None) -> str:
    if peer is None:
        return "No peer: PEER names no interpreter that has the PyPI package grelmicro."
    return f"The peer is grelmicro {peer.version} on Python {peer.python}."


def _described(row: Row) -> dict[str, object]:
    return {
        "store": row.store,
        "what": row.what,
        "unit": row.unit,
        "ours": row.ours,
        "floor": row.floor,
        "peer": row.peer,
        "ratio": row.ratio,
        "ratio_to": None if row.ratio is None else row.ratio_to,
        "target": None if row.target is None else row.target.text(row),
        "reached": None if row.target is None else row.target.reached(row),
    }


def _cells(row: Row) -> list[str]:
    target, reached = "", ""
    if row.target is not None:
        target = row.target.text(row)
        reached = "[green]yes[/]" if row.target.reached(row) else "[red]NO[/]"
    ratio = "" if row.ratio is None else f"{_number(row.ratio)} x {row.ratio_to}"
    ours = f"{_number(row.ours)} {row.unit}"
    return [row.what, ours, _number(row.floor), _number(row.peer), ratio, target, reached]


def _number(value: float | None) -> str:
    """Three digits that say something."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
