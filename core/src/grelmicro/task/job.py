"""What a task runs: its function, on the worker whose turn it is, and the note of each run for all workers."""

import logging
from datetime import UTC, datetime
from functools import partial

from grelmicro.clock import SYSTEM_CLOCK, Clock, TimeLimit
from grelmicro.coordination import LeaderElection, LockHandle, TaskLock
from grelmicro.coordination.taskruns import FireOutcome, TaskRun
from grelmicro.errors import (
    GrelmicroError,
    LeadershipLostError,
    LockLostError,
    NotLeaderError,
    OutOfContextError,
    TaskError,
    WouldBlockError,
)
from grelmicro.leases.identity import mint
from grelmicro.leases.outage import Outage, shared_outage
from grelmicro.lifecycle import distinguish_cancellation, raise_if_cancelled
from grelmicro.task import body
from grelmicro.task.body import Function

logger = logging.getLogger("grelmicro.task")

ERROR_INTERVAL = 30.0
"""Seconds between two log lines about an outage that goes on."""

NOTE_LIMIT = 5.0
"""Seconds after which the note of a run under a leader is given up."""

NOTE_PAUSE_S = 1.0
"""Seconds between two notes of runs under a leader that ended alike: a quick task does not write each time."""

NOTE_LEASE = 0.001
"""Seconds for which the record of a run is held: no longer than it takes to write it."""


