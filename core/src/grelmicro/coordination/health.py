"""`HealthCheck`: looks now and then whether the stores answer, so that whoever asks gets an answer at once."""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, Protocol

from grelmicro.clock import SYSTEM_CLOCK, Clock, TimeLimit, sleep
from grelmicro.config import SHORTEST_INTERVAL, Duration, check_seconds
from grelmicro.coordination.component import Coordination
from grelmicro.coordination.leaderelection import LeaderElection
from grelmicro.coordination.provider import check
from grelmicro.coordination.wait import SAFETY_POLL
from grelmicro.errors import SettingsValidationError
from grelmicro.leases.outage import Outage, shared_outage
from grelmicro.lifecycle import Resource, distinguish_cancellation, end_or_leave, outlast

logger = logging.getLogger("grelmicro.coordination")

AGAIN = 1.0
"""Seconds after a look that failed until the next one, if the interval is longer."""

SOURCE = "the health check"
"""What notices an outage here, for the log."""

TELL_AGAIN = 30.0
"""Seconds between two log lines about a store that goes on failing."""

BEGINNING = 0.5
"""Seconds after the opening in which whoever asks waits for the first answers of the stores."""


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """What is known of the stores."""

    status: Literal["good", "failing", "stale", "unknown"]
    """`stale`: it is not known any more; `unknown`: not yet."""
    age: float | None
    """Seconds since the last look that has ended began; None: there was none."""
    error: str = ""
    """The class of the error with which that look failed."""


@dataclass(frozen=True, slots=True)
class ElectionHealth:
    """What is known of an election in this process."""

    status: Literal["good", "stale", "stopped"]
    """`stale`: the store has not answered it for too long; `stopped`: it does not take part."""
    leads: bool
    """Whether this instance leads."""
    age: float | None
    """Seconds since the last request was sent that the store answered; None: there was none."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """What a `HealthCheck` knows. It names no holder, and nothing of where the stores are."""

    store: StoreHealth
    elections: Mapping[str, ElectionHealth]
    overdue: Mapping[str, float] = field(default_factory=dict)
    """The tasks that this process should have fired, and for how many seconds."""

    @property
    def good(self) -> bool:
        """Whether all is good; a worker that does not lead is."""
        elections = all(each.status == "good" for each in self.elections.values())
        return self.store.status == "good" and elections and not self.overdue


class Punctual(Protocol):
    """What knows which tasks are overdue: `Tasks`."""

    def overdue(self) -> Mapping[str, float]:
        """The tasks that this process should have fired, and for how many seconds."""


class HealthCheck(Resource):
    """Looks at the stores of `coordination` while it is open; add it to an app with `Grelmicro.use`.

    Args:
        coordination: whose stores; a look is `Coordination.check`, and is given up after `interval`.
        leaders: elections that this process has to take part in.
        tasks: `Tasks` of which none may be overdue in this process.
        interval: seconds between two looks, a millisecond at least; after one that failed, at most one second.
        stale_after: seconds after which the last look counts no more; None: three times `interval`, the least that
            leaves time for a slow answer. An election counts no more after that, or later, by its own settings.
        clock: the time of looks; tests move it.

    Raises:
        SettingsValidationError: a setting breaks a rule.
    """

    kind = "health"

    def __init__(
        self,
        coordination: Coordination,
        *,
        leaders: Iterable[LeaderElection] = (),
        tasks: Punctual | None = None,
        interval: Duration = 5.0,
        stale_after: Duration | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.interval = check_seconds("HealthCheck interval", interval, least=SHORTEST_INTERVAL)
        longest = 3 * interval if stale_after is None else stale_after
        self.stale_after = check_seconds("HealthCheck stale_after", longest)
        if self.stale_after < 3 * self.interval:
            raise SettingsValidationError(
                "HealthCheck stale_after should be at least three times interval: a look may take an interval to "
                "end, and is as old when the next one does"
            )
        self._coordination = coordination
        self._leaders = tuple(leaders)
        self._tasks = tasks
        self._clock = clock
        self._outage = Outage(SOURCE, logger)
        self._forget()

    def _forget(self) -> None:
        self._looked_at: float | None = None
        self._error = ""
        self._looking: asyncio.Task[None] | None = None
        self._begins_until = 0.0

    async def open(self) -> None:
        """Begin to look; it waits for nothing."""
        self._forget()
        self._begins_until = monotonic() + BEGINNING
        self._looking = asyncio.create_task(self._look_on(), name="grelmicro-health")

    async def close(self) -> None:
        """Look no more."""
        for backend in self._coordination.checked():
            shared_outage(backend, self._outage).leave(SOURCE)
        if self._looking is not None:
            await outlast(asyncio.ensure_future(end_or_leave({self._looking})))
        self._forget()

    def abandon(self) -> None:
        """Forget what another process or loop saw."""
        self._forget()

    async def report(self) -> HealthReport:
        """What is known now. It waits for nothing, but for half a second after the opening."""
        while self.is_open and monotonic() < self._begins_until and not self._has_begun():
            await asyncio.sleep(0.01)
        overdue = {} if self._tasks is None else self._tasks.overdue()
        return HealthReport(
            self._store(),
            {leader.name: self._election(leader) for leader in self._leaders},
            {name: round(seconds, 3) for name, seconds in overdue.items()},
        )

    def _has_begun(self) -> bool:
        return self._looked_at is not None and all(math.isfinite(each.last_round_age()) for each in self._leaders)

    def _store(self) -> StoreHealth:
        if self._looked_at is None or not self.is_open:
            return StoreHealth("unknown", None)
        age = round(self._clock.now() - self._looked_at, 3)
        if age > self.stale_after:
            return StoreHealth("stale", age, self._error)
        return StoreHealth("failing" if self._error else "good", age, self._error)

    def _election(self, leader: LeaderElection) -> ElectionHealth:
        timing, age = leader.config, leader.last_round_age()
        # A candidate that is woken when it can lead asks no more often than that.
        limit = max(self.stale_after, max(SAFETY_POLL, 2 * timing.retry_interval) + timing.backend_timeout)
        status: Literal["good", "stale", "stopped"] = "good" if age <= limit else "stale"
        if not leader.is_running():
            status = "stopped"
        return ElectionHealth(status, leader.is_leader(), round(age, 3) if math.isfinite(age) else None)

    async def _look_on(self) -> None:
        me = asyncio.current_task()
        while True:
            began = self._clock.now()
            failure = await self._look_at_stores(began + self.interval)
            if self._looking is not me:  # closed meanwhile, and the cancellation went unheard
                return
            self._note(began, failure)
            await sleep(self._clock, min(self.interval, AGAIN) if failure else self.interval)

    async def _look_at_stores(self, until: float) -> Exception | None:
        """Ask each store; what went wrong with the first that failed."""
        me = asyncio.current_task()
        for backend in self._coordination.checked():
            outage = shared_outage(backend, self._outage)
            try:
                with distinguish_cancellation():
                    async with TimeLimit(self._clock, until - self._clock.now()):
                        await check(backend)
            except Exception as error:
                if self._looking is me:
                    outage.note(error, backend.clock.now(), TELL_AGAIN, SOURCE)
                return error
            outage.over(backend.clock.now(), SOURCE)
        return None

    def _note(self, began: float, failure: Exception | None) -> None:
        self._looked_at = began
        self._error = "" if failure is None else type(failure).__name__
