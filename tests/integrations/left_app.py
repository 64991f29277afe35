"""An application for a real server whose clients go away; the environment names its store and its middleware."""

import asyncio
import os
from typing import Annotated, Any

from fastapi import Body, FastAPI, WebSocket
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LockHandle
from grelmicro.task import Tasks
from grelmicro_fastapi import LockDep, install
from grelmicro_starlette import locked
from tests.integrations.asgi import CancelWhenLeft

tasks = Tasks()
micro = Grelmicro(uses=[Coordination.from_url(os.environ["STORE"]), tasks])
leader = micro.coordination.leaderelection("duty")
tasks.add_task(leader)

seen: list[str] = []
let_go = asyncio.Event()


@locked("cart:{cart_id}", timeout=60)
async def buy(request: Request) -> Response:
    seen.append("served")
    return PlainTextResponse(b"bought " + await request.body())


async def work() -> None:
    """What takes as long as a test wants."""
    seen.append("began")
    try:
        await let_go.wait()
        seen.append("ended")
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


@locked("cart:{cart_id}", timeout=60)
async def pay(request: Request) -> Response:
    await work()
    return PlainTextResponse("paid")


@locked("room:{room}", timeout=60, lease_duration=2)
async def chat(websocket: WebSocket) -> None:
    """Reads, and so ends when its client leaves or the server stops."""
    await websocket.accept()
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        await websocket.send_text("still here")


@locked("room:{room}", timeout=60, lease_duration=2)
async def deaf(websocket: WebSocket) -> None:
    """Does not read."""
    await websocket.accept()
    await asyncio.Event().wait()


app = FastAPI()
app.router.routes += [
    Route("/starlette/{cart_id}/buy", buy, methods=["POST"]),
    Route("/starlette/{cart_id}/pay", pay, methods=["POST"]),
    WebSocketRoute("/chat/{room}", chat),
    WebSocketRoute("/deaf/{room}", deaf),
]
install(app, micro)


@app.post("/fastapi/{cart_id}/buy")
async def buy_item(
    cart_id: int, item: Annotated[Any, Body()], held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=60)]
) -> str:
    seen.append("served")
    return f"bought {item}"


@app.post("/fastapi/{cart_id}/pay")
async def pay_cart(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=60)]) -> str:
    await work()
    return "paid"


@app.websocket("/follow/{room}")
async def follow(
    websocket: WebSocket, room: str, held: Annotated[LockHandle, LockDep("room:{room}", timeout=60)]
) -> None:
    await websocket.accept()
    await websocket.receive()


@app.get("/state")
async def state(finish: bool = False, forget: bool = False) -> dict[str, Any]:
    """What the test wants to know, and to have done."""
    if finish:
        let_go.set()
    if forget:
        seen.clear()
        let_go.clear()
    lines = micro.coordination.lock_backend.queues.lines
    return {
        "leads": leader.is_leader(),
        "waiting": sum(len(line.places) for line in lines.values()),
        "seen": seen,
        "tasks": sorted(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()),
    }


match os.environ.get("MIDDLEWARE"):
    case "base":
        app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    case "cancel":
        app.add_middleware(CancelWhenLeft)
