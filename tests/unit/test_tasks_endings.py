"""However a job ends, that is one counted outcome, and the next due time comes."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial

import anyio
import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, TaskLock
from grelmicro.errors import LockLostError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock
from tests.helpers.worlds import eventually
from tests.unit.test_stray_cancellation import cancel_me, cancelled_elsewhere

pytestmark = pytest.mark.slow

GUARDS = ("alone", "lock", "leader")

FIRES = 12
"""Of each ending under each guard: a thousand of all."""


class OddError(BaseException):
    """An error of a class that nobody expects."""


class UnprintableError(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError


def raising(error: type[BaseException], *args: object) -> Callable[[], object]:
    """A plain job that raises such an error."""

    def job() -> object:
        raise error(*args)

    return job


def raising_in_coroutine(error: type[BaseException], *args: object) -> Callable[[], Coroutine[object, object, object]]:
    """A coroutine job that raises such an error."""

    async def job() -> None:
        await asyncio.sleep(0)
        raise error(*args)

    return job


async def fail_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(raising_in_coroutine(ValueError, "of a child")())
        await asyncio.Event().wait()


async def fail_in_a_group_of_anyio() -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(raising_in_coroutine(OddError, "of a child"))
        await anyio.sleep_forever()


async def time_out() -> None:
    async with asyncio.timeout(0):
        await asyncio.Event().wait()


async def leave_a_scope_of_anyio_cancelled() -> None:
    scope = anyio.CancelScope()
    scope.__enter__()
    scope.cancel()
    await anyio.sleep_forever()


async def swallow_a_cancellation() -> None:
    with suppress(asyncio.CancelledError):
        await cancel_me()


async def share_a_failure() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_exception(LookupError("of a shared future"))
    await future


def recurse() -> object:
    return recurse()


ENDINGS: dict[str, tuple[Callable[[], object], str]] = {
    "returns": (lambda: None, "success"),
    "returns a coroutine": (lambda: asyncio.sleep(0), "success"),
    "swallows a cancellation": (swallow_a_cancellation, "success"),
    "exception": (raising_in_coroutine(ValueError, "of the job"), "error"),
    "exception in a thread": (raising(ValueError, "of the job"), "error"),
    "unprintable": (raising(UnprintableError), "error"),
    "recursion": (recurse, "error"),
    "StopIteration": (raising_in_coroutine(StopIteration), "error"),
    "StopIteration in a thread": (lambda: next(iter([])), "error"),
    "StopAsyncIteration": (raising_in_coroutine(StopAsyncIteration), "error"),
    "StopAsyncIteration in a thread": (raising(StopAsyncIteration), "error"),
    "GeneratorExit": (raising_in_coroutine(GeneratorExit), "error"),
    "GeneratorExit in a thread": (raising(GeneratorExit), "error"),
    "SystemExit": (raising_in_coroutine(SystemExit, 3), "error"),
    "SystemExit in a thread": (lambda: sys.exit(3), "error"),
    "KeyboardInterrupt in a thread": (raising(KeyboardInterrupt), "error"),
    "odd error": (raising_in_coroutine(OddError), "error"),
    "odd error in a thread": (raising(OddError), "error"),
    "CancelledError": (raising_in_coroutine(asyncio.CancelledError), "error"),
    "CancelledError in a thread": (raising(asyncio.CancelledError), "error"),
    "cancelled elsewhere": (cancelled_elsewhere, "error"),
    "cancels itself": (cancel_me, "error"),
    "group": (fail_in_a_group, "error"),
    "group of anyio": (fail_in_a_group_of_anyio, "error"),
    "scope of anyio": (leave_a_scope_of_anyio_cancelled, "error"),
    "time-out": (time_out, "error"),
    "shared failure": (share_a_failure, "error"),
    "loss of a lock of its own": (raising_in_coroutine(LockLostError, "of another lock"), "error"),
}
"""What a job does, and the outcome."""


def ran(job: IntervalTask) -> int:
    """How many of its fires ran the function."""
    return sum(job.outcomes.values()) - job.outcomes["skipped"]


def has_run(job: IntervalTask, times: int) -> bool:
    """Whether the function has run so often, however that ended."""
    return ran(job) >= times


@pytest.mark.parametrize("guard", GUARDS)
async def test_the_next_due_time_comes_however_a_job_ends(nothing_left: None, clock: MovableClock, guard: str) -> None:
    assert len(ENDINGS) * len(GUARDS) * FIRES >= 1_000
    leader = LeaderElection("job")
    tasks = Tasks(clock=clock)
    if guard == "leader":
        tasks.add_task(leader)
    for name, (function, _) in ENDINGS.items():
        tasks.every(
            seconds=1,
            name=name,
            lock=TaskLock(lease_duration=60) if guard == "lock" else None,
            leader=leader if guard == "leader" else None,
        )(function)
    jobs = [task for task in tasks.tasks if isinstance(task, IntervalTask)]
    async with Grelmicro(uses=[Coordination(MemoryProvider(clock=clock)), tasks]):
        if guard == "leader":
            await eventually(leader.is_leader, "it leads")
        for fire in range(1, FIRES + 1):
            for job in jobs:
                await eventually(partial(has_run, job, fire), f"{job.name} has run")
            await clock.advance(1)
    for job in jobs:
        ended = {outcome for outcome, count in job.outcomes.items() if count} - {"skipped"}
        assert (job.name, ended) == (job.name, {ENDINGS[job.name][1]})
