"""One run: workers, chaos, and after it the calm in which everything must be free again."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torture.chaos import Chaos
from torture.crowd import PATIENCE, Crowd
from torture.log import Log, now
from torture.stores import store_of

Tell = Callable[[float, Path], None]
"""Told now and then for how long it has been going on, and where the log is."""

CONTROLLER = "controller"

TELL_EVERY = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    store: str
    """`sqlite`, `redis`, `redis-forgetful`, `postgres`, `kubernetes`, or the URL of a store."""
    seconds: float
    processes: int
    seed: int
    folder: Path
    """Where all files of the run are; the log is `log` in it, and what the workers print is `said`."""

    @property
    def title(self) -> str:
        """The store's name; of a URL only the scheme, since the rest may hold a password."""
        return self.store.partition("://")[0]

    @property
    def log(self) -> Path:
        """The log."""
        return self.folder / "log"


async def run(plan: Plan, tell: Tell) -> None:
    """Run it, and leave the log.

    Raises:
        LookupError: there is no such store here.
    """
    log = Log(plan.log, CONTROLLER)
    try:
        async with store_of(plan.store, plan.folder, plan.processes) as store:
            log.write("run", store=plan.title, seconds=plan.seconds, seed=plan.seed)
            crowd = Crowd(log, plan.folder, store.url, plan.seed, plan.processes)
            chaos = Chaos(log, crowd, store, plan.seed)
            telling = asyncio.create_task(_tell(plan, log, tell))
            try:
                await _live_through(crowd, chaos, plan.seconds)
                await crowd.take_all()
            finally:
                telling.cancel()
        log.write("over")
    finally:
        log.close()


async def _live_through(crowd: Crowd, chaos: Chaos, seconds: float) -> None:
    living = asyncio.create_task(crowd.live())
    try:
        await chaos.reign(seconds)
        crowd.end()
        await asyncio.wait({living}, timeout=PATIENCE)
    finally:
        crowd.kill()
        await living


async def _tell(plan: Plan, log: Log, tell: Tell) -> None:
    began = now()
    while True:
        log.write("clock", wall=time.time() - now())
        tell(now() - began, plan.log)
        await asyncio.sleep(TELL_EVERY)
