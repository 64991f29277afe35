"""Cancelled anywhere, or failed by the store at any request, several locks leave none of them held."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from grelmicro.clock import sleep
from grelmicro.coordination import (
    BackendUnavailableError,
    CoordinationBackendError,
    LockTimeoutError,
    MultiLock,
    OutcomeUnknownError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.testing.clock import MovableClock
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.stores import (
    SOON,
    Apply,
    Fault,
    Gate,
    TroubledStore,
    late,
    refused,
    reply_lost,
    reply_never,
    request_lost,
    silence,
)
from tests.helpers.worlds import World, eventually
from tests.unit.test_multilock import free, locks

MOST_SUSPENSIONS = 90
"""More than any operation here needs: whatever suspends more often runs in circles."""

PROMPT = 5.0
"""Seconds within which everything is given back: far less than a lease."""


@dataclass
class Scene:
    """A client that is cancelled, and another one that must not notice."""

    client: LockAdapter
    other: LockAdapter
    multi: MultiLock


async def nothing(played: Scene) -> None:
    """Everything is free."""


async def others_release_soon(played: Scene) -> None:
    """Let another client hold the second for a moment."""
    handle = await locks(played.other, "b")[0].acquire()

    async def release() -> None:
        await asyncio.sleep(0.002)
        await handle.release()

    helpers.append(asyncio.create_task(release()))


helpers: list[asyncio.Task[None]] = []


async def take(played: Scene) -> None:
    await (await played.multi.acquire()).release()


async def take_bounded(played: Scene) -> None:
    await (await played.multi.acquire(timeout=60)).release()


async def block(played: Scene) -> None:
    async with played.multi:
        await asyncio.sleep(0)


async def be_refused(played: Scene) -> None:
    """What was taken before is given back before the refusal is raised."""
    async with locks(played.other, "c")[0]:
        with pytest.raises(LockTimeoutError):
            await played.multi.acquire(timeout=0)
        assert await free(played.other, "a", "b") == ["a", "b"]


Play = Callable[[Scene], Coroutine[Any, Any, None]]

PLAYS: dict[str, tuple[Play, Play, bool]] = {
    "acquire, release": (nothing, take, False),
    "acquire bounded, release": (nothing, take_bounded, False),
    "wait, release": (others_release_soon, take, False),
    "wait bounded, release": (others_release_soon, take_bounded, False),
    "block": (nothing, block, False),
    "renewed block": (others_release_soon, block, True),
    "refusal": (nothing, be_refused, False),
}


async def play(store: TroubledStore, other: LockAdapter, name: str, at: int, when: When, *, level: bool) -> bool:
    """Play `name` and cancel it at suspension `at`; whether it suspended that often."""
    prepare, act, auto_renew = PLAYS[name]
    async with LockAdapter(store) as client:
        played = Scene(client, other, MultiLock(*locks(client, "c", "a", "b", auto_renew=auto_renew)))
        await prepare(played)
        scope = anyio.CancelScope()

        async def run() -> bool:
            mine = asyncio.current_task()
            assert mine is not None
            suspended: Suspended[None] = Suspended(act(played), at, when, scope.cancel if level else mine.cancel)
            with scope:
                try:
                    await suspended
                except asyncio.CancelledError:
                    if level:
                        raise
                    mine.uncancel()
            assert suspended.suspensions < MOST_SUSPENSIONS
            # Its task is not taken for a holder afterwards, and nothing is in its way.
            await (await played.multi.acquire(timeout=PROMPT)).release()
            return suspended.suspensions >= at

        reached = await asyncio.create_task(run())
        await eventually(lambda: not client._background, "everything is given back", PROMPT)
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]
        assert not client.queues.lines
        assert len(client.renewer) == 0
        await asyncio.gather(*helpers)
        helpers.clear()
        return reached


@pytest.mark.parametrize("level", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
@pytest.mark.parametrize("name", PLAYS)
async def test_a_cancellation_leaves_nothing_held(matrix_world: World, name: str, when: When, level: bool) -> None:
    store = matrix_world.troubled()
    if matrix_world.kind == "memory":  # which answers before anything can come between
        store.break_down(late(request=SOON, reply=SOON))
    async with store, matrix_world.client() as other:
        at = 1
        while await play(store, other, name, at, when, level=level):
            at += 1
        assert at > 3


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("fault", [refused, request_lost, reply_lost])
async def test_a_store_that_fails_at_any_request_leaves_nothing_held(world: World, fault: Fault, at: int) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b", "c"))
        store.suffer("acquire", *[late()] * at, fault)
        with pytest.raises(BackendUnavailableError if fault is refused else OutcomeUnknownError):
            await multi.acquire()
        assert store.calls["acquire"] == at + 1
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]
        async with multi:
            pass


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("fault", [silence, reply_never])
async def test_a_store_that_falls_silent_is_waited_for_until_the_deadline(
    world: World, clock: MovableClock, fault: Fault, at: int
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        store.suffer("acquire", *[late()] * at, fault)
        waiting = asyncio.create_task(MultiLock(*locks(client, "a", "b", "c")).acquire(timeout=5))
        await eventually(lambda: store.calls["acquire"] == at + 1, "it asks")
        await asyncio.sleep(0.05)
        await clock.advance(6)
        with pytest.raises(OutcomeUnknownError, match=f"lock '{'abc'[at]}': the store did not answer within 5 s"):
            await waiting
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]


async def test_a_refusal_stands_where_giving_back_fails(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other, locks(other, "c")[0]:
        store.suffer("release", request_lost)
        with pytest.raises(LockTimeoutError, match="Lock 'c' is held by another holder"):
            await MultiLock(*locks(client, "a", "b", "c")).acquire(timeout=0)
        await clock.advance(1)
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b") == ["a", "b"]


async def test_a_silent_store_holds_up_neither_the_others_nor_a_cancellation(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await MultiLock(*locks(client, "a", "b", "c")).acquire()
        store.suffer("release", gate := Gate())
        ending = asyncio.create_task(held.release())
        await gate.arrived.wait()
        assert await free(other, "a", "b", "c") == [], "the last one first"
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]


async def test_a_store_that_fails_slowly_is_waited_for_once(world: World, clock: MovableClock) -> None:
    store = world.troubled()

    async def slow(apply: Apply) -> object:
        await sleep(clock, 5)
        raise ConnectionResetError("connection reset")

    async with LockAdapter(store) as client, world.client() as other:
        held = await MultiLock(*locks(client, "a", "b", "c")).acquire()
        store.break_down(slow, "release")
        ending = asyncio.create_task(held.release())
        await clock.advance(6)
        assert ending.done()
        with pytest.raises(OutcomeUnknownError, match="releasing 'lock:c'"):
            await ending
        store.heal()
        await clock.advance(8)
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]


@pytest.mark.parametrize("fault", [refused, request_lost, reply_lost])
@pytest.mark.parametrize("act", ["release", "block", "failed block"])
async def test_a_release_that_fails_does_not_keep_the_others(
    world: World, clock: MovableClock, fault: Fault, act: str
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b", "c"))

        async def run() -> None:
            if act == "release":
                held = await multi.acquire()
                store.suffer("release", fault)
                await held.release()
            async with multi:
                store.suffer("release", fault)
                if act == "failed block":
                    raise ValueError("the work failed")

        with pytest.raises(ValueError if act == "failed block" else CoordinationBackendError) as caught:
            await run()
        assert act != "failed block" or len(caught.value.__notes__) == 1
        await clock.advance(1)
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]
        async with multi:
            pass


async def test_a_release_that_failed_may_be_repeated(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        held = await MultiLock(*locks(client, "a", "b")).acquire()
        store.suffer("release", request_lost)
        with pytest.raises(OutcomeUnknownError, match="releasing 'lock:b'"):
            await held.release()
        assert not held.released
        await held.release()
        assert held.released
        await eventually(lambda: not client._background, "everything is given back")
        assert await free(other, "a", "b") == ["a", "b"]


async def test_a_lost_reply_to_a_renewal_while_waiting_changes_nothing(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        theirs = await locks(other, "b")[0].acquire()
        waiting = asyncio.create_task(MultiLock(*locks(client, "a", "b", lease_duration=9)).acquire())
        await eventually(lambda: "lock:b" in client.queues.lines, "it waits")
        store.suffer("renew_many", reply_lost, request_lost)
        for _ in range(14):
            await clock.advance(0.5)
            await asyncio.sleep(0.005)
        assert store.calls["renew_many"] >= 3
        await theirs.release()
        assert (await waiting).valid
