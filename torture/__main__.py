"""`python -m torture [STORE]` torments workers and their store; `python -m torture check LOG` judges a log again."""

import asyncio
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torture.check import check
from torture.claims import history
from torture.log import read
from torture.report import Report
from torture.run import Plan, run
from torture.stores import store_of

# The proxies break connections on purpose, of which asyncio warns.
logging.getLogger("asyncio").setLevel(logging.ERROR)

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@cli.command("run")
def run_command(
    store: Annotated[
        str, typer.Argument(help="sqlite, redis, redis-forgetful, postgres, kubernetes, or the URL of a store.")
    ] = "sqlite",
    seconds: Annotated[float, typer.Option(min=1.0, help="How long trouble lasts.")] = 180.0,
    processes: Annotated[int, typer.Option(min=2, max=64, help="Worker processes.")] = 8,
    seed: Annotated[int | None, typer.Option(help="What decides what happens.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the log and all other files here.")] = None,
) -> None:
    """Run, and check the log. The exit code is 0 only if nothing is wrong."""
    seed = random.randrange(1_000_000) if seed is None else seed
    place = Path(tempfile.mkdtemp(prefix="torture-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    if (place / "log").exists():
        raise typer.BadParameter(f"{place} has a log already: name another folder", param_hint="--folder")
    plan = Plan(store, seconds, processes, seed, place)
    report = Report()
    try:
        store_of(plan.store, place, processes)
    except LookupError as error:
        raise typer.BadParameter(str(error), param_hint="STORE") from error
    report.begin(f"{plan.title}: {processes} processes, {seconds:g} s of trouble, --seed {seed}")
    try:
        asyncio.run(run(plan, report.tell))
    except KeyboardInterrupt:
        typer.echo(f"Broken off. The log is {plan.log}")
        raise typer.Exit(130) from None
    finally:
        report.end()
    wrong = _judge(plan.log, report)
    if wrong or folder is not None:
        typer.echo(f"The log is {plan.log}; judge it again: python -m torture check {plan.log}")
    else:
        shutil.rmtree(place)
    raise typer.Exit(int(wrong))


@cli.command("check")
def check_command(log: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A log of a run.")]) -> None:
    """Judge the log of a run. The exit code is 0 only if nothing is wrong."""
    raise typer.Exit(int(_judge(log, Report())))


def _judge(log: Path, report: Report) -> bool:
    """Print what a log says; whether something is wrong."""
    found = history(read(log))
    violations = check(found)
    report.verdict(found, violations)
    return bool(violations)


if __name__ == "__main__":
    given = sys.argv[1:]
    cli(given if given[:1] in (["run"], ["check"], ["--help"]) else ["run", *given])
