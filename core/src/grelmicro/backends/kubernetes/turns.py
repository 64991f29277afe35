"""Who may write to an object next: within a process one after the other, among processes after pauses."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import random

ROUNDS = 50
"""How often an operation is tried that others come before each time."""

AT_ONCE = 2
"""How often it is tried at once."""

LONGEST_PAUSE = 0.05
"""Seconds between two tries, at most."""

QUEUEING = 1.0
"""Seconds for which a write of this process is waited for: each fails where another one is done."""


class Turns:
    """The writes of this process that are under way, by the names of their objects."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Event] = {}

    @contextmanager
    def take(self, name: str) -> Iterator[None]:
        """Write to an object in this block."""
        over = self._under_way[name] = asyncio.Event()
        try:
            yield
        finally:
            over.set()
            if self._under_way.get(name) is over:
                del self._under_way[name]

    def is_taken(self, name: str) -> bool:
        """Whether an object is being written to."""
        return name in self._under_way

    async def wait(self, name: str, tries: int) -> bool:
        """Wait until one may try to write to an object, after so many tries; whether nobody else writes to it."""
        if tries >= AT_ONCE:
            await asyncio.sleep(LONGEST_PAUSE * random())
        if name in self._under_way:
            with suppress(TimeoutError):
                async with asyncio.timeout(QUEUEING):
                    while (over := self._under_way.get(name)) is not None:
                        await over.wait()
        return name not in self._under_way
