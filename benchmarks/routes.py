"""The web applications that are compared: one route each, with a lock and without."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import grelmicro_fastapi
import grelmicro_starlette
from grelmicro import Grelmicro
from grelmicro.coordination import Lock, LockHandle
from grelmicro_fastapi import LockDep
from grelmicro_starlette import locked

PATH = "/carts/42"

Show = Callable[..., object]


@dataclass
class Work:
    """What every handler does, in the lock if there is one."""

    seconds: float = 0.0

    async def __call__(self) -> None:
        """Wait as for a database; 0 is nothing at all."""
        if self.seconds:
            await asyncio.sleep(self.seconds)


work = Work()


def lock_of(cart_id: int) -> Lock:
    """What is taken by hand. It is renewed, as that of a dependency and of the decorator is."""
    return Lock(f"cart:{cart_id}", auto_renew=True)


async def fastapi_show(cart_id: int) -> dict[str, int]:
    """No lock."""
    await work()
    return {"cart": cart_id}


async def fastapi_by_hand(cart_id: int) -> dict[str, int]:
    """The handler takes it."""
    async with lock_of(cart_id):
        await work()
        return {"cart": cart_id}


async def own_dependency(cart_id: int) -> AsyncIterator[LockHandle]:
    """A dependency as one would write it without this package's."""
    async with lock_of(cart_id) as held:
        yield held


async def fastapi_own(
    cart_id: int, held: Annotated[LockHandle, Depends(own_dependency, scope="function")]
) -> dict[str, int]:
    """That dependency takes it."""
    await work()
    return {"cart": cart_id}


async def fastapi_lock(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> dict[str, int]:
    """The dependency of this package takes it."""
    await work()
    return {"cart": cart_id}


async def starlette_show(request: Request) -> Response:
    """No lock."""
    await work()
    return JSONResponse({"cart": request.path_params["cart_id"]})


async def starlette_by_hand(request: Request) -> Response:
    """The handler takes it."""
    async with lock_of(request.path_params["cart_id"]):
        await work()
        return JSONResponse({"cart": request.path_params["cart_id"]})


def fastapi(show: Show, micro: Grelmicro | None) -> FastAPI:
    """An application with one route; None: without anything of this package."""
    app = FastAPI()
    app.get("/carts/{cart_id}")(show)
    if micro is not None:
        grelmicro_fastapi.install(app, micro)
    return app


def starlette(show: Show, micro: Grelmicro | None) -> Starlette:
    """The same of Starlette."""
    app = Starlette(routes=[Route("/carts/{cart_id:int}", show)])
    if micro is not None:
        grelmicro_starlette.install(app, micro)
    return app


def applications(micro: Grelmicro) -> dict[str, Starlette]:
    """All of them, on one store."""
    return {
        "fastapi bare": fastapi(fastapi_show, None),
        "fastapi installed": fastapi(fastapi_show, micro),
        "fastapi by hand": fastapi(fastapi_by_hand, micro),
        "fastapi own": fastapi(fastapi_own, micro),
        "fastapi lock": fastapi(fastapi_lock, micro),
        "starlette bare": starlette(starlette_show, None),
        "starlette installed": starlette(starlette_show, micro),
        "starlette by hand": starlette(starlette_by_hand, micro),
        "starlette lock": starlette(locked("cart:{cart_id}")(starlette_show), micro),
    }
