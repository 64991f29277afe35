"""What the workers write to: it is outside the store, and refuses a fence lower than the highest that it accepted."""

import asyncio
import fcntl
import os
from pathlib import Path

from torture.log import Log, now

PATIENCE = 5.0
"""Seconds for which a writer waits for its turn: another one may have been stopped in the middle of its own."""

PAUSE = 0.003
"""Seconds between two looks at whether it is one's turn. The event loop never blocks."""

SIZE = 8


class Resource:
    """One file for each name, to which each accepted fence is appended: so a write and its acceptance are one step.

    Args:
        folder: where the files are.
        log: where each decision is told.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        self._folder = folder
        self._log = log

    async def write(self, name: str, fence: int, claim: str) -> None:
        """Write under `fence`, if it is not too low; nobody else decides in the meantime."""
        file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            until = now() + PATIENCE
            while not _locked(file):
                if now() > until:
                    return
                await asyncio.sleep(PAUSE)
            self._decide(file, name, fence, claim)
        finally:
            os.close(file)

    def _decide(self, file: int, name: str, fence: int, claim: str) -> None:
        at = now()
        count = os.fstat(file).st_size // SIZE
        highest = int.from_bytes(os.pread(file, SIZE, (count - 1) * SIZE)) if count else 0
        accepted = self.accepts(fence, highest)
        if accepted:
            os.write(file, fence.to_bytes(SIZE))
        self._log.write("write", at, id=claim, name=name, fence=fence, accepted=accepted, number=count, highest=highest)

    def accepts(self, fence: int, highest: int) -> bool:
        """Whether a write under `fence` is accepted."""
        return fence >= highest


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
