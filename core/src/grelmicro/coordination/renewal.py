"""Keeping leases alive: one renewer for all leases of a backend, those of similar duration in one call at a time."""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from math import frexp, inf
from typing import Protocol

from grelmicro.clock import DRIFT, Clock, TimeLimit, Timer
from grelmicro.coordination.identity import Owner
from grelmicro.coordination.losses import TAKEN
from grelmicro.leases import Lease, PartlyRenewedError
from grelmicro.leases.outage import Outage
from grelmicro.lifecycle import distinguish_cancellation, end_or_leave

logger = logging.getLogger("grelmicro.coordination")

OUTAGE_INTERVAL = 30.0
"""Seconds between two lines of the log about renewals that go on failing."""


SOURCE = "renewing leases"
"""What notices an outage here, for the log."""


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

    @property
    def expires_in(self) -> float:
        """Seconds for which it is surely held."""

    @property
    def deserted(self) -> bool:
        """Whether the event loop of its holder is closed, where nothing can go on under it any more."""

    @property
    def outlasts_its_owner(self) -> bool:
        """Whether it is held until its owner ends a block, however long that waits."""

    def close(self) -> None:
        """Its backend closes: it is no longer held. Without a block that goes on under it, it is given back."""


RenewMany = Callable[[Sequence[tuple[Lease, float]]], Awaitable[list[Lease]]]

WhyLost = Callable[[Lease, float], Awaitable[str]]


async def _unexplained(lease: Lease, deadline: float) -> str:
    return TAKEN


