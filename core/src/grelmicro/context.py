"""Which app serves the present code: the one bound to this context, else the only one open around it."""

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol

from grelmicro.errors import OutOfContextError


class App(Protocol):
    """An app, as far as what it serves needs to know."""

    environment: str
    """`development`, `test`, `staging` or `production`."""

    @property
    def worker(self) -> str:
        """The readable name of this process for all that it holds; `""` if it has none."""

    @property
    def is_open(self) -> bool:
        """Whether it is open in this process."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which it was opened."""

    def get(self, kind: str, name: str = "default") -> object:
        """Its component of a kind and a name; raises `OutOfContextError` when it has none."""


bound: ContextVar[App | None] = ContextVar("grelmicro_app", default=None)
"""The app of this context and of the tasks started in it."""

_outer: ContextVar[tuple[App | None, ...]] = ContextVar("grelmicro_outer_apps", default=())
"""The apps that were bound to this context before, the last one last."""

open_apps: list[App] = []
"""The apps that are open in this process, or were when it was forked."""

FORKED = (
    "the app was opened before this process was forked, and serves the parent only: open it in this process, in the "
    "lifespan of a web application (also with gunicorn --preload), in Celery's worker_process_init, or in the function "
    "that multiprocessing runs"
)
CLOSED = (
    "the app of this context is not open, and another one is never used in its place: keep it open around this code; "
    "servers of web applications run the lifespan of the root app alone, so open it there"
)
NONE_OPEN = (
    "no app is open: open one around this code with `async with Grelmicro(uses=[Coordination(...)])` (`with` in a "
    "script), or pass backend=; a web application is opened by install(app, micro) of its integration"
)
ELSEWHERE = (
    "the app that is open serves another event loop than the running one: use it on the loop that opened it, through "
    "`from_thread` in a thread, or through a lock's `from_loop` in a coroutine"
)
IN_TESTS = (
    "; in a test use `with TestClient(app)`, or, around an httpx.AsyncClient, `async with "
    "app.router.lifespan_context(app)`"
)


def bind(app: App) -> None:
    """Let `app` serve this context, and the tasks that are started in it."""
    _outer.set((*_outer.get(), bound.get()))
    bound.set(app)


def unbind(app: App) -> None:
    """Undo `bind`. It does nothing in another context than that of `bind`, in which async fixtures close an app."""
    stack = [*_outer.get(), bound.get()]
    if app in stack:
        # Apps may be closed in another order than they were opened in.
        del stack[len(stack) - 1 - stack[::-1].index(app)]
        bound.set(stack.pop())
        _outer.set(tuple(stack))


class Binding:
    """A `with` block that an app serves, with the tasks that are started in it. It is entered for each request."""

    __slots__ = ("_app", "_before")

    def __init__(self, app: App) -> None:
        self._app = app

    def __enter__(self) -> None:
        self._before = bound.set(self._app)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            bound.reset(self._before)
        except ValueError:  # left in another context, as a coroutine is that nobody finished
            return


def active_app(user: str, *, any_loop: bool = False) -> App:
    """The app that serves `user` (for error texts): the one bound to this context, else the only one on this loop.

    Args:
        user: who asks.
        any_loop: for threads: the only one in the process.

    Raises:
        OutOfContextError: there is none, there are several, or the bound one is closed.
    """
    app = bound.get()
    if app is not None:
        if app.is_open:
            return app
        raise OutOfContextError(f"{user}: {FORKED if app in open_apps else CLOSED + IN_TESTS}")
    loops = {app: app.get_loop() for app in open_apps if app.is_open}
    if any_loop:
        apps = [app for app, loop in loops.items() if not loop.is_closed()]
    else:
        here = _running_loop()
        apps = [app for app, loop in loops.items() if loop is here]
    if len(apps) == 1:
        return apps[0]
    if not apps:
        raise OutOfContextError(f"{user}: {_why_none_serves(loops)}")
    raise OutOfContextError(
        f"{user}: {len(apps)} apps are open, and none of them is bound to this context: "
        "pass backend=, or build it from its app: app.coordination.lock(...)"
    )


def _why_none_serves(loops: Mapping[App, asyncio.AbstractEventLoop]) -> str:
    if any(not loop.is_closed() for loop in loops.values()):
        return ELSEWHERE
    if any(not app.is_open for app in open_apps):
        return FORKED
    return NONE_OPEN + IN_TESTS


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
