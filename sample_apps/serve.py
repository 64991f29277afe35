"""Leave a sample application running on several workers: `make serve`."""

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from sample_apps.django_reports.serve import serve_reports
from sample_apps.options import STORE, StoreOption, WorkersOption
from sample_apps.place import located
from sample_apps.workers import Workers, interruptible


class App(StrEnum):
    """The applications that can be served."""

    django_reports = "django_reports"
    fastapi_orders = "fastapi_orders"
    starlette_leader = "starlette_leader"


FIRST_PAGES = {App.fastapi_orders: "/docs", App.starlette_leader: "/"}


cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def serve(
    app: Annotated[App, typer.Argument(help="Which application.")],
    workers: WorkersOption = 4,
    store: StoreOption = STORE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")] = 8000,
) -> None:
    """Leave a sample application running until Ctrl-C."""
    with located(store) as url:
        if app is App.django_reports:
            raise typer.Exit(interruptible(serve_reports(url, workers, port)))
        server = Workers(app.value, workers, url, {}, port=port, quiet=False)
        raise typer.Exit(interruptible(_serve(server, FIRST_PAGES[app])))


async def _serve(server: Workers, first_page: str) -> int:
    typer.echo(f"{server.url}{first_page}")
    with server:
        while server.alive():
            await asyncio.sleep(0.2)
        return server.wait()


if __name__ == "__main__":
    cli()
