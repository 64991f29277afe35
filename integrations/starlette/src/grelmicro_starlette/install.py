"""`install`: all that an application needs, in one line."""

from typing import Any

from starlette.applications import Starlette

from grelmicro import Grelmicro
from grelmicro.config import Duration
from grelmicro.errors import SettingsValidationError
from grelmicro_starlette.lifespan import lifespan
from grelmicro_starlette.middleware import CoordinationMiddleware
from grelmicro_starlette.refusals import Refusal, exception_handlers
from grelmicro_starlette.serving import KEY


def install(
    app: Starlette, micro: Grelmicro, *, retry_after: Duration = 1, refusal: Refusal | None = None, signals: bool = True
) -> None:
    """Open `micro` around `app`, serve its requests with it, and answer refusals as `exception_handlers` does.

    The lifespan that `app` has runs inside, and handlers that it has for the same errors stay. A second call with the
    same `micro` does nothing. An app that is mounted below answers for itself: install the same or another `micro`
    there, too, and the root's lifespan opens it.

    Args:
        app: a Starlette or FastAPI application, before its start.
        micro: what to open around it.
        retry_after: seconds that a refused client is told to wait.
        refusal: what makes the answer to a refused client; see `exception_handlers`.
        signals: hand leadership over at SIGTERM and SIGINT, not when the server has served its last request.

    Raises:
        SettingsValidationError: the app has another `Grelmicro`, it has started, it is no application, or an argument
            breaks a rule.
    """
    if not isinstance(app, Starlette) or not isinstance(micro, Grelmicro):
        raise SettingsValidationError(
            f"install() takes a Starlette or FastAPI application and a Grelmicro, not {type(app).__name__} and "
            f"{type(micro).__name__}: install(app, micro)"
        )
    installed = getattr(app.state, KEY, None)
    if installed is micro:
        return
    if installed is not None:
        raise SettingsValidationError(
            "install() was called on this app with another Grelmicro: one serves an app, so give it all that is used"
        )
    if app.middleware_stack is not None:
        raise SettingsValidationError("install() came after the app was started: call it where the app is built")
    handlers: dict[Any, Any] = app.exception_handlers
    for error, handler in exception_handlers(retry_after=retry_after, refusal=refusal).items():
        handlers.setdefault(error, handler)
    app.add_middleware(CoordinationMiddleware, micro=micro)
    app.router.lifespan_context = lifespan(micro, app.router.lifespan_context, signals=signals)
    setattr(app.state, KEY, micro)