class Renewer:
    """Renews leases at a third of their duration until they are given up, lost, or dropped.

    It refers to them weakly: a lease that nobody refers to is not renewed, and ends by itself.

    Leases are renewed together with those of similar duration: a long one has the time to wait for a slow answer, which
    the renewal of a short one must be cut off from.
    """

    def __init__(
        self,
        clock: Clock,
        renew_many: RenewMany,
        outage: Outage | None = None,
        why_lost: WhyLost = _unexplained,
    ) -> None:
        self._clock = clock
        self._renew_many = renew_many
        self._why_lost = why_lost
        self._held: dict[int, weakref.ref[Renewable]] = {}
        self._unrenewed: set[weakref.ref[Renewable]] = set()
        self._outage = outage or Outage("a store", logger)
        # One timer for all leases. It stays when they are given up: most are long before it fires, and it serves the
        # next one as well.
        self._timer: Timer | None = None
        self._look_at = inf  # when it fires
        self._shortest = inf  # duration of a lease that it is there for
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
        self._shortest = min(self._shortest, held.duration)
        self._look_no_later_than(min(held.renew_at, held.deadline))

    def keep(self, held: Renewable) -> None:
        """Do not renew `held`, but know of it for as long as it is referenced."""
        self._unrenewed.add(weakref.ref(held, self._unrenewed.discard))

    def find(self, name: str, owner: Owner) -> Renewable | None:
        """What `owner` holds of `name`."""
        for held in self._known():
            if held.owner is owner and held.lease.name == name and held.expires_in > 0:
                return held
        return None

    def discard(self, held: Renewable) -> None:
        """Stop renewing `held`."""
        self._held.pop(id(held), None)
        if not self._held and self._clock.now() < self._look_at:
            self._shortest = inf

    def renew_now(self, name: str) -> None:
        """Renew the leases of one name at once: it was taken away, and their holders should know."""
        for held in self._alive():
            if held.lease.name == name:
                held.renew_at = self._clock.now()
        self._look_after()

    def let_go(self) -> None:
        """End what is still held, as `Renewable.close` says; the task that closes calls it, and is never cancelled."""
        for held in self._known():
            self.discard(held)
            held.close()

    async def close(self) -> None:
        """Stop; see `let_go` for what is still held."""
        self.let_go()
        if self._timer is not None:
            self._timer.cancel()
        await end_or_leave(self._calls.values())
        self._forget()

    def abandon(self) -> None:
        """Forget everything of an event loop that is gone."""
        for held in self._alive():
            held.abandon()
        self._held.clear()
        self._forget()

    def _forget(self) -> None:
        self._outage.leave(SOURCE)
        self._timer, self._look_at, self._shortest, self._calls = None, inf, inf, {}

    def _alive(self) -> list[Renewable]:
        return [held for ref in list(self._held.values()) if (held := ref()) is not None]

    def _known(self) -> list[Renewable]:
        """Those that are renewed, and those that are not."""
        return [*self._alive(), *(held for ref in list(self._unrenewed) if (held := ref()) is not None)]

    def _look_no_later_than(self, when: float) -> None:
        if when >= self._look_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = when
        # In a context of its own: it outlives the request that began it.
        self._timer = Context().run(self._clock.call_later, max(when - self._clock.now(), 0.0), self._look)

    def _look(self) -> None:
        """It is time to look after leases."""
        late = self._clock.now() - self._look_at
        if late > max(self._shortest / 6, 0.1):
            logger.warning("the event loop was blocked: leases are looked after %.2f s late", late)
        self._timer, self._look_at = None, inf
        self._look_after()

    def _look_after(self) -> None:
        """Lose and renew what is due, and see to it that this is called again in time."""
        self._orphan()
        now = self._clock.now()
        due: list[Renewable] = []
        wake_at = self._shortest = inf
        for held in self._alive():
            if now >= held.deadline:
                self.discard(held)
                limited = held.ttl(now) <= held.duration * DRIFT
                held.lose("it was held for max_hold" if limited else "it was not renewed in time")
                continue
            if now >= held.renew_at:
                due.append(held)
            self._shortest = min(self._shortest, held.duration)
            wake_at = min(wake_at, held.deadline if now >= held.renew_at else min(held.renew_at, held.deadline))
        if not self._held:
            self._outage.leave(SOURCE)
        self._begin(due)
        self._look_no_later_than(wake_at)

    def _orphan(self) -> None:
        """Nobody may have what a task or thread left held that ended; then it is gone when this returns."""
        for held in self._alive():
            if held.owner.done() or held.deserted:
                held.orphan()

    def _begin(self, due: list[Renewable]) -> None:
        """Begin a call for those that are due and for whose duration none is under way."""
        batches: dict[int, list[Renewable]] = {}
        for held in due:
            batches.setdefault(frexp(held.duration)[1], []).append(held)  # within a factor of two
        for kind, batch in batches.items():
            if (call := self._calls.get(kind)) is None or call.done():
                title = f"renewing {len(batch)} leases, such as {batch[0].lease.name},"
                call = asyncio.get_running_loop().create_task(self._renew(batch), name=title, context=Context())
                call.add_done_callback(self._called)
                self._calls[kind] = call

    def _called(self, call: "asyncio.Task[None]") -> None:
        """What a call renewed, or could not renew, is due at another time now."""
        if not call.cancelled():
            self._look_after()

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
            with distinguish_cancellation():
                async with TimeLimit(self._clock, min(held.duration for held, _ in asked) / 3):
                    survivors = await self._renew_many([(held.lease, ttl) for held, ttl in asked])
            self._outage.over(self._clock.now(), SOURCE)
            unknown: set[str] = set()
        except PartlyRenewedError as error:
            self._outage.note(error.__cause__ or error, self._clock.now(), OUTAGE_INTERVAL, SOURCE)
            survivors, unknown = error.survivors, {lease.holder for lease in error.failed}
        except Exception as error:
            self._outage.note(error, self._clock.now(), OUTAGE_INTERVAL, SOURCE)
            return
        by_holder = {lease.holder: lease for lease in survivors}
        gone = []
        for held, ttl in asked:
            if (lease := by_holder.get(held.lease.holder)) is not None:
                held.confirm(lease, sent_at, ttl)
            elif held.lease.holder not in unknown and id(held) in self._held:  # not released meanwhile
                self.discard(held)
                gone.append(self._lose(held))
        await asyncio.gather(*gone)

    async def _lose(self, held: Renewable) -> None:
        """The store does not know a lease any more, which is not valid from now on; its holder learns why."""
        deadline, held.deadline = held.deadline, min(held.deadline, self._clock.now())
        reason = TAKEN
        try:
            reason = await self._why_lost(held.lease, deadline)
        finally:  # also when that is cut short by closing
            held.lose(reason)
