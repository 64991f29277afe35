"""`CoordinationMiddleware`: what a request uses is its application's, however many there are in the process."""

from starlette.types import ASGIApp, Receive, Scope, Send

from grelmicro import Grelmicro
from grelmicro_starlette.presence import watched


class CoordinationMiddleware:
    """Serves requests and websockets with `micro`, and sees when their clients leave; `install` adds it.

    Locks and elections that a handler uses by name, itself or in its dependencies, background tasks, tasks and pool
    threads, are those of `micro`: also where several apps are open in one process. An app mounted inside may have
    another one.

    Args:
        app: what to serve; any ASGI application.
        micro: what it uses. Its lifespan has to open it.
    """

    def __init__(self, app: ASGIApp, micro: Grelmicro) -> None:
        self.app = app
        self.micro = micro

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        with self.micro.bound():
            await watched(self.app, scope, receive, send)