class Job:
    """Runs a function under the lock and for the leader of its task.

    Args:
        name: the task.
        function: takes no arguments. A plain function runs in a thread.
        lock: held while it runs.
        leader: only the worker that leads runs it.
    """

    clock: Clock = SYSTEM_CLOCK

    def __init__(
        self, name: str, function: Function, lock: TaskLock | None = None, leader: LeaderElection | None = None
    ) -> None:
        self.name = name
        self.function = function
        self.lock = lock
        self.leader = leader
        self.began_at: float | None = None
        """When the function was called the last time, by the clock."""
        self.in_function = False
        """Whether the function runs, not what comes before and after it."""
        self._running = False
        self._ended: TaskRun | None = None  # the last run on this worker
        self._noted: FireOutcome | None = None  # the outcome of the run that was stored last, under a leader
        self._noted_at = 0.0
        self._outage = Outage(f"task {name}", logger)

    async def run(
        self, due: float | None = None, *, tolerance: float = 0.0, lock: TaskLock | None = None
    ) -> FireOutcome:
        """Run the function once, if it is this worker's turn.

        Args:
            due: when it was due, by the clock. For the next run of this worker its minimum hold counts from then.
            tolerance: seconds by which a run may be late for its minimum hold to count from then for all workers.
            lock: taken in place of the task's own.

        Raises:
            WouldBlockError: its lock is held by another worker, or for what is left of a minimum hold.
        """
        if self._running:
            return FireOutcome.SKIPPED
        if self.leader is not None and not self.leader.is_leader():
            return FireOutcome.COORDINATION_ERROR if self.leader.is_cut_off() else FireOutcome.SKIPPED
        self._running, self.began_at = True, None
        try:
            return await self._run_if_free(lock, due, tolerance)
        finally:
            self._running = False

    async def last_run(self) -> TaskRun | None:
        """The last run on any worker, as the store knows it; without a lock and a leader, that on this worker.

        Raises:
            OutOfContextError: no app serves this code.
            CoordinationBackendError: the store failed.
        """
        if self.lock is not None:
            return await self.lock.last_run(self.name)
        if self.leader is None:
            return self._ended
        record = await self.leader.backend.read(self._record)
        return None if record is None else TaskRun.of(self.name, record)

    async def _run_if_free(self, lock: TaskLock | None, due: float | None, tolerance: float) -> FireOutcome:
        lock = lock or self.lock
        if lock is not None:
            return await self._run_locked(lock, due, tolerance)
        outcome = await self._run(None)
        if self.leader is not None and self.leader.is_leader():
            await self._store(self.leader)
        return outcome

    async def _run_locked(self, lock: TaskLock, due: float | None, tolerance: float) -> FireOutcome:
        outcome: FireOutcome | None = None
        try:
            with distinguish_cancellation():
                async with lock as handle:
                    raise_if_cancelled()
                    self._answered(lock)
                    if due is not None:
                        held_for = handle.held_for  # read first: a pause in between must not lengthen the hold
                        handle.count_from_due(self.clock.now() - due - held_for, tolerance)
                    try:
                        outcome = await self._run(handle)
                    finally:
                        if self._ended is not None:
                            handle.note = self._ended.beside(handle.lease.data)
            return FireOutcome.LOST if handle.lost else outcome
        except WouldBlockError:
            self._answered(lock)
            raise
        except LockLostError:
            return FireOutcome.LOST
        except Exception as error:
            return self._in_trouble(lock, error, outcome)

    def _answered(self, lock: TaskLock) -> None:
        """The store of the lock answered."""
        self._outage.over(self.clock.now())
        self._outage_of(lock).over(self.clock.now(), f"task {self.name}")

    def _outage_of(self, lock: TaskLock) -> Outage:
        """The outage of the store of the lock, shared by all its users; one of the task where no store is known."""
        try:
            return shared_outage(lock.backend, self._outage)
        except OutOfContextError:
            return self._outage

    def _in_trouble(self, lock: TaskLock, error: Exception, outcome: FireOutcome | None) -> FireOutcome:
        """The lock failed, before the function ran or after that with `outcome`."""
        told = error if isinstance(error, GrelmicroError) else f"{type(error).__name__}: {error}"
        if outcome is None:
            reason = TaskError(f"it did not run, since it could not be told whose turn it is: {told}")
            outage = self._outage_of(lock)
            source = "" if outage is self._outage else f"task {self.name}"
            outage.note(reason, self.clock.now(), ERROR_INTERVAL, source)
            return FireOutcome.COORDINATION_ERROR
        logger.warning("task %s ran, and its lock could not be given back: %s", self.name, told)
        return outcome

    async def _run(self, handle: LockHandle | None) -> FireOutcome:
        """Run the function, and note how that ended."""
        self.began_at = self.clock.now()
        began = self.clock.wall()
        outcome, failure = FireOutcome.ERROR, ""  # also when it is cut off by the end of a shutdown's patience
        self.in_function = True
        try:
            outcome, failure = await self._end_of_run(handle)
        finally:
            self.in_function = False
            if outcome is not FireOutcome.SKIPPED:
                self._ended = TaskRun(
                    self.name,
                    datetime.fromtimestamp(began, UTC),
                    datetime.fromtimestamp(began + self.clock.now() - self.began_at, UTC),
                    outcome,
                    self._worker,
                    failure,
                    0.0 if self.lock is None else self.lock.config.min_hold_duration,
                    0 if handle is None else handle.fencing_token,
                )
        return outcome

    async def _end_of_run(self, handle: LockHandle | None) -> tuple[FireOutcome, str]:
        """Run the function as long as its lease and its term last; the outcome, and the class of its error."""
        try:
            if self.leader is None:
                failure = await body.run(self.name, self.function, handle, in_term=False)
            else:
                work = partial(body.run, self.name, self.function, handle, in_term=True)
                failure = await self.leader.run_in_term(work)
        except body.LeaseLostError as lost:
            logger.warning("task %s lost its lease while it ran", self.name, exc_info=lost.__cause__)
            return FireOutcome.LOST, ""
        except LeadershipLostError:
            logger.warning("task %s lost leadership while it ran", self.name)
            return FireOutcome.LOST, ""
        except NotLeaderError:
            return FireOutcome.SKIPPED, ""
        except Exception as error:  # such as that no thread can be started
            failure = error
        if failure is None:
            return FireOutcome.SUCCESS, ""
        if isinstance(failure, NotLeaderError):  # the function asked by itself
            return FireOutcome.SKIPPED, ""
        logger.error("task %s failed", self.name, exc_info=failure)
        return FireOutcome.ERROR, type(failure).__name__

    async def _store(self, leader: LeaderElection) -> None:
        """Store the note of a run without a lock, in one request; when that fails, the next run is noted."""
        run, now = self._ended, self.clock.now()
        if run is None or (run.outcome == self._noted and now - self._noted_at < NOTE_PAUSE_S):
            return
        self._noted, self._noted_at = run.outcome, now
        try:
            with distinguish_cancellation():
                async with TimeLimit(self.clock, NOTE_LIMIT):
                    await leader.backend.acquire(self._record, f"run:{mint()}", NOTE_LEASE, data=run.beside({}))
        except Exception as error:
            logger.debug("the last run of task %s was not stored: %s", self.name, error)

    @property
    def _record(self) -> str:
        """The name of the record of a task that has no lock."""
        return f"task:{self.name}"

    @property
    def _worker(self) -> str:
        if self.lock is not None:
            return self.lock.worker
        return "" if self.leader is None else self.leader.worker
