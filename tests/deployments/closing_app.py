"""An application with a task that runs for longer than anybody waits, under a lock.

URL is the store, DIARY the file in which the workers write what the task does.
"""

import asyncio
import os
from pathlib import Path

from fastapi import FastAPI

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from grelmicro.task import Tasks
from grelmicro_fastapi import install
from tests.helpers.programs import Diary

tasks = Tasks(shutdown_timeout=600)
micro = Grelmicro(uses=[Coordination.from_url(os.environ["URL"]), tasks])
diary = Diary(Path(os.environ["DIARY"]))
app = FastAPI()
install(app, micro)


@tasks.every(seconds=0.1)
async def work() -> None:
    """Runs for ten minutes."""
    async with Lock("work", lease_duration=60):
        diary.note("began")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            diary.note("cancelled")
            raise


@app.get("/who")
async def who() -> int:
    """Who answers."""
    return os.getpid()
