"""Keeping leases alive: one renewer for all leases of a backend, those of similar duration in one call at a time."""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from math import frexp
from typing import Protocol

from grelmicro.clock import DRIFT, Clock, Signal, TimeLimit
from grelmicro.coordination.identity import Owner
from grelmicro.coordination.outage import Outage
from grelmicro.leases import Lease

logger = logging.getLogger("grelmicro.coordination")

OUTAGE_INTERVAL = 30.0
"""Seconds between two lines of the log about renewals that go on failing."""


class Renewable(Protocol):
    """A held lease, as the renewer sees it. Times are seconds on the renewer's clock."""

    lease: Lease
    deadline: float
    renew_at: float
    duration: float
    owner: Owner

    def ttl(self, now: float) -> float:
        """Seconds to renew for at `now`; 0.0 when it must not be renewed any more."""

    def ask(self, sent_at: float, ttl: float) -> None:
        """A renewal for `ttl` seconds is sent at `sent_at`."""

    def confirm(self, lease: Lease, sent_at: float, ttl: float) -> None:
        """A renewal sent at `sent_at` was granted."""

    def postpone(self, now: float) -> None:
        """A renewal failed; try again soon."""

    def lose(self, reason: str) -> None:
        """It is no longer held."""

    def orphan(self) -> None:
        """Its owner has ended: it goes on for as long as somebody else has it in hand."""

    def abandon(self) -> None:
        """It is no longer held, and its event loop is gone."""


RenewMany = Callable[[Sequence[tuple[Lease, float]]], Awaitable[list[Lease]]]


class Renewer:
    """Renews leases at a third of their duration until they are given up, lost, or dropped.

    It refers to them weakly: a lease that nobody refers to is not renewed, and ends by itself.

    Leases are renewed together with those of similar duration: a long one has the time to wait for a slow answer, which
    the renewal of a short one must be cut off from.
    """

    def __init__(self, clock: Clock, renew_many: RenewMany) -> None:
        self._clock = clock
        self._renew_many = renew_many
        self._held: dict[int, weakref.ref[Renewable]] = {}
        self._changed = Signal()
        self._outage = Outage("renewing leases", logger)
        self._loop_task: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}  # the last ones, by the duration of their leases

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Renewable) -> None:
        """Renew `held` from now on."""
        key, name = id(held), held.lease.name

        def collected(_: object) -> None:
            if self._held.pop(key, None) is not None:
                logger.warning("%s was dropped without a release: its lease is not renewed and ends by itself", name)

        self._held[key] = weakref.ref(held, collected)
        if self._loop_task is None or self._loop_task.done():
            # A context of its own: it outlives the request that began it.
            self._loop_task = asyncio.get_running_loop().create_task(
                self._run(), name="grelmicro-renewer", context=Context()
            )
        self._changed.send()

    def discard(self, held: Renewable) -> None:
        """Stop renewing `held`."""
        self._held.pop(id(held), None)
        if not self._held:
            self._changed.send()

    async def close(self) -> None:
        """Stop; what is still held is lost."""
        for held in self._alive():
            self.discard(held)
            held.lose("its backend was closed")
        tasks = {task for task in (*self._calls.values(), self._loop_task) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._calls, self._loop_task = {}, None

    def abandon(self) -> None:
        """Forget everything of an event loop that is gone."""
        for held in self._alive():
            held.abandon()
        self._held.clear()
        self._changed = Signal()
        self._calls, self._loop_task = {}, None

    def _alive(self) -> list[Renewable]:
        return [held for ref in list(self._held.values()) if (held := ref()) is not None]

    async def _run(self) -> None:
        while self._held:
            wake_at = self._look_after()
            if wake_at is None:
                return
            late = await self._sleep_until(wake_at)
            if late > 0:
                logger.warning("the event loop was blocked: leases are looked after %.2f s late", late)

    def _look_after(self) -> float | None:
        """Lose and renew what is due; when to look again."""
        self._orphan()
        now = self._clock.now()
        due: list[Renewable] = []
        wake_at: float | None = None
        for held in self._alive():
            if now >= held.deadline:
                self.discard(held)
                limited = held.ttl(now) <= held.duration * DRIFT
                held.lose("it was held for max_hold" if limited else "it was not renewed in time")
                continue
            if now >= held.renew_at:
                due.append(held)
            wake = held.deadline if now >= held.renew_at else min(held.renew_at, held.deadline)
            wake_at = wake if wake_at is None else min(wake_at, wake)
        self._begin(due)
        return wake_at

    def _orphan(self) -> None:
        """Nobody may have what a task or thread left held that ended; then it is gone when this returns."""
        for held in self._alive():
            if held.owner.done():
                held.orphan()

    def _begin(self, due: list[Renewable]) -> None:
        """Begin a call for those that are due and for whose duration none is under way."""
        batches: dict[int, list[Renewable]] = {}
        for held in due:
            batches.setdefault(frexp(held.duration)[1], []).append(held)  # within a factor of two
        for kind, batch in batches.items():
            if (call := self._calls.get(kind)) is None or call.done():
                self._calls[kind] = asyncio.get_running_loop().create_task(self._renew(batch), name="grelmicro-renewal")

    async def _sleep_until(self, wake_at: float) -> float:
        """Sleep until then or until something changes; by how much the loop overslept, if that is worth a word."""
        slack = min((held.duration for held in self._alive()), default=0.0) / 6
        await self._changed.wait(self._clock, wake_at - self._clock.now())
        late = self._clock.now() - wake_at
        return late if slack and late > max(slack, 0.1) else 0.0

    async def _renew(self, due: list[Renewable]) -> None:
        """One call for all of `due`. Its failure changes nothing: the deadlines stand and it is tried again."""
        sent_at = self._clock.now()
        asked = [(held, ttl) for held in due if (ttl := held.ttl(sent_at)) > 0]
        for held in due:
            held.postpone(sent_at)
        if not asked:
            return
        for held, ttl in asked:
            held.ask(sent_at, ttl)
        try:
            async with TimeLimit(self._clock, min(held.duration for held, _ in asked) / 3):
                survivors = await self._renew_many([(held.lease, ttl) for held, ttl in asked])
        except Exception as error:
            self._outage.note(error, self._clock.now(), OUTAGE_INTERVAL)
        else:
            self._outage.over(self._clock.now())
            by_holder = {lease.holder: lease for lease in survivors}
            for held, ttl in asked:
                if (lease := by_holder.get(held.lease.holder)) is not None:
                    held.confirm(lease, sent_at, ttl)
                elif id(held) in self._held:  # not released meanwhile
                    self.discard(held)
                    held.lose("it expired or was taken over")
        finally:
            self._changed.send()
