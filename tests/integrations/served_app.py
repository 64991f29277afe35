"""An application for a real server; its store is named by the environment."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LockHandle
from grelmicro.task import Tasks
from grelmicro_fastapi import LockDep, install

tasks = Tasks()
micro = Grelmicro(uses=[Coordination.from_url(os.environ["STORE"]), tasks])
leader = micro.coordination.leaderelection("duty")
tasks.add_task(leader)

app = FastAPI()
install(app, micro)


@app.get("/leads")
async def leads() -> bool:
    return leader.is_leader()


@app.get("/stream")
async def stream() -> StreamingResponse:
    """Never ends by itself."""

    async def body() -> AsyncIterator[str]:
        while True:
            yield "."
            await asyncio.sleep(0.05)

    return StreamingResponse(body())


@app.get("/carts/{cart_id}")
async def show(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=20)]) -> str:
    return held.name
