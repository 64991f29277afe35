"""A function that runs every so many seconds: on each worker, on one at a time, or on the leader."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from math import ceil, inf
from random import random

from grelmicro.clock import SYSTEM_CLOCK, Clock, sleep, working
from grelmicro.config import SHORTEST_INTERVAL, check_seconds
from grelmicro.coordination import LeaderElection, TaskLock
from grelmicro.coordination.taskruns import FireOutcome, TaskRun
from grelmicro.errors import WouldBlockError
from grelmicro.events import emit
from grelmicro.task import body
from grelmicro.task.body import Function
from grelmicro.task.job import Job
from grelmicro.task.task import Fire, no_outcomes

logger = logging.getLogger("grelmicro.task")

TOLERANCE = 0.1
"""The share of the interval for which a refused tick waits, and up to which a late one counts as on time."""

STAND_BY = 0.05
"""The share of the interval for which a worker lets the one go first that ran the last time."""

LONGEST_STAND_BY = 5.0
"""Seconds for which it does so at most."""

MISSED_INTERVAL = 600.0
"""Seconds between two log lines about missed fires: on a busy machine there may be some all the time."""

SHORTEST_OVERDUE = 15.0
"""Seconds by which a task is late at least that is called overdue."""

RAN = (FireOutcome.SUCCESS, FireOutcome.ERROR, FireOutcome.LOST)
"""The outcomes of fires in which the function ran."""


def check_interval(setting: str, seconds: object) -> float:
    """`seconds`, if it is a number of them, or a timedelta, that something can be repeated at.

    Raises:
        SettingsValidationError: it is not.
    """
    return check_seconds(setting, seconds, least=SHORTEST_INTERVAL)


class IntervalTask:
    """Runs a function every `seconds`, on a grid of due times that does not drift.

    It fires at the start, then at each due time. A due time that passes while the function runs, or while the process
    stands still, is missed and never made up. Workers that share a lock share the grid of the one that runs, and when
    that one is gone another goes on with it.

    Args:
        name: unique among the tasks of all workers that share a store.
        function: takes no arguments. A plain function runs in a thread.
        seconds: the interval, in seconds or as a timedelta; at least a millisecond.
        lock: held while it runs and, by its minimum hold, until the next due time: one run per interval over all.
        leader: only the worker that leads runs it.

    Raises:
        SettingsValidationError: the interval breaks its rule.
    """

    clock: Clock = SYSTEM_CLOCK
    log_level: int = logging.INFO
    """The level of the log line about each fire in which the function ran."""

    def __init__(
        self,
        name: str,
        function: Function,
        seconds: float | timedelta,
        *,
        lock: TaskLock | None = None,
        leader: LeaderElection | None = None,
    ) -> None:
        self._job = Job(name, function, lock, leader)
        self._seconds = check_interval("IntervalTask seconds", seconds)
        self._due: float | None = None
        self._expected: float | None = None  # when it fires next at the latest, if nothing keeps it from that
        self._theirs: float | None = None  # when it is due next by the grid of another worker, which ran
        self._ran = False  # at the last due time
        self._untold = 0  # fires that were missed since that was last told
        self._tell_missed_at = -inf
        self.last_fire: Fire | None = None
        self.outcomes: dict[str, int] = no_outcomes()

    @property
    def name(self) -> str:
        """Its name."""
        return self._job.name

    @property
    def seconds(self) -> float:
        """The interval."""
        return self._seconds

    @property
    def function(self) -> Function:
        """What it runs."""
        return self._job.function

    @property
    def lock(self) -> TaskLock | None:
        """What is held while it runs."""
        return self._job.lock

    @property
    def leader(self) -> LeaderElection | None:
        """The election whose leader alone runs it."""
        return self._job.leader

    @property
    def next_fire_time(self) -> datetime | None:
        """When it fires next; None when it is not running."""
        if self._due is None:
            return None
        return datetime.fromtimestamp(self.clock.wall(), UTC) + timedelta(seconds=self._due - self.clock.now())

    @property
    def overdue_for(self) -> float:
        """Seconds since this worker should have fired; 0.0 when it is not overdue.

        A task is overdue when two due times have passed, at least 15 s apart, and it has not fired: its function does
        not end, or the task has ended with an error. A fire that is another worker's turn is no reason.
        """
        late = 0.0 if self._expected is None else self.clock.now() - self._expected
        return late if late > max(self._seconds, SHORTEST_OVERDUE) else 0.0

    async def last_run(self) -> TaskRun | None:
        """The last run on any worker, as the store knows it; without a lock and a leader, that on this worker.

        Raises:
            OutOfContextError: no app serves this code.
            CoordinationBackendError: the store failed.
        """
        return await self._job.last_run()

    @property
    def in_function(self) -> bool:
        """Whether its function runs, which may be in a thread that nothing can stop."""
        return self._job.in_function

    async def run_now(self) -> Fire:
        """Run the function now, on this worker, also before it is due; the next due time stays.

        A run that goes on elsewhere still excludes this one, and so does the leadership of another worker: then the
        outcome is `skipped`. A run under a lock keeps the others away from now on for its interval.
        """
        self._job.clock = self.clock
        lock = None if self.lock is None else self.lock.past_hold()
        return await self._fire(self.clock.now(), partial(self._run_once, lock))

    async def __call__(self, *, ready: asyncio.Future[None] | None = None, stop: asyncio.Event | None = None) -> None:
        """Fire until `stop` is set; a fire that runs then is finished first."""
        stop = stop or asyncio.Event()
        if ready is not None and not ready.done():
            ready.set_result(None)
        self._job.clock = self.clock
        self._due, self._theirs, self._ran = self.clock.now(), None, False
        try:
            while not stop.is_set():
                self._expected = self._due + self._seconds
                await self._fire(self._due, partial(self._attempt, self._due, stop))
                self._due = await self._wait(self._due, stop)
            self._expected = None
        except asyncio.CancelledError:
            self._expected = None
            raise
        finally:
            self._due = None

    async def _wait(self, due: float, stop: asyncio.Event) -> float:
        """Wait for the due time after `due`, or until stopped; a worker that starts to lead meanwhile fires at once."""
        theirs, self._theirs = self._theirs, None
        due, pause = due + self._seconds, 0.0
        if theirs is not None:
            due, pause = theirs, min(self._seconds * STAND_BY, LONGEST_STAND_BY) * (0.5 + random() / 2)
        while not stop.is_set():
            self._due = self._expected = due = self._after_missed(due)
            left = due + pause - self.clock.now()
            if left <= 0:
                await asyncio.sleep(0)  # a function that never waits itself must not be all that runs
                break
            if await self._sleep(left, stop):
                return self.clock.now()
        return due

    async def _sleep(self, seconds: float, stop: asyncio.Event) -> bool:
        """Sleep, or until stopped or until this worker begins to lead; whether it did."""
        waiting: list[Coroutine[object, object, object]] = [stop.wait(), sleep(self.clock, seconds)]
        leader = self.leader
        if leader is None or leader.is_leader():
            await body.first(waiting)
            return False
        await body.first([*waiting, leader.wait_for_leader()])
        return leader.is_leader()

    def _after_missed(self, due: float) -> float:
        """`due`, or the first due time after it that is not past; those before that are missed."""
        missed = ceil((self.clock.now() - due) / self._seconds - TOLERANCE)
        if missed <= 0:
            return due
        self._count(Fire(self._wall(), FireOutcome.MISSED, 0.0), missed)
        self._untold += missed
        now = self.clock.now()
        if now >= self._tell_missed_at:
            logger.warning(
                "task %s missed %d fires: it ran, or this process stood still, for too long", self.name, self._untold
            )
            self._untold, self._tell_missed_at = 0, now + MISSED_INTERVAL
        return due + missed * self._seconds

    async def _fire(self, due: float, attempt: Callable[[], Awaitable[FireOutcome]]) -> Fire:
        """Make an attempt that is due at `due`; count it and tell how it ended."""
        started, started_at = self.clock.now(), self._wall()
        outcome = FireOutcome.ERROR  # also when it is cut off by the end of a shutdown's patience
        try:
            with working(self.clock):
                outcome = await attempt()
        finally:
            began = started if self._job.began_at is None else self._job.began_at
            fire = Fire(started_at, outcome, self.clock.now() - started, max(began - due, 0.0))
            self._count(fire)
            level = self.log_level if outcome in RAN else logging.DEBUG
            logger.log(level, "task %s: %s in %.3f s, %.3f s late", self.name, outcome, fire.duration, fire.lateness)
        return fire

    def _count(self, fire: Fire, fires: int = 1) -> None:
        self.outcomes[fire.outcome] += fires
        self.last_fire = fire
        emit("fired", self.name, fire.duration, fire.outcome.value, fires)

    def _wall(self) -> datetime:
        return datetime.fromtimestamp(self.clock.wall(), UTC)

    async def _run_once(self, lock: TaskLock | None) -> FireOutcome:
        """Run it if no other worker does."""
        try:
            return await self._job.run(lock=lock)
        except WouldBlockError:
            return FireOutcome.SKIPPED

    async def _attempt(self, due: float, stop: asyncio.Event) -> FireOutcome:
        """Run it if this is its turn, or will be soon."""
        while True:
            late = self.clock.now() - due
            try:
                # Counted from when it was due, or each run would push the next one a little further.
                outcome = await self._job.run(due, tolerance=self._seconds * TOLERANCE)
            except WouldBlockError as busy:
                left = busy.retry_after or 0.0
            else:
                self._ran = self._ran or self._job.began_at is not None
                return outcome
            if late + left > self._seconds * TOLERANCE:
                self._follow(left)
                return FireOutcome.SKIPPED
            if not self._ran:
                due = self._due = self.clock.now() + left  # another worker's hold: its grid is the one that counts
            await self._sleep(left + 0.001, stop)
            if stop.is_set():
                return FireOutcome.SKIPPED

    def _follow(self, left: float) -> None:
        """Another worker has the lock for `left` seconds: if that is the hold of an interval, it tells the grid."""
        assert self.lock is not None
        self._ran = False
        if left <= self._seconds <= self.lock.config.min_hold_duration:
            self._theirs = self.clock.now() + left
