"""A function that runs every so many seconds: on each worker, on one at a time, or on the leader."""

import asyncio
import logging
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from math import ceil, inf
from random import random

from grelmicro.clock import SYSTEM_CLOCK, Clock, sleep
from grelmicro.config import SHORTEST_INTERVAL, check_seconds
from grelmicro.coordination import LeaderElection, LockHandle, TaskLock
from grelmicro.coordination.outage import Outage
from grelmicro.errors import (
    GrelmicroError,
    LeadershipLostError,
    LockLostError,
    NotLeaderError,
    TaskError,
    WouldBlockError,
)
from grelmicro.events import emit
from grelmicro.lifecycle import distinguish_cancellation
from grelmicro.task import body
from grelmicro.task.body import Function
from grelmicro.task.task import OUTCOMES, Fire, Outcome

logger = logging.getLogger("grelmicro.task")

TOLERANCE = 0.1
"""The share of the interval for which a refused tick waits, and up to which a late one counts as on time."""

STAND_BY = 0.05
"""The share of the interval for which a worker lets the one go first that ran the last time."""

LONGEST_STAND_BY = 5.0
"""Seconds for which it does so at most."""

ERROR_INTERVAL = 30.0
"""Seconds between two log lines about an outage that goes on."""

MISSED_INTERVAL = 600.0
"""Seconds between two log lines about missed fires: on a busy machine there may be some all the time."""


