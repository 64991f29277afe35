"""`TaskLock`: a lock for scheduled work, held for at least and at most a time."""

from asyncio import Task
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Never, Self
from uuid import UUID

from pydantic import model_validator

from grelmicro.config import Duration, Seconds, build, check_config, check_name
from grelmicro.coordination.handle import LockHandle, ThreadLockHandle
from grelmicro.coordination.identity import Owner, calling_task, this_task, this_thread
from grelmicro.coordination.primitive import LeaseConfig, LeasePrimitive, ThreadPrimitive
from grelmicro.coordination.protocols import LockBackend, LockBackendSource
from grelmicro.coordination.taskruns import TaskRun
from grelmicro.coordination.threads import call
from grelmicro.errors import LockLostError
from grelmicro.keywords import refuse_keywords
from grelmicro.leases import Lease

RAN_OUT = (
    "it ran out before its work ended, and another worker may have repeated it: "
    "use a longer lease_duration, refresh() or auto_renew=True"
)
"""Why a task lock is lost that nothing renewed."""


class TaskLockConfig(LeaseConfig):
    """Settings of a `TaskLock`; each can be set by `GREL_TASKLOCK_{NAME}_{FIELD}` or `GREL_TASKLOCK_{FIELD}`."""

    kind = "TASKLOCK"

    min_hold_duration: Seconds = 1.0
    """Seconds for which it stays held at least, also after the work is done: nobody repeats the work too soon."""

    @model_validator(mode="after")
    def _hold_within_lease(self) -> Self:
        self._yield(min_hold_duration=self.lease_duration)
        if self.min_hold_duration > self.lease_duration:
            raise ValueError("min_hold_duration should be at most lease_duration")
        return self

    def _shortest_lease(self) -> float:
        return self.min_hold_duration


