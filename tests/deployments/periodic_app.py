"""A FastAPI application whose workers share two tasks: one runs on the leader, the other under a task lock.

URL is the store, DIARY the file in which the workers write what they run; INTERVAL and LEASE are seconds, the lease
is the leader's.
"""

import os
from pathlib import Path

from fastapi import FastAPI

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, TaskLock
from grelmicro.task import Tasks
from grelmicro_fastapi import install
from tests.helpers.programs import Diary

interval = float(os.environ["INTERVAL"])
diary = Diary(Path(os.environ["DIARY"]))
deadline = float(os.environ["LEASE"]) * 2 / 3

leader = LeaderElection(
    "job",
    lease_duration=deadline * 3 / 2,
    renew_deadline=deadline,
    retry_interval=deadline / 5,
    backend_timeout=deadline / 2,
)
tasks = Tasks(tasks=[leader])
micro = Grelmicro(uses=[Coordination.from_url(os.environ["URL"]), tasks])
app = FastAPI()
install(app, micro)

diary.note("imported")


@tasks.every(seconds=interval, leader=leader)
async def gated() -> None:
    """Runs on the leader."""
    diary.note(f"gated {leader.guard().fence}")


@tasks.every(seconds=interval, lock=TaskLock(lease_duration=2))
def locked() -> None:
    """Runs on one worker, in a thread."""
    diary.note("locked")


@tasks.every(seconds=interval)
async def everywhere() -> None:
    """Runs on each worker."""
    diary.note("everywhere")


@app.get("/who")
async def who() -> dict[str, object]:
    """Who answers."""
    return {"pid": os.getpid(), "leads": leader.is_leader()}
