"""The command line of the demonstration."""

import json
import time
from dataclasses import asdict
from typing import Annotated

import httpx2
import typer

from sample_apps.fastapi_orders.demo.play import SETTINGS, Demo, NotStartedError, length, place_of
from sample_apps.fastapi_orders.demo.screen import Screen
from sample_apps.fastapi_orders.shop import Shop
from sample_apps.options import STORE, StoreOption, WorkersOption
from sample_apps.place import located
from sample_apps.workers import Workers, interruptible

ORDERS = "orders.db"
"""The file with the shop's data."""

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def demo(
    workers: WorkersOption = 4,
    requests: Annotated[int, typer.Option(min=16, max=10_000, help="Customers.")] = 400,
    store: StoreOption = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as one JSON document.")] = False,
) -> None:
    """Run a shop on several workers, and show what its locks prevent. The exit code is 0 if every claim held."""
    with located(store) as url:
        raise typer.Exit(interruptible(_demo(workers, requests, url, Screen(silent=as_json), as_json=as_json)))


async def _demo(workers: int, requests: int, store: str, screen: Screen, *, as_json: bool) -> int:
    began = time.monotonic()
    server = Workers("fastapi_orders", workers, store, {**SETTINGS, "ORDERS": ORDERS})
    screen.line(f"fastapi_orders: {workers} uvicorn workers, locks in {_shown(store)}   {server.url}/docs")
    screen.line(f"                the whole app is {length()} lines: sample_apps/fastapi_orders/app.py\n")
    with server:
        shop = Shop(server.folder / ORDERS)
        run = Demo(server, shop, requests, screen)
        problem = ""
        try:
            await run.play()
        except (NotStartedError, OSError, httpx2.HTTPError) as error:
            problem = f"{type(error).__name__}: {error}"
            typer.echo(f"\nThe demonstration could not go on: {problem}\n{server.log}", err=True)
        finally:
            shop.close()
    seconds = time.monotonic() - began
    if as_json:
        document = {
            "claims": [asdict(claim) for claim in run.claims],
            "figures": run.figures,
            "problem": problem,
            "seconds": seconds,
            "store": _shown(store),
            "workers": workers,
        }
        typer.echo(json.dumps(document, indent=2))
    elif not problem:
        _close(run, screen, seconds)
    return 2 if problem else int(not all(claim.held for claim in run.claims))


def _close(run: Demo, screen: Screen, seconds: float) -> None:
    held = sum(claim.held for claim in run.claims)
    places = f"{place_of('LockDep(')} and {place_of('leader=leader')}"
    screen.line(f"\n{held} of {len(run.claims)} claims held in {seconds:.0f} s.", "bold")
    for claim in run.claims:
        if not claim.held:
            screen.line(f"NOT HELD: {claim.text}\n  seen: {claim.found}\n  next: {claim.next_step}", "red")
    screen.line(f"The two lines that did it: {places}.   Leave it running, with its documents at /docs: make serve")


def _shown(store: str) -> str:
    """The store without a password and options."""
    scheme, _, rest = store.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
