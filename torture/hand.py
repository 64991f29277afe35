"""A coroutine that takes one lock after another, works under it, and gives it back, or loses it."""

import asyncio
from dataclasses import dataclass
from random import Random

from grelmicro.coordination import Coordination, CoordinationError, LockHandle, LockNotOwnedError
from grelmicro.leases import Lease
from torture.holding import Holding, State
from torture.kit import Kit
from torture.log import now

LEASES = (1.0, 3.0)
"""Seconds of a lease, at least and at most."""

NAMES = {"hot": 4, "warm-1": 2, "warm-2": 2, "cool-1": 1, "cool-2": 1, "cool-3": 1}
"""What is locked, and how often it is chosen."""

SHORT = (0.01, 0.02, 0.03, 0.05, 0.05, 0.1, 0.1, 0.2, 0.3)
"""Seconds of most holds."""

TICK = 0.02
"""Seconds between two steps of the work."""

DRIFT = 0.01
"""The share of a lease that the documentation says is given up for clocks of different rates."""


class HeldLock:
    """A lock's handle, as it is observed."""

    def __init__(self, coordination: Coordination, handle: LockHandle) -> None:
        self._coordination = coordination
        self._handle = handle

    def state(self) -> State:
        """What the handle says now."""
        return State(self._handle.valid, self._handle.expires_in, self._handle.fencing_token)

    async def wait_lost(self) -> None:
        """See `LockHandle.wait_lost`."""
        await self._handle.wait_lost()

    async def read(self) -> Lease | None:
        """The store's record."""
        return await self._coordination.lock_backend.read(f"lock:{self._handle.name}")


@dataclass(frozen=True, slots=True)
class Job:
    """What a hand does next; seconds."""

    name: str
    lease: float
    renewed: bool
    """Renewed while it is held, in a block that a loss cancels; else kept by hand, and perhaps for too long."""
    timeout: float
    patience: float
    """After this it is cancelled while it waits."""
    hold: float

    @classmethod
    def draw(cls, chance: Random) -> "Job":
        """Draw one."""
        (name,) = chance.choices(list(NAMES), list(NAMES.values()))
        lease, renewed = chance.uniform(*LEASES), chance.random() < 0.6
        return cls(
            name=name,
            lease=lease,
            renewed=renewed,
            timeout=chance.choice([0.0, 0.5, 3.0, 10.0]),
            patience=chance.choice([0.05, 20.0, 20.0, 20.0]),
            # Short holds hand much over; long ones are renewed, or see their lease run out.
            hold=chance.choice([*SHORT, lease * 1.3, lease * (2.5 if renewed else 0.5)]),
        )


class Hand:
    """Takes locks until the worker is stopped.

    Args:
        kit: what it works with.
        title: what its claims are called, before their numbers.
    """

    def __init__(self, kit: Kit, title: str) -> None:
        self._kit = kit
        self._log = kit.log
        self._resource = kit.resource
        self._chance = kit.chance
        self._title = title
        self._count = 0

    async def run(self) -> None:
        """Do one job after another."""
        while not self._kit.stop.is_set():
            job = Job.draw(self._chance)
            try:
                await self._do(job)
            except (CoordinationError, TimeoutError) as error:
                self._log.write("refused", name=job.name, error=type(error).__name__)
            await asyncio.sleep(self._chance.uniform(0, 0.05))

    async def _do(self, job: Job) -> None:
        lock = self._kit.coordination.lock(job.name, lease_duration=job.lease, auto_renew=job.renewed)
        asked = now()
        async with asyncio.timeout(job.patience):
            handle = await lock.acquire(timeout=job.timeout)
        holding = self._begin(job, handle, asked)
        if job.renewed:
            await self._in_a_block(job, handle, holding)
        else:
            await self._by_hand(job, handle, holding)

    def _begin(self, job: Job, handle: LockHandle, asked: float) -> Holding:
        self._count += 1
        held = HeldLock(self._kit.coordination, handle)
        holding = Holding(self._log, f"{self._title}.{self._count}", held, handle.fencing_token)
        holding.granted(job.name, asked=asked, lease=job.lease, margin=job.lease * DRIFT, guarded=job.renewed)
        holding.look()
        holding.observe(self._kit.group, self._chance)
        return holding

    async def _in_a_block(self, job: Job, handle: LockHandle, holding: Holding) -> None:
        try:
            async with handle:
                try:
                    await self._work(job, handle, holding)
                except asyncio.CancelledError:
                    holding.stopped("cancelled")
                    raise
                if holding.look():
                    holding.give_up()
                else:
                    holding.stopped("looked")
        except LockNotOwnedError:
            await self._haunt(job, holding)
            raise

    async def _by_hand(self, job: Job, handle: LockHandle, holding: Holding) -> None:
        await self._work(job, handle, holding)
        if not holding.look():
            await self._haunt(job, holding)
        holding.give_up()
        await handle.release()

    async def _work(self, job: Job, handle: LockHandle, holding: Holding) -> None:
        """Write to the resource. Work in a block goes on until it is cancelled; other work looks before each step."""
        until = now() + job.hold
        await self._resource.write(job.name, holding.fence, holding.claim)
        while now() < until and not self._kit.stop.is_set() and (holding.look() or job.renewed):
            if self._chance.random() < 0.3:
                await self._resource.write(job.name, holding.fence, holding.claim)
            if not job.renewed and self._chance.random() < 0.01:
                await self._extend(handle)
            await asyncio.sleep(TICK)

    async def _extend(self, handle: LockHandle) -> None:
        try:
            await handle.extend()
        except CoordinationError as error:
            self._log.write("refused", name=handle.name, error=type(error).__name__)

    async def _haunt(self, job: Job, holding: Holding) -> None:
        """After a loss go on writing, as a program does that never looks: the resource alone stops it."""
        for _ in range(4):
            await self._resource.write(job.name, holding.fence, holding.claim)
            await asyncio.sleep(0.1)
        await holding.aftermath()
