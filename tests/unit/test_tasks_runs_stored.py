"""The last run of a task is stored, and read by another worker, on each store."""

import asyncio
import contextlib

from grelmicro.coordination import LeaderElection, TaskLock
from grelmicro.coordination.adapters import LeaderElectionAdapter
from grelmicro.task import FireOutcome, IntervalTask, TaskRun, Tasks
from tests.helpers.worlds import World

EVERY_S = 0.3
"""Seconds between two runs."""


def only(tasks: Tasks) -> IntervalTask:
    """The last of the tasks."""
    task = tasks.tasks[-1]
    assert isinstance(task, IntervalTask)
    return task


async def stored(task: IntervalTask, previous: TaskRun | None = None) -> TaskRun:
    """The last run, once there is one after `previous`."""
    async with asyncio.timeout(20):
        while (run := await task.last_run()) is None or run == previous:
            await asyncio.sleep(0.01)
    return run


async def work() -> None:
    await asyncio.sleep(0.01)


async def test_under_a_lock(real_world: World) -> None:
    async with real_world.client() as backend, real_world.client() as other:
        first, second = Tasks(), Tasks()
        first.every(seconds=EVERY_S, name="job", lock=TaskLock(backend=backend, worker="web-1"))(work)
        second.every(seconds=EVERY_S, name="job", lock=TaskLock(backend=other))(work)
        async with first:
            run = await stored(only(second))
            assert (run.task, run.outcome, run.error, run.worker) == ("job", FireOutcome.SUCCESS, "", "web-1")
            assert run.hold == EVERY_S
            assert run.duration > 0
            later = await stored(only(second), run)
            assert later.started_at > run.started_at
            assert later.fence > run.fence


async def test_on_the_leader(real_world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(LeaderElectionAdapter(real_world.store())) for _ in range(2)]
        leaders = [LeaderElection("job", backend=backend) for backend in backends]
        first, second = Tasks(tasks=[leaders[0]]), Tasks()
        for tasks, leader in zip((first, second), leaders, strict=True):
            tasks.every(seconds=EVERY_S, name="job", leader=leader)(work)
        await stack.enter_async_context(first)
        run = await stored(only(second))
        assert (run.task, run.outcome, run.worker) == ("job", FireOutcome.SUCCESS, leaders[0].worker)
        later = await stored(only(second), run)
        assert later.started_at > run.started_at
