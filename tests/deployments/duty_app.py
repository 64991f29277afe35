"""A FastAPI application with one duty, which one of its workers has; everything is built when it is imported.

URL is the store, DIARY the file in which the workers write who leads, LEASE the seconds of the duty's lease, and
SLOWNESS those that its work takes to end. `tests.helpers.sites` has other candidates for the same duty.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock
from grelmicro_fastapi import exception_handlers, lifespan
from tests.helpers.programs import Diary

diary = Diary(Path(os.environ["DIARY"]))
slowness = float(os.environ.get("SLOWNESS", "0"))
deadline = float(os.environ.get("LEASE", "15")) * 2 / 3

micro = Grelmicro(uses=[Coordination.from_url(os.environ["URL"])])
leader = LeaderElection(
    "job",
    lease_duration=deadline * 3 / 2,
    renew_deadline=deadline,
    retry_interval=deadline / 5,
    backend_timeout=deadline / 2,
)
lock = Lock("built before the fork")
imported_by = os.getpid()


async def duty() -> None:
    """What the leader does."""
    diary.note(f"leads {leader.guard().fence}")
    try:
        await asyncio.Event().wait()
    finally:
        try:
            await asyncio.sleep(slowness)
        finally:
            diary.note("stops")


@asynccontextmanager
async def mine(app: FastAPI) -> AsyncIterator[None]:
    diary.note("stands")
    yield
    diary.note("closes")


app = FastAPI(lifespan=lifespan(micro, mine, lead={leader: duty}), exception_handlers=exception_handlers())


@app.get("/who")
async def who() -> dict[str, object]:
    """Who answers, and what it takes itself for."""
    record = leader.record
    async with lock as held:
        return {
            "pid": os.getpid(),
            "imported by": imported_by,
            "leads": leader.is_leader(),
            "leader": record and record.holder,
            "candidate": leader.worker,
            "token": held.token,
        }


@app.get("/stream")
async def stream() -> StreamingResponse:
    """Tells who answers, and never ends by itself."""

    async def body() -> AsyncIterator[str]:
        yield f"{os.getpid()}\n"
        while True:
            await asyncio.sleep(0.05)
            yield ".\n"

    return StreamingResponse(body())


@app.websocket("/idle")
async def idle(websocket: WebSocket, pid: int, lock: str | None = None) -> None:
    """Waits for a message, while it holds a lock if it is told to; on the worker of one process."""
    await websocket.accept()
    if pid == os.getpid():
        async with Lock(lock, auto_renew=True, lease_duration=2) if lock else nullcontext():
            await websocket.send_json(pid)
            await websocket.receive_text()


@app.websocket("/deaf")
async def deaf(websocket: WebSocket, pid: int, lock: str) -> None:
    """Holds a lock, and listens to nobody."""
    await websocket.accept()
    if pid == os.getpid():
        async with Lock(lock, auto_renew=True, lease_duration=2):
            await websocket.send_json(pid)
            await asyncio.Event().wait()
