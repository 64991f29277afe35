"""One user's lifespan and ours, joined in three ways; what happens is written into the file that DIARY names.

FAILS is where the user's lifespan fails: `start`, `stop` or nowhere. URL is the store.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from grelmicro_fastapi import install, lifespan
from tests.helpers.programs import Diary

diary = Diary(Path(os.environ["DIARY"]))
fails = os.environ.get("FAILS", "")


class Witness:
    """Part of what opens and closes with us."""

    async def __aenter__(self) -> None:
        diary.note("ours opens")

    async def __aexit__(self, *error: object) -> None:
        diary.note("ours closes")


micro = Grelmicro(uses=[Coordination.from_url(os.environ["URL"]), Witness()])


@asynccontextmanager
async def mine(app: FastAPI) -> AsyncIterator[dict[str, str]]:
    """The user's."""
    diary.note(f"mine starts, ours is open: {micro.is_open}")
    if fails == "start":
        raise ValueError("mine cannot start")
    yield {"mine": "kept"}
    diary.note(f"mine ends, ours is open: {micro.is_open}")
    if fails == "stop":
        raise ValueError("mine cannot stop")


def wrapping(
    inner: Callable[[Any], AbstractAsyncContextManager[Any]],
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """What a third package makes of the lifespan that it finds."""

    @asynccontextmanager
    async def both(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        async with inner(app) as state:
            yield {**(state or {}), "third": "kept"}

    return both


def routed(app: FastAPI) -> FastAPI:
    @app.get("/who")
    async def who(request: Request) -> dict[str, object]:
        """What the request has of the lifespans."""
        state = request.scope["state"]
        return {"pid": os.getpid(), "open": state["grelmicro"].is_open, "mine": state["mine"]}

    return app


user_first = routed(FastAPI(lifespan=mine))
install(user_first, micro)

ours_first = routed(FastAPI(lifespan=lifespan(micro, mine)))

wrapped_afterwards = routed(FastAPI(lifespan=mine))
install(wrapped_afterwards, micro)
wrapped_afterwards.router.lifespan_context = wrapping(wrapped_afterwards.router.lifespan_context)
