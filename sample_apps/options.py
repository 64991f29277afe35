"""The options that the commands of the sample applications share."""

from typing import Annotated

import typer

STORE = "sqlite:///locks.db"

WorkersOption = Annotated[int, typer.Option(min=2, max=16, help="Worker processes.")]
StoreOption = Annotated[
    str, typer.Option(help="Where the leases are: a URL, or redis or postgres for a server that is started for this.")
]