class TaskLock(LeasePrimitive[TaskLockConfig]):
    """A lock for scheduled work: entering it never waits, and leaving early keeps it for its minimum hold.

    Settings left None come from the environment, then from the defaults of `TaskLockConfig`.

    Args:
        name: what is locked; `every(lock=TaskLock())` gives a nameless one its task's name.
        backend: where: a backend, a `Coordination` or the name of one; None: that of the app which serves the code that
            uses it, found at each use.
        worker: readable prefix of the holder; a random one by default.
        min_hold_duration: seconds for which it stays held at least.
        lease_duration: seconds after which it frees itself.
        auto_renew: renew it while the work runs, and cancel the `async with` body when it is lost.
        max_hold: seconds after which it is not renewed any more.
        env_prefix: prefix of its environment variables, in place of `GREL_TASKLOCK_{NAME}_`.
        env_load: whether the environment is read; None: it is.

    Raises:
        SettingsValidationError: a setting or the name breaks a rule.
    """

    kind = "tasklock"
    _keywords: Mapping[str, object] | None = None
    """What it was built with; None: ready settings."""
    _env_prefix: str | None = None
    _env_load: bool | None = None
    _task: str | None = None
    """The task that it is for."""
    _respects_holds = True
    _left_held: LockHandle | None = None
    """What was given up last, for the rest of its minimum hold."""

    def __init__(
        self,
        name: str = "default",
        *,
        backend: LockBackendSource | None = None,
        worker: str | UUID | None = None,
        min_hold_duration: Duration | None = None,
        lease_duration: Duration | None = None,
        auto_renew: bool | None = None,
        max_hold: Duration | None = None,
        env_prefix: str | None = None,
        env_load: bool | None = None,
        **unknown: Never,
    ) -> None:
        given = {
            "worker": worker,
            "min_hold_duration": min_hold_duration,
            "lease_duration": lease_duration,
            "auto_renew": auto_renew,
            "max_hold": max_hold,
        }
        if unknown:
            refuse_keywords("TaskLock", unknown, ["backend", *given, "env_prefix", "env_load"])
        check_name("TaskLock", name)
        named = None if env_load is False else name
        config = build(TaskLockConfig, f"TaskLock {name!r}", given, name=named, prefix=env_prefix)
        super().__init__(name, config, backend)
        self._keywords = given
        self._env_prefix = env_prefix
        self._env_load = env_load

    @classmethod
    def from_config(cls, name: str, config: TaskLockConfig, *, backend: LockBackendSource | None = None) -> Self:
        """A task lock with ready settings: no environment is read, and nothing is checked again.

        Raises:
            SettingsValidationError: `config` is of another class, or the name breaks a rule.
        """
        lock = cls.__new__(cls)
        LeasePrimitive.__init__(lock, name, check_config(config, TaskLockConfig), backend)
        return lock

    async def reconfigure(self, new_config: TaskLockConfig) -> None:
        """See `Reconfigurable.reconfigure`."""
        await super().reconfigure(new_config)
        self._keywords = None  # what it was built with is replaced as a whole

    def for_task(self, task: str, interval: float) -> Self:
        """A lock for one task alone: under its name unless named, and held for the interval unless told otherwise.

        Args:
            task: the task's name. A nameless lock reads the environment variables of that name.
            interval: seconds between two runs.

        Raises:
            SettingsValidationError: a setting breaks a rule.
        """
        title, name, config = f"every(lock=) of {task}", self._name, self._config
        if name == "default":
            name = task
            if self._keywords is not None:
                named = None if self._env_load is False else task
                config = build(TaskLockConfig, title, self._keywords, name=named, prefix=self._env_prefix)
        given = {field: getattr(config, field) for field in config.model_fields_set}
        hold = given.setdefault("min_hold_duration", interval)
        given.setdefault("lease_duration", max(config.lease_duration, hold))
        lock = self.from_config(name, build(TaskLockConfig, title, given), backend=self._source.asked)
        lock._task = task
        return lock

    def refresh(self) -> Coroutine[Any, Any, LockHandle]:
        """Let the calling task's lease last its whole duration from now; see `LockHandle.extend`.

        Raises:
            LockNotOwnedError: the lease was lost.
        """
        return self._refresh(calling_task())

    @property
    def from_thread(self) -> "ThreadTaskLock":
        """The same lock for threads other than the event loop's: the same names, as plain calls."""
        return ThreadTaskLock(self)

    def past_hold(self) -> Self:
        """The same lock, refused by work that goes on, and not by the minimum hold of work that has ended."""
        lock = self.from_config(self._name, self._config, backend=self._source.asked)
        lock._task, lock._respects_holds = self._task, False
        return lock

    async def last_run(self, task: str) -> TaskRun | None:
        """The last run of `task` that its record knows of; None when there is none.

        Raises:
            CoordinationBackendError: the store failed.
        """
        record = await self._source.find().read(self._key)
        return None if record is None else TaskRun.of(task, record)

    async def __aenter__(self) -> LockHandle:
        """Take it.

        Raises:
            WouldBlockError: another holder has it, or its minimum hold is not over.
            LockReentrantError: this task holds it.
            CoordinationBackendError: the store failed.
        """
        return self._enter(await self._acquire(self._source.find(), this_task(), "task"))

    async def _refresh(self, caller: "Task[Any] | None") -> LockHandle:
        return await self._holding(caller, "refreshed").extend()

    _refresh.__qualname__ = "TaskLock.refresh"

    async def _acquire(self, backend: LockBackend, owner: Owner, context: str) -> LockHandle:
        self._refuse_reentry(owner)
        return await self._ask_once(backend, owner, self._token(backend, context))

    async def _ask(
        self, backend: LockBackend, owner: Owner, token: str, waiting: bool = False
    ) -> tuple[Lease, LockHandle | None]:
        """See `LeasePrimitive._ask`. Where only the hold of a run that has ended refuses, these settings decide."""
        lease, handle = await super()._ask(backend, owner, token, waiting)
        if handle is not None or (left := await self._left_of_hold(backend, lease)) is None:
            return lease, handle
        if left > 0:
            return replace(lease, expires_at=lease.now + left), None
        await backend.release(lease)
        return await super()._ask(backend, owner, token, waiting)

    async def _left_of_hold(self, backend: LockBackend, lease: Lease) -> float | None:
        """Seconds that are left of a minimum hold; None when `lease` is something else, such as that of a run."""
        mine = self._left_held
        if mine is not None and lease.granted_to(mine.token):
            # By this clock, since a store may have rounded it up; sums of intervals are not exact.
            return round(self._config.min_hold_duration - mine.held_for - mine.late, 6)
        run = None if self._task is None else TaskRun.of(self._task, lease)
        if run is None or not run.holds(lease):
            return None
        if not self._respects_holds:
            return 0.0
        hold = self._config.min_hold_duration
        left = lease.remaining + hold - run.hold
        if hold != run.hold and left > 0:  # of a version with another interval: from now on this one counts for all
            await backend.renew(lease, left, data=replace(run, hold=hold).beside(lease.data))
        return left

    def _busy_for(self, lease: Lease) -> float:
        """What is left of the minimum hold, if all workers have these settings."""
        hold = self._config.min_hold_duration
        left = hold - (lease.renewed_at - lease.acquired_at)  # when it was last renewed
        if lease.remaining > hold:  # then for its whole duration, since the work runs
            left -= self._duration() - lease.remaining
        return min(max(left, 0.0), lease.remaining)

    async def _end(self, handle: LockHandle) -> None:
        """Free it, or let it go on for what is left of the minimum hold; without renewal, a loss is logged."""
        left = self._config.min_hold_duration - handle.held_for
        self._left_held = handle
        if handle.released or (handle.valid and left > 0 and await handle.shorten(left)):
            return
        if handle.renewed_automatically:
            return await handle.end()
        if handle.lost:
            handle.lose(RAN_OUT)
        with suppress(LockLostError):  # which is logged
            await handle.end()


class ThreadTaskLock(ThreadPrimitive[TaskLock]):
    """A `TaskLock` for threads: the event loop that serves its backend carries out each call."""

    def refresh(self) -> ThreadLockHandle:
        """See `TaskLock.refresh`."""
        return self._lock._holding(this_thread(), "refreshed").from_thread.extend()

    def __enter__(self) -> ThreadLockHandle:
        backend = self._backend()
        loop = backend.get_loop()  # before there is a coroutine, which would never be awaited if this refuses
        work = self._lock._acquire(backend, this_thread(), "thread")
        return self._enter(call(loop, work, undo=LockHandle.give_back).from_thread)
