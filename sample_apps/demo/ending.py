"""How a demonstration ends: with its claims on the screen or in a JSON document, and an exit code."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import typer

from sample_apps.demo.claims import Claim
from sample_apps.demo.screen import Screen


class Demonstration(Protocol):
    """A demonstration: what it claims, and the figures of what was seen."""

    claims: list[Claim]
    figures: dict[str, Any]

    async def play(self) -> None:
        """All scenes."""


async def shown(
    run: Demonstration,
    screen: Screen,
    *,
    stops: tuple[type[Exception], ...],
    log: Callable[[], str],
    document: dict[str, Any] | None,
    last: str,
) -> int:
    """Play a demonstration, and end it.

    Args:
        run: the demonstration.
        screen: where it is shown.
        stops: what it raises where it cannot go on.
        log: the last lines of what its processes wrote.
        document: what to begin a JSON document of all figures with, instead of the screen.
        last: the last line on the screen.

    Returns:
        The exit code: 0 if every claim held, 1 if one did not, 2 if the demonstration could not go on.
    """
    began = time.monotonic()
    problem = ""
    try:
        await run.play()
    except stops as error:
        problem = f"{type(error).__name__}: {error}"
        typer.echo(f"\nThe demonstration could not go on: {problem}\n{log()}", err=True)
    seconds = time.monotonic() - began
    if document is not None:
        claims = [asdict(claim) for claim in run.claims]
        typer.echo(
            json.dumps(
                {**document, "claims": claims, "figures": run.figures, "problem": problem, "seconds": seconds}, indent=2
            )
        )
    elif not problem:
        _summarize(run.claims, screen, seconds, last)
    return 2 if problem else int(not all(claim.held for claim in run.claims))


def _summarize(claims: list[Claim], screen: Screen, seconds: float, last: str) -> None:
    held = sum(claim.held for claim in claims)
    screen.line(f"\n{held} of {len(claims)} claims held in {seconds:.0f} s.", "bold")
    for claim in claims:
        if not claim.held:
            screen.line(f"NOT HELD: {claim.text}\n  seen: {claim.found}\n  next: {claim.next_step}", "red")
    screen.line(last)


def shown_store(store: str) -> str:
    """The URL of a store without its password and options."""
    scheme, separator, rest = store.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if separator else store
