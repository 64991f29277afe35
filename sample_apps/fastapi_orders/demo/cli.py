"""The command line of the demonstration."""

import asyncio
import json
import signal
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Annotated, Any

import httpx2
import typer

from sample_apps.fastapi_orders.demo.place import located
from sample_apps.fastapi_orders.demo.play import SETTINGS, Demo, NotStartedError, length, place_of
from sample_apps.fastapi_orders.demo.screen import Screen
from sample_apps.fastapi_orders.demo.workers import Workers
from sample_apps.fastapi_orders.shop import Shop

cli = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run a shop on several workers, and show what its locks prevent.",
)

STORE = "sqlite:///locks.db"

WorkersOption = Annotated[int, typer.Option(min=2, max=16, help="Worker processes.")]
StoreOption = Annotated[
    str, typer.Option(help="Where the locks are: a URL, or redis or postgres for a server that is started for this.")
]


@cli.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    workers: WorkersOption = 4,
    requests: Annotated[int, typer.Option(min=16, max=10_000, help="Customers.")] = 400,
    store: StoreOption = STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as one JSON document.")] = False,
) -> None:
    """Show what goes wrong without locks, and that it does not with them. The exit code is 0 if every claim held."""
    if context.invoked_subcommand is None:
        with located(store) as url:
            raise typer.Exit(_interruptible(_demo(workers, requests, url, Screen(silent=as_json), as_json=as_json)))


@cli.command()
def serve(
    workers: WorkersOption = 4,
    store: StoreOption = STORE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = 8000,
) -> None:
    """Leave the shop running until Ctrl-C."""
    with located(store) as url:
        raise typer.Exit(_interruptible(_serve(Workers(workers, url, {}, port=port, quiet=False))))


async def _demo(workers: int, requests: int, store: str, screen: Screen, *, as_json: bool) -> int:
    began = time.monotonic()
    server = Workers(workers, store, SETTINGS)
    screen.line(f"fastapi_orders: {workers} uvicorn workers, locks in {_shown(store)}   {server.url}/docs")
    screen.line(f"                the whole app is {length()} lines: sample_apps/fastapi_orders/app.py\n")
    with server:
        shop = Shop(server.orders)
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


async def _serve(server: Workers) -> int:
    typer.echo(f"{server.url}/docs")
    with server:
        while server.alive():
            await asyncio.sleep(0.2)
        return server.wait()


def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`; Ctrl-C, and SIGTERM as well, let it clean up first."""

    async def run() -> int:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 130

    return asyncio.run(run())


def _shown(store: str) -> str:
    """The store without a password and options."""
    scheme, _, rest = store.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"
