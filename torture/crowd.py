"""The worker processes: each slot has one at a time, and gets a new one when that has ended."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from torture.log import Log

ROOT = Path(__file__).resolve().parents[1]

PATIENCE = 30.0
"""Seconds that workers have to end when they are asked to."""


class Slot:
    """One place for a worker."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.life = 0
        self.process: Process | None = None
        self.killed = False
        """Whether the present worker was killed here."""
        self.stopped = False

    @property
    def who(self) -> str:
        """The present worker, as the log calls it."""
        return f"{self.number}.{self.life}"

    def send(self, number: signal.Signals) -> bool:
        """Send the present worker a signal; whether there is one."""
        if self.process is None or self.process.returncode is not None:
            return False
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        return True

    def ask_to_end(self) -> None:
        """Ask the present worker to end in order."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.send(signal.SIGCONT)


class Crowd:
    """All workers.

    Args:
        log: where their lives are told.
        folder: where they keep their files.
        url: where the worker of a slot finds its store.
        seed: what decides what they do.
    """

    def __init__(self, log: Log, folder: Path, url: Callable[[int], str], seed: int, count: int) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._log = log
        self._folder = folder
        self._url = url
        self._seed = seed
        self._chance = Random(f"{seed} lives")
        self._ending = False

    async def live(self) -> None:
        """Keep a worker in each slot until `end`."""
        async with asyncio.TaskGroup() as group:
            for slot in self.slots:
                group.create_task(self._keep(slot))

    async def _keep(self, slot: Slot) -> None:
        while not self._ending:
            slot.life += 1
            slot.killed = False
            slot.process = await self._start(slot.number, slot.who)
            self._log.write("spawn", worker=slot.who)
            if self._ending:  # it was asked to end before it was there
                slot.ask_to_end()
            code = await slot.process.wait()
            self._log.write("exit", worker=slot.who, code=code, killed=slot.killed)
            if not slot.killed:  # by itself: a log full of its successors would help nobody
                return
            await asyncio.sleep(self._chance.uniform(0.0, 0.5))

    async def _start(self, number: int, who: str, *options: str) -> Process:
        arguments = [*options, self._url(number), str(self._folder), who, f"{self._seed} {who}"]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (self._folder / "said").open("ab") as said:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "torture.worker", *arguments),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=PIPE,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-C reaches the controller alone
            )

    def end(self) -> None:
        """Ask all to end in order."""
        self._ending = True
        for slot in self.slots:
            slot.ask_to_end()

    def kill(self) -> None:
        """End all that still run."""
        self._ending = True
        for slot in self.slots:
            slot.send(signal.SIGKILL)

    async def take_all(self) -> None:
        """After all the others: see that every name is free."""
        last = await self._start(0, "last", "--last")
        self._log.write("spawn", worker="last")
        try:
            code = await last.wait()
        finally:
            if last.returncode is None:
                last.kill()
        self._log.write("exit", worker="last", code=code, killed=False)
