"""A worker that stands for the role "job" at the store of a URL, and writes into a diary who leads.

    python -m tests.helpers.leader_program URL DIARY [LEASE_DURATION [SLOWNESS]]

Its work takes SLOWNESS seconds to react to a cancellation. Under a web server it is `tests.helpers.leader_program:app`,
whose settings are in the environment; a request to it takes as many seconds as its path says.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.task import Tasks
from tests.helpers.programs import Diary


class Worker:
    """An app with one election, and the work of its leader."""

    def __init__(self, url: str, diary: str, lease_duration: float = 15.0, slowness: float = 0.0) -> None:
        self.diary = Diary(Path(diary))
        self.slowness = slowness
        deadline = lease_duration * 2 / 3
        self.leader = LeaderElection(
            "job",
            lease_duration=lease_duration,
            renew_deadline=deadline,
            retry_interval=deadline / 5,
            backend_timeout=deadline / 2,
        )
        tasks = Tasks(tasks=[self.leader])
        self.micro = Grelmicro(uses=[tasks, Coordination.from_url(url)], signals=True)

    async def work(self) -> None:
        self.diary.note(f"leads {self.leader.guard().fence}")
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await asyncio.sleep(self.slowness)
            finally:
                self.diary.note("stops")

    async def run(self) -> None:
        """Lead whenever it is this worker's turn."""
        await self.leader.lead(self.work, repeat=True)

    async def main(self) -> None:
        async with self.micro:
            self.diary.note("stands")
            await self.run()


_worker: Worker | None = None

Message = MutableMapping[str, Any]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """The same as a web application."""
    if scope["type"] == "lifespan":
        await receive()
        worker = _worker or Worker(os.environ["URL"], os.environ["DIARY"])
        async with worker.micro:
            running = asyncio.create_task(worker.run())
            worker.diary.note("stands")
            await send({"type": "lifespan.startup.complete"})
            await receive()
            running.cancel()
            await asyncio.wait({running})
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"-", "more_body": True})
        await asyncio.sleep(float(scope["path"].strip("/") or "0"))
        await send({"type": "http.response.body", "body": b"."})


if os.environ.get("PRELOAD"):
    _worker = Worker(os.environ["URL"], os.environ["DIARY"])


if __name__ == "__main__":
    url, diary, *numbers = sys.argv[1:]
    asyncio.run(Worker(url, diary, *map(float, numbers)).main())