def check_interval(setting: str, seconds: object) -> float:
    """`seconds`, if it is a number of them that something can be repeated at.

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
        seconds: the interval; at least a millisecond.
        lock: held while it runs and, by its minimum hold, until the next due time: one run per interval over all.
        leader: only the worker that leads runs it.

    Raises:
        SettingsValidationError: the interval breaks its rule.
    """

    clock: Clock = SYSTEM_CLOCK

    def __init__(
        self,
        name: str,
        function: Function,
        seconds: float,
        *,
        lock: TaskLock | None = None,
        leader: LeaderElection | None = None,
    ) -> None:
        self._name = name
        self._function = function
        self._seconds = check_interval("IntervalTask seconds", seconds)
        self._lock = lock
        self._leader = leader
        self._due: float | None = None
        self._theirs: float | None = None  # when it is due next by the grid of another worker, which ran
        self._ran = False  # at the last due time
        self._untold = 0  # fires that were missed since that was last told
        self._tell_missed_at = -inf
        self._outage = Outage(f"task {name}", logger)
        self.last_fire: Fire | None = None
        self.outcomes: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def seconds(self) -> float:
        """The interval."""
        return self._seconds

    @property
    def function(self) -> Function:
        """What it runs."""
        return self._function

    @property
    def leader(self) -> LeaderElection | None:
        """The election whose leader alone runs it."""
        return self._leader

    @property
    def next_fire_time(self) -> datetime | None:
        """When it fires next; None when it is not running."""
        if self._due is None:
            return None
        return datetime.fromtimestamp(self.clock.wall(), UTC) + timedelta(seconds=self._due - self.clock.now())

    async def __call__(self, *, ready: asyncio.Future[None] | None = None, stop: asyncio.Event | None = None) -> None:
        """Fire until `stop` is set; a fire that runs then is finished first."""
        stop = stop or asyncio.Event()
        if ready is not None and not ready.done():
            ready.set_result(None)
        self._due, self._theirs, self._ran = self.clock.now(), None, False
        try:
            while not stop.is_set():
                await self._fire(self._due, stop)
                self._due = await self._wait(self._due, stop)
        finally:
            self._due = None

    async def _wait(self, due: float, stop: asyncio.Event) -> float:
        """Wait for the due time after `due`, or until stopped; a worker that starts to lead meanwhile fires at once."""
        theirs, self._theirs = self._theirs, None
        due, pause = due + self._seconds, 0.0
        if theirs is not None:
            due, pause = theirs, min(self._seconds * STAND_BY, LONGEST_STAND_BY) * (0.5 + random() / 2)
        while not stop.is_set():
            self._due = due = self._after_missed(due)
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
        leader = self._leader
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
        self._count("missed", 0.0, missed)
        self._untold += missed
        now = self.clock.now()
        if now >= self._tell_missed_at:
            logger.warning(
                "task %s missed %d fires: it ran, or this process stood still, for too long", self._name, self._untold
            )
            self._untold, self._tell_missed_at = 0, now + MISSED_INTERVAL
        return due + missed * self._seconds

    async def _fire(self, due: float, stop: asyncio.Event) -> None:
        started = self.clock.now()
        outcome: Outcome = "error"  # also when it is cut off by the end of a shutdown's patience
        try:
            outcome = await self._attempt(due, stop)
        finally:
            self._count(outcome, self.clock.now() - started)

    def _count(self, outcome: Outcome, duration: float, fires: int = 1) -> None:
        self.outcomes[outcome] += fires
        started_at = datetime.fromtimestamp(self.clock.wall() - duration, UTC)
        self.last_fire = Fire(started_at, outcome, duration)
        emit("fired", self._name, duration, outcome, fires)

    async def _attempt(self, due: float, stop: asyncio.Event) -> Outcome:
        """Run it if it is this worker's turn."""
        if self._leader is not None and not self._leader.is_leader():
            self._look_after(self._leader)
            return "skipped"
        if self._lock is None:
            return await self._run(None)
        outcome: Outcome | None = None
        while True:
            late = self.clock.now() - due
            try:
                with distinguish_cancellation():
                    async with self._lock as handle:
                        self._answered()
                        self._ran = True
                        if late < self._seconds * TOLERANCE:
                            handle.backdate(late)  # or each run would push the next one a little further
                        outcome = await self._run(handle)
                return outcome
            except WouldBlockError as busy:
                self._answered()
                left = busy.retry_after or 0.0
            except LockLostError:
                return "lost"
            except Exception as error:
                return self._in_trouble(error, outcome)
            if late + left > self._seconds * TOLERANCE:
                self._follow(left)
                return "skipped"
            if not self._ran:
                due = self._due = self.clock.now() + left  # another worker's hold: its grid is the one that counts
            await self._sleep(left + 0.001, stop)
            if stop.is_set():
                return "skipped"

    def _follow(self, left: float) -> None:
        """Another worker has the lock for `left` seconds: if that is the hold of an interval, it tells the grid."""
        assert self._lock is not None
        self._ran = False
        if left <= self._seconds <= self._lock.config.min_hold_duration:
            self._theirs = self.clock.now() + left

    def _answered(self) -> None:
        self._outage.over(self.clock.now())

    def _in_trouble(self, error: Exception, outcome: Outcome | None) -> Outcome:
        """The lock failed, before it ran or after that with `outcome`."""
        told = error if isinstance(error, GrelmicroError) else f"{type(error).__name__}: {error}"
        if outcome is None:
            reason = TaskError(f"it did not run, since it could not be told whose turn it is: {told}")
            self._outage.note(reason, self.clock.now(), ERROR_INTERVAL)
            return "coordination_error"
        logger.warning("task %s ran, and its lock could not be given back: %s", self._name, told)
        return outcome

    def _look_after(self, leader: LeaderElection) -> None:
        """Tell once, and not before it had the time to start, that an election does not run: then nobody leads."""
        if self.outcomes["skipped"] == 1 and not leader.is_running():
            logger.warning(
                "task %s waits for the leader of '%s', and this worker takes no part in that election: "
                "add it to Tasks, or run it in a task of its own",
                self._name,
                leader.name,
            )

    async def _run(self, handle: LockHandle | None) -> Outcome:
        """Run the function, as long as the lease and the term that it runs under last."""
        try:
            if self._leader is None:
                failure = await body.run(self._name, self._function, handle, in_term=False)
            else:
                work = partial(body.run, self._name, self._function, handle, in_term=True)
                failure = await self._leader.run_in_term(work)
        except body.LeaseLostError as lost:
            logger.warning("task %s lost its lease while it ran", self._name, exc_info=lost.__cause__)
            return "lost"
        except LeadershipLostError:
            logger.warning("task %s lost leadership while it ran", self._name)
            return "lost"
        except NotLeaderError:
            return "skipped"
        except Exception as error:  # such as that no thread can be started
            failure = error
        if failure is None:
            return "success"
        if isinstance(failure, NotLeaderError):  # the function asked by itself
            return "skipped"
        logger.error("task %s failed", self._name, exc_info=failure)
        return "error"
