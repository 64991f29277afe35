"""`install`: all that a FastAPI application needs, in one line."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette

from grelmicro import Grelmicro
from grelmicro.config import Duration
from grelmicro_fastapi.declared import check_locks, check_locks_of
from grelmicro_fastapi.openapi import document
from grelmicro_fastapi.transactions import warn_of_transactions
from grelmicro_starlette import Refusal
from grelmicro_starlette import install as install_below


def install(
    app: Starlette, micro: Grelmicro, *, retry_after: Duration = 1, refusal: Refusal | None = None, signals: bool = True
) -> None:
    """Do what `grelmicro_starlette.install` does, and what FastAPI has beside.

    The OpenAPI document lists the refusals of routes that have dependencies of this package, without their content
    where `refusal` makes it; a response that was declared for the same status stays. Replace `app.openapi` before, if
    you do.

    A route that would take one lock and then another is refused, since requests that do so in different order wait
    for each other. That is seen here, when a route of the app itself is declared, and for all others at the start.
    At the start a warning is logged for routes with a lock, and beside it a dependency that may commit outside of it.

    Args:
        app: the application, before its start.
        micro: what to open around it.
        retry_after: seconds that a refused client is told to wait.
        refusal: what makes the answer to a refused client; see `exception_handlers`.
        signals: hand leadership over at SIGTERM and SIGINT, not when the server has served its last request.

    Raises:
        SettingsValidationError: a route has two separate lock dependencies, the app has another `Grelmicro`, it has
            started, or it is no application.
    """
    if isinstance(app, FastAPI):
        check_locks(app.routes)
    install_below(app, micro, retry_after=retry_after, refusal=refusal, signals=signals)
    if isinstance(app, FastAPI) and not issubclass(app.router.route_class, CheckedRoute):
        _extend(app, described=refusal is None)


class CheckedRoute(APIRoute):
    """A route whose lock dependencies are looked at when it is declared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_locks_of(self)


def _extend(app: FastAPI, *, described: bool) -> None:
    mine = app.router.route_class
    app.router.route_class = type(mine.__name__, (CheckedRoute, mine), {})
    document(app, described=described)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def checked(started: Any) -> AsyncIterator[Any]:
        check_locks(app.routes)
        warn_of_transactions(app.routes)
        document(app, described=described)
        async with inner(started) as state:
            yield state

    app.router.lifespan_context = checked
