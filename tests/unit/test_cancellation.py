"""Cancelled anywhere, a lock's operations leave no lease, no waiter, no task and no unusable connection behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from grelmicro.coordination import Lock, LockHandle, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.matrix import further
from tests.helpers.stores import SOON, TroubledStore, late
from tests.helpers.worlds import World, eventually

LONG = 3600.0
"""A lease that does not end by itself within a test."""

MOST_SUSPENSIONS = 40
"""More than any operation here needs: whatever suspends more often runs in circles."""

PROMPT = 3.0
"""Seconds within which an undo ends: less than it takes until a server surely does nothing more by itself."""

MOST_CALLS = 40
"""More requests than any operation here needs."""


@dataclass
class Scene:
    """A client that is cancelled, and another one that must not notice."""

    store: TroubledStore
    client: LockAdapter
    lock: Lock
    tasklock: TaskLock
    others: Lock
    helpers: list[asyncio.Task[object]]

    def beside(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` in a task of its own."""
        self.helpers.append(asyncio.create_task(work))


@dataclass
class Cast:
    """The clients of all scenes of a test: what one scene did to their connections must not harm the next."""

    store: TroubledStore
    client: LockAdapter
    other: LockAdapter


@asynccontextmanager
async def cast_of(world: World, slow: bool) -> AsyncIterator[Cast]:
    store = world.troubled()
    if slow:
        store.break_down(late(request=SOON, reply=SOON))
    async with LockAdapter(store) as client, world.client() as other:
        yield Cast(store, client, other)


@asynccontextmanager
async def scene(cast: Cast) -> AsyncIterator[Scene]:
    played = Scene(
        cast.store,
        cast.client,
        Lock("cart", backend=cast.client, lease_duration=LONG, retry_interval=0.01),
        TaskLock("cart", backend=cast.client, lease_duration=LONG, min_hold_duration=0.001),
        Lock("cart", backend=cast.other, lease_duration=LONG),
        [],
    )
    yield played
    await asyncio.gather(*played.helpers)


async def free(played: Scene) -> None:
    """Acquire what is free."""
    await played.lock.acquire()


async def free_bounded(played: Scene) -> None:
    """Acquire what is free, within a time."""
    await played.lock.acquire(timeout=60)


async def free_nowait(played: Scene) -> None:
    """Try once to acquire what is free."""
    await played.lock.acquire_nowait()


async def others_release_soon(played: Scene) -> None:
    """Let another process hold it for a moment."""
    handle = await played.others.acquire()

    async def release() -> None:
        await asyncio.sleep(0.002)
        await handle.release()

    played.beside(release())


async def head(played: Scene, timeout: float | None = None) -> None:
    """Wait, first in line, for another process."""
    await played.lock.acquire(timeout=timeout)


async def head_bounded(played: Scene) -> None:
    """The same within a time."""
    await played.lock.acquire(timeout=60)


async def somebody_is_first(played: Scene) -> None:
    """Let another task of this process wait first, and hold it for a moment after another process."""
    await others_release_soon(played)

    async def first() -> None:
        handle = await played.lock.acquire()
        await handle.release()

    played.beside(first())
    await eventually(lambda: played.client.queues.lines, "somebody waits")


async def prepare_nothing(played: Scene) -> None:
    """Everything is free."""


held: dict[int, LockHandle] = {}


async def mine(played: Scene) -> None:
    """Hold it in this task."""
    held[id(played)] = await played.lock.acquire()


async def extend(played: Scene) -> None:
    await held[id(played)].extend()


async def release(played: Scene) -> None:
    await held[id(played)].release()


async def block(played: Scene) -> None:
    """Enter, work and leave."""
    async with played.lock:
        await asyncio.sleep(0)


async def renewed_block(played: Scene) -> None:
    """The same, renewed."""
    async with Lock("cart", backend=played.client, lease_duration=LONG, auto_renew=True):
        await asyncio.sleep(0)


async def task_block(played: Scene) -> None:
    """A task lock, kept for its minimum hold."""
    async with played.tasklock:
        await asyncio.sleep(0)


