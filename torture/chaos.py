"""What happens to the workers and to their store, drawn from a seed."""

import asyncio
import signal
from random import Random

from torture.crowd import Crowd, Slot
from torture.log import Log, now
from torture.stores import Source, Store, a_while

EVERY = 6.0
"""Seconds between two troubles of one worker, on average."""

KILLS = 0.25
"""The share of kills among them; the others are pauses."""


class Chaos:
    """Sources of trouble that know nothing of each other: one for the workers, and those of the store."""

    def __init__(self, log: Log, crowd: Crowd, store: Store, seed: int) -> None:
        self._log = log
        self._crowd = crowd
        self._sources = store.sources(log, Random(f"{seed} troubles"))
        self._seed = seed

    async def reign(self, seconds: float) -> None:
        """Make trouble for so long; what has begun then goes on to its end."""
        until = now() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._torment_workers(group, until))
            for number, source in enumerate(self._sources):
                group.create_task(self._torment_store(source, Random(f"{self._seed} source {number}"), until))

    async def _torment_workers(self, group: asyncio.TaskGroup, until: float) -> None:
        chance = Random(f"{self._seed} workers")
        while await _later(chance.expovariate(len(self._crowd.slots) / EVERY), until):
            slot, kill, seconds = chance.choice(self._crowd.slots), chance.random() < KILLS, a_while(chance)
            if kill:
                self._kill(slot)
            elif not slot.stopped:
                group.create_task(self._pause(slot, seconds))

    def _kill(self, slot: Slot) -> None:
        slot.killed = slot.send(signal.SIGKILL)
        if slot.killed:
            self._log.write("kill", worker=slot.who)

    async def _pause(self, slot: Slot, seconds: float) -> None:
        if not slot.send(signal.SIGSTOP):
            return
        slot.stopped = True
        self._log.write("pause", worker=slot.who, seconds=seconds)
        try:
            await asyncio.sleep(seconds)
        finally:
            slot.stopped = False
            # Were it another process by now, that would do no harm.
            slot.send(signal.SIGCONT)

    async def _torment_store(self, source: Source, chance: Random, until: float) -> None:
        while await _later(chance.uniform(*source.calm), until):
            kind = chance.choice(list(source.troubles))
            self._log.write("trouble", kind=kind)
            await source.troubles[kind]()


async def _later(seconds: float, until: float) -> bool:
    """Wait, but not beyond `until`; whether that is still ahead."""
    await asyncio.sleep(max(min(seconds, until - now()), 0.0))
    return now() < until
