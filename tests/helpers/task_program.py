"""A web application whose workers share two tasks: one runs on the leader, the other under a task lock.

Its settings are in the environment: URL is the store, DIARY is a path, INTERVAL and LEASE_DURATION are seconds. Run it
with a web server as `tests.helpers.task_program:app`.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, TaskLock
from grelmicro.task import Tasks
from tests.helpers.programs import Diary

diary = Diary(Path(os.environ["DIARY"]))
interval = float(os.environ["INTERVAL"])
lease_duration = float(os.environ["LEASE_DURATION"])
deadline = lease_duration * 2 / 3

leader = LeaderElection(
    "job",
    lease_duration=lease_duration,
    renew_deadline=deadline,
    retry_interval=deadline / 5,
    backend_timeout=deadline / 2,
)
tasks = Tasks(tasks=[leader])
micro = Grelmicro(uses=[tasks, Coordination.from_url(os.environ["URL"])], signals=True)

diary.note("imported")


@tasks.every(seconds=interval, leader=leader)
async def gated() -> None:
    """Runs on the leader."""
    diary.note(f"gated {leader.guard().fence}")


@tasks.every(seconds=interval, lock=TaskLock(lease_duration=max(2.0, interval)))
def locked() -> None:
    """Runs on one worker, in a thread."""
    diary.note("locked")


@tasks.every(seconds=interval)
async def everywhere() -> None:
    """Runs on each worker."""
    diary.note("everywhere")


Message = MutableMapping[str, Any]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Nothing but a lifespan."""
    assert scope["type"] == "lifespan"
    await receive()
    async with micro:
        await send({"type": "lifespan.startup.complete"})
        await receive()
    await send({"type": "lifespan.shutdown.complete"})
