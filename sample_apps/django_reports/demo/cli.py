"""The command line of the demonstration."""

from typing import Annotated

import httpx2
import typer

from sample_apps.demo.ending import shown, shown_store
from sample_apps.demo.screen import Screen
from sample_apps.django_reports.demo.play import SETTINGS, Demo
from sample_apps.django_reports.project import Project, ProjectError
from sample_apps.options import StoreOption
from sample_apps.place import located
from sample_apps.workers import interruptible

STORE = "database:default"

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def demo(
    requests: Annotated[int, typer.Option(min=16, max=10_000, help="People who sign a report.")] = 200,
    store: StoreOption = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as one JSON document.")] = False,
) -> None:
    """Run a Django project, and show what its leases prevent. The exit code is 0 if every claim held."""
    with located(store) as url:
        raise typer.Exit(interruptible(_demo(requests, url, Screen(silent=as_json), as_json=as_json)))


async def _demo(requests: int, store: str, screen: Screen, *, as_json: bool) -> int:
    screen.line(f"django_reports: invoices, reports and rates in SQLite, leases in {shown_store(store)}\n")
    with Project(store, SETTINGS) as project:
        return await shown(
            Demo(project, requests, screen),
            screen,
            stops=(ProjectError, OSError, httpx2.HTTPError),
            log=lambda: project.log,
            document={"store": shown_store(store)} if as_json else None,
            last="The project: sample_apps/django_reports.   Leave it running: make serve APP=django_reports",
        )