Play = Callable[[Scene], Coroutine[Any, Any, None]]

PLAYS: dict[str, tuple[Play, Play]] = {
    "acquire": (prepare_nothing, free),
    "acquire, bounded": (prepare_nothing, free_bounded),
    "acquire, once": (prepare_nothing, free_nowait),
    "wait as head": (others_release_soon, head),
    "wait as head, bounded": (others_release_soon, head_bounded),
    "wait in line": (somebody_is_first, head),
    "wait in line, bounded": (somebody_is_first, head_bounded),
    "extend": (mine, extend),
    "release": (mine, release),
    "block": (prepare_nothing, block),
    "renewed block": (prepare_nothing, renewed_block),
    "block of a task lock": (prepare_nothing, task_block),
}


KEEPS = {name for name in PLAYS if name.startswith(("acquire", "wait", "extend"))}
"""What leaves the caller with a lease when it succeeds."""


async def play(cast: Cast, name: str, at: int, when: When, *, level: bool) -> bool:
    """Play `name` and cancel it at suspension `at`; whether it suspended that often."""
    prepare, act = PLAYS[name]
    async with scene(cast) as played:
        scope = anyio.CancelScope()

        async def run() -> tuple[bool, bool]:
            """Whether it came to the cancellation, and whether it was cancelled."""
            mine = asyncio.current_task()
            assert mine is not None
            await prepare(played)
            before = played.store.calls.total()
            suspended: Suspended[None] = Suspended(act(played), at, when, scope.cancel if level else mine.cancel)
            cancelled = False
            with scope:
                try:
                    await suspended
                except asyncio.CancelledError:
                    cancelled = True
                    if level:
                        raise
                    mine.uncancel()
            assert suspended.suspensions < MOST_SUSPENSIONS
            assert played.store.calls.total() - before < MOST_CALLS
            assert cancelled == suspended.interrupted, "the cancellation was lost"
            if name in KEEPS and not cancelled:
                await played.lock.release()
            elif name == "extend":
                await held[id(played)].release()
            # Its task is not taken for a holder afterwards.
            await (await played.lock.acquire(timeout=5)).release()
            return suspended.suspensions >= at, cancelled

        reached, cancelled = await asyncio.create_task(run())
        assert reached or not cancelled
        # A scope is level-triggered: it cancels the next await when the answer to this one is there already.
        assert cancelled or not reached or level
        await eventually(lambda: not played.client._background, "every undo has ended", PROMPT)
        handle = await played.others.acquire(timeout=5)
        await handle.release()
        async with asyncio.timeout(5):
            while await played.tasklock.locked():
                await asyncio.sleep(0.001)
        await asyncio.gather(*played.helpers)
        assert not played.client.queues.lines
        assert len(played.client.renewer) == 0
        return reached


async def play_all(world: World, name: str, when: When, *, level: bool, slow: bool | None = None) -> None:
    """Play `name` again and again, and cancel it at one suspension after the other."""
    at = 1
    if slow is None:  # a store in memory answers before anything can come between; the others are slow anyway
        slow = world.kind == "memory"
    async with cast_of(world, slow) as cast:
        while await play(cast, name, at, when, level=level):
            at += 1
    assert at > 1


@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
@pytest.mark.parametrize("name", PLAYS)
async def test_a_cancelled_task_leaves_nothing_behind(real_world: World, name: str, when: When) -> None:
    await play_all(real_world, name, when, level=False)


@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
@pytest.mark.parametrize("name", PLAYS)
async def test_a_cancelled_scope_leaves_nothing_behind(matrix_world: World, name: str, when: When) -> None:
    await play_all(matrix_world, name, when, level=True)


@pytest.mark.parametrize("matrix_world", further("sqlite"), indirect=True)
@pytest.mark.parametrize("level", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
@pytest.mark.parametrize("name", PLAYS)
async def test_slow_connections_to_a_file_change_nothing(
    matrix_world: World, name: str, when: When, level: bool
) -> None:
    await play_all(matrix_world, name, when, level=level, slow=True)
