"""A function that runs every so many seconds: on each worker, on one at a time, or on the leader."""

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta

from grelmicro.clock import SYSTEM_CLOCK, Clock, sleep
from grelmicro.coordination import LeaderElection, LockHandle, TaskLock
from grelmicro.errors import CoordinationError, LeadershipLostError, LockLostError, NotLeaderError, WouldBlockError
from grelmicro.events import emit
from grelmicro.task.task import OUTCOMES, Fire, Outcome

logger = logging.getLogger("grelmicro.task")

TOLERANCE = 0.1
"""The share of the interval for which a refused tick waits, and up to which a late one counts as on time."""

Function = Callable[[], object]


class IntervalTask:
    """Runs a function every `seconds`, on a grid of due times that does not drift.

    It fires at the start, then at each due time. A due time that passes while the function runs, or while the event
    loop is blocked, is missed and never made up.

    Args:
        name: unique among the tasks of all workers that share a store.
        function: takes no arguments. A plain function runs in a thread.
        seconds: the interval.
        lock: held while it runs and, by its minimum hold, until the next due time: one run per interval over all.
        leader: only the worker that leads runs it.
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
        self._seconds = seconds
        self._lock = lock
        self._leader = leader
        self._due: float | None = None
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
        due = self.clock.now()
        try:
            while not stop.is_set():
                self._due = due
                await self._fire(due)
                self._due = due = self._next(due)
                due = await self._wait(due, stop)
        finally:
            self._due = None

    def _next(self, due: float) -> float:
        """The next due time that is still to come; those that passed are missed."""
        due += self._seconds
        late = self.clock.now() - due
        if late > self._seconds * TOLERANCE:
            missed = 1 + int(late // self._seconds)
            for _ in range(missed):
                self._count("missed", 0.0)
            logger.warning("task %s missed %d fires: it took longer than its interval", self._name, missed)
            due += missed * self._seconds
        return due

    async def _wait(self, due: float, stop: asyncio.Event) -> float:
        """Wait until `due`, or until stopped; a worker that starts to lead meanwhile fires at once."""
        waiting: list[Coroutine[object, object, object]] = [stop.wait(), sleep(self.clock, due - self.clock.now())]
        leader = self._leader
        if leader is not None and not leader.is_leader():
            waiting.append(leader.wait_for_leader())
        await _first(waiting)
        now = self.clock.now()
        return now if now < due else due

    async def _fire(self, due: float) -> None:
        started = self.clock.now()
        outcome: Outcome = "error"  # also when it is cut off by the end of a shutdown's patience
        try:
            outcome = await self._attempt(due)
        finally:
            self._count(outcome, self.clock.now() - started)

    def _count(self, outcome: Outcome, duration: float) -> None:
        self.outcomes[outcome] += 1
        started_at = datetime.fromtimestamp(self.clock.wall() - duration, UTC)
        self.last_fire = Fire(started_at, outcome, duration)
        emit("fired", self._name, duration, outcome)

    async def _attempt(self, due: float) -> Outcome:
        """Run it if it is this worker's turn."""
        if self._leader is not None and not self._leader.is_leader():
            return "skipped"
        if self._lock is None:
            return await self._run(None)
        while True:
            late = self.clock.now() - due
            try:
                async with self._lock as handle:
                    if late < self._seconds * TOLERANCE:
                        handle.backdate(late)  # or each run would push the next one a little further
                    outcome = await self._run(handle)
                return outcome
            except WouldBlockError as busy:
                left = busy.retry_after or 0.0
                if late + left > self._seconds * TOLERANCE:
                    return "skipped"
                await sleep(self.clock, left + 0.001)
            except LockLostError:
                return "lost"
            except CoordinationError as error:
                logger.warning(
                    "task %s did not run, since it could not be told whose turn it is: %s", self._name, error
                )
                return "coordination_error"

    async def _run(self, handle: LockHandle | None) -> Outcome:
        """Run the function, as long as the lease and the term that it runs under last."""
        try:
            if self._leader is None:
                await self._run_under(handle)
            else:
                await self._leader.run_in_term(lambda: self._run_under(handle))
        except _LeaseLostError:
            logger.warning("task %s lost its lease while it ran", self._name)
            return "lost"
        except LeadershipLostError:
            logger.warning("task %s lost leadership while it ran", self._name)
            return "lost"
        except NotLeaderError:
            return "skipped"
        except Exception:
            logger.exception("task %s failed", self._name)
            return "error"
        return "success"

    async def _run_under(self, handle: LockHandle | None) -> None:
        if inspect.iscoroutinefunction(self._function):
            await self._run_coroutine(self._function(), handle)
        else:
            await self._run_in_thread(handle)

    async def _run_coroutine(self, coroutine: Coroutine[object, object, object], handle: LockHandle | None) -> None:
        if handle is None:
            await coroutine
            return
        body = asyncio.create_task(coroutine)
        try:
            await _first([_ended(body), handle.wait_lost()])
            if not body.done():
                body.cancel("the lease was lost")
                await asyncio.wait({body})
                raise _LeaseLostError
            await body
        finally:
            if not body.done():
                body.cancel()
                await asyncio.wait({body})

    async def _run_in_thread(self, handle: LockHandle | None) -> None:
        context = contextvars.copy_context()
        thread = asyncio.get_running_loop().run_in_executor(None, context.run, self._function)
        try:
            await asyncio.shield(thread)
        except asyncio.CancelledError:
            # A thread cannot be stopped: as long as it runs the lease is kept, unless it runs out.
            if handle is not None and not thread.done():
                await _first([_ended(thread), handle.wait_lost()])
            raise
        if handle is not None and handle.lost:
            raise _LeaseLostError


class _LeaseLostError(Exception):
    """The lease ran out under the function."""


async def _ended(work: asyncio.Future[object]) -> None:
    await asyncio.wait({work})


async def _first(waiting: list[Coroutine[object, object, object]]) -> None:
    """Wait for the first of several things and drop the others."""
    tasks = {asyncio.ensure_future(each) for each in waiting}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
