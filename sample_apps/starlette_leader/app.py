"""A price feed for several workers: one of them reads the exchange, and all of them show what it says.

uvicorn sample_apps.starlette_leader.app:app --workers 4
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.signals import handing_over
from grelmicro_starlette import CoordinationMiddleware, exception_handlers, leader_only, lifespan, locked
from sample_apps.starlette_leader import exchange
from sample_apps.starlette_leader.board import Board

board = Board(os.environ.get("BOARD", "board.db"))  # the application's own data, in a file that all workers share
micro = Grelmicro(uses=[Coordination.from_url(os.environ.get("STORE", "sqlite:///locks.db"))])
leader = LeaderElection("feed", lease_duration=3, retry_interval=0.5)  # short, for who wants to see a leader replaced


class Ending(asyncio.Event):
    """Set at the signal that stops the server; the server ends the lifespan only after the last stream."""

    hand_over = asyncio.Event.set


@asynccontextmanager
async def mine(app: Starlette) -> AsyncIterator[dict[str, Ending]]:
    """The application's own lifespan."""
    with handing_over(ending := Ending()):
        yield {"ending": ending}


async def feed() -> None:
    """Publish what the exchange says: runs on the worker that leads, and is cancelled when its term ends."""
    term = leader.guard()
    async with aclosing(exchange.news()) as news:
        async for prices in news:
            # A worker that was frozen may write when its term is over: the board refuses an older fence.
            await asyncio.to_thread(board.publish, term.fence, os.getpid(), prices)


async def page(request: Request) -> FileResponse:
    """The page, from any worker."""
    return FileResponse(Path(__file__).with_name("page.html"))


async def events(request: Request) -> StreamingResponse:
    """What the page shows, four times a second, until the browser or the server goes."""
    ending = request.state["ending"]

    async def stream() -> AsyncIterator[str]:
        yield "retry: 300\n\n"  # milliseconds after which a browser whose worker died asks another one
        while not ending.is_set():
            yield f"data: {json.dumps(await seen())}\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), 0.25)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-store"})


async def seen() -> dict[str, object]:
    """Who leads, as this worker last heard from the store, and what is on the board."""
    record = leader.record
    term = {"fence": record.fence, "since": record.acquired_at.timestamp()} if record and record.holder else None
    return {
        "worker": os.getpid(),
        "leads": leader.is_leader(),
        "term": term,
        "hand_overs": record.transitions if record else 0,
        "lease": leader.config.lease_duration,
        "now": time.time(),
        **await asyncio.to_thread(board.seen),
    }


@leader_only(leader)
async def refresh(request: Request) -> JSONResponse:
    """Ask the exchange out of turn; the leader alone may, and the others answer 503."""
    term = request.state["leader"]
    published = await asyncio.to_thread(board.publish, term.fence, os.getpid(), exchange.quotes())
    return JSONResponse({"worker": os.getpid(), "term": term.fence, "published": published})


@locked("desk:{symbol}", timeout=5)
async def buy(request: Request) -> JSONResponse:
    """Buy one: two who want the same share take turns, whichever workers they ask."""
    symbol, fence = request.path_params["symbol"], request.state["lock"].fencing_token
    owned = await asyncio.to_thread(board.owned, symbol)
    if owned is None:
        raise HTTPException(404, "no such share")
    await asyncio.sleep(0.05)  # the broker
    if not await asyncio.to_thread(board.own, symbol, owned + 1, fence):
        raise HTTPException(503, "somebody bought under a newer lock")
    return JSONResponse({"worker": os.getpid(), "owned": owned + 1})


app = Starlette(
    routes=[
        Route("/", page),
        Route("/events", events),
        Route("/refresh", refresh, methods=["POST"]),
        Route("/shares/{symbol}/buy", buy, methods=["POST"]),
    ],
    lifespan=lifespan(micro, mine, lead={leader: feed}),
    middleware=[Middleware(CoordinationMiddleware, micro=micro)],
    exception_handlers=exception_handlers(),
)
