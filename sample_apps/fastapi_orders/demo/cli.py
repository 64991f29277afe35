"""The command line of the demonstration."""

from contextlib import closing
from typing import Annotated

import httpx2
import typer

from sample_apps.demo.ending import shown, shown_store
from sample_apps.demo.screen import Screen
from sample_apps.fastapi_orders.demo.play import SETTINGS, Demo, NotStartedError, length, place_of
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
    server = Workers("fastapi_orders", workers, store, {**SETTINGS, "ORDERS": ORDERS})
    screen.line(f"fastapi_orders: {workers} uvicorn workers, locks in {shown_store(store)}   {server.url}/docs")
    screen.line(f"                the whole app is {length()} lines: sample_apps/fastapi_orders/app.py\n")
    places = f"{place_of('LockDep(')} and {place_of('leader=leader')}"
    with server, closing(Shop(server.folder / ORDERS)) as shop:
        return await shown(
            Demo(server, shop, requests, screen),
            screen,
            stops=(NotStartedError, OSError, httpx2.HTTPError),
            log=lambda: server.log,
            document={"store": shown_store(store), "workers": workers} if as_json else None,
            last=f"The two lines that did it: {places}.   Leave it running, with its documents at /docs: make serve",
        )
