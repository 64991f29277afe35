"""What a worker holds, and the watch that is kept over it: everything that the checker needs is written down here."""

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Literal, NamedTuple, Protocol

from grelmicro.coordination import CoordinationError
from grelmicro.leases import Lease
from torture.log import Log, now

BEATS = 3
"""How often the event loop is seen to run after the end of a lease."""

BEAT, CYCLES = 0.002, 25
"""A beat: so many seconds, and then so many rounds of the event loop, each of which runs all that is due."""

READ_EVERY = (0.2, 0.6)
"""Seconds between two looks into the store, at least and at most."""


class State(NamedTuple):
    """What the product says of a lease at one moment."""

    valid: bool
    left: float
    """Seconds until the local deadline; 0.0 when it is over."""
    fence: int


class Held(Protocol):
    """A lock's handle or a leader's term."""

    def state(self) -> State:
        """What the product says now."""

    async def wait_lost(self) -> None:
        """Wait for the product's signal that it is over."""

    async def read(self) -> Lease | None:
        """The store's record."""


class Holding:
    """One lease from its grant to its end, with three observers beside the work that it guards.

    One waits for the signal of a loss; one sleeps until the local deadline, and after it proves that the event loop
    runs; one looks into the store now and then.

    Args:
        log: where all is told.
        claim: its number.
        held: what is observed.
        fence: its fence.
    """

    def __init__(self, log: Log, claim: str, held: Held, fence: int) -> None:
        self.claim = claim
        self.fence = fence
        self._log = log
        self._held = held
        self._given_up = False
        self._watch: list[asyncio.Task[None]] = []

    def granted(self, name: str, *, asked: float, lease: float, margin: float, guarded: bool) -> None:
        """Tell that it was granted just now.

        `asked` is when it was not yet asked for, `lease` its duration, `margin` the seconds between the local deadline
        and the earliest moment at which the store may give it to another; with `guarded`, a loss cancels the work.
        """
        self._log.write(
            "grant",
            id=self.claim,
            name=name,
            fence=self.fence,
            asked=asked,
            lease=lease,
            margin=margin,
            guarded=guarded,
        )

    def observe(self, group: asyncio.TaskGroup, chance: Random) -> None:
        """Begin to observe it, in tasks of `group`."""
        observers: list[Coroutine[object, object, None]] = [
            self._await_signal(),
            self._await_deadline(),
            self._read_now_and_then(chance),
        ]
        self._watch = [group.create_task(observer) for observer in observers]

    def look(self) -> bool:
        """Whether the product says that it is held: what the work asks before each step."""
        before = now()
        state = self._held.state()
        after = now()
        self._log.write(
            "look", before, id=self.claim, until=after, valid=state.valid, left=state.left, fence=state.fence
        )
        return state.valid

    def give_up(self) -> None:
        """Tell that its end begins now: no claim to it is made any more."""
        if not self._given_up:
            self._given_up = True
            self._log.write("release", id=self.claim)
        for observer in self._watch:
            observer.cancel()

    def stopped(self, via: Literal["cancelled", "looked"]) -> None:
        """Tell that the work has ended: it was cancelled by the loss, or it looked and ended by itself."""
        if not self._given_up:
            self._log.write("lost", id=self.claim, via=via)

    async def aftermath(self) -> None:
        """Wait until the observers have seen the end of a loss."""
        await asyncio.wait(self._watch, timeout=2.0)
        for observer in self._watch:
            observer.cancel()
        await asyncio.wait(self._watch)

    async def _await_signal(self) -> None:
        await self._held.wait_lost()
        self._log.write("lost", id=self.claim, via="signal")

    async def _await_deadline(self) -> None:
        while (left := self._held.state().left) > 0:
            await asyncio.sleep(left)
        self.look()
        for _ in range(BEATS):
            began = now()
            await asyncio.sleep(BEAT)
            for _ in range(CYCLES):
                await asyncio.sleep(0)
            self._log.write("beat", began, id=self.claim, until=now())

    async def _read_now_and_then(self, chance: Random) -> None:
        while self._held.state().valid:
            await asyncio.sleep(chance.uniform(*READ_EVERY))
            await self._read()

    async def _read(self) -> None:
        before = now()
        try:
            record = await self._held.read()
        except CoordinationError:
            return
        after = now()
        live = record is not None and record.live
        self._log.write(
            "read",
            before,
            id=self.claim,
            until=after,
            live=live,
            fence=record.fence if record is not None else 0,
            left=record.remaining if record is not None else 0.0,
        )
