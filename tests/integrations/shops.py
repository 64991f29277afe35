"""An application with one locked route, in either framework, that answers with the body of the request."""

from typing import Annotated, Any

from fastapi import Body, FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LockHandle
from grelmicro.leases import LeaseStore
from grelmicro_fastapi import LockDep
from grelmicro_starlette import install, locked

BASE = Middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
JSON = [(b"content-type", b"application/json")]
MIDDLEWARE = ["none", "inside", "outside"]


class Shop:
    """An application with one locked route, in either framework, and who came so far as its handler."""

    def __init__(self, framework: str, middleware: str = "none", store: LeaseStore | str = "memory://") -> None:
        coordination = Coordination.from_url(store) if isinstance(store, str) else Coordination(store)
        self.micro = Grelmicro(uses=[coordination])
        self.served: list[str] = []
        inside = [BASE] if middleware == "inside" else []
        self.app = self._starlette(inside) if framework == "starlette" else self._fastapi(inside)
        install(self.app, self.micro)
        if middleware == "outside":
            self.app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))

    def _starlette(self, middleware: list[Middleware]) -> Starlette:
        @locked("cart:{cart_id}", timeout=None)
        async def buy(request: Request) -> Response:
            self.served.append("")
            return PlainTextResponse(await request.body())

        return Starlette(routes=[Route("/{cart_id}", buy, methods=["POST"])], middleware=middleware)

    def _fastapi(self, middleware: list[Middleware]) -> Starlette:
        app = FastAPI(middleware=middleware)

        @app.post("/{cart_id}")
        async def buy(
            cart_id: int,
            held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=None)],
            item: Annotated[dict[str, Any], Body()],
        ) -> dict[str, Any]:
            self.served.append(str(item))
            return item

        return app
