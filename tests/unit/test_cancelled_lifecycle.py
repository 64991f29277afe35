"""Cancelled anywhere while it opens or closes, an app is open or closed, never in between, and can be opened again."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.context import open_apps
from grelmicro.coordination import Coordination, LeaderElection, Lock, MultiLock, OutcomeUnknownError, TaskLock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.lifecycle import Resource, outlast
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import IntervalTask, Tasks
from tests.helpers.cancelling import Suspended, When, at_once, in_flight, when_answered
from tests.helpers.parts import Part
from tests.helpers.stores import TroubledStore, late, reply_lost
from tests.helpers.worlds import World, eventually

LONG = 3600.0

Play = Callable[[], Coroutine[Any, Any, object]]


async def cancelled_at(play: Play, at: int, when: When, *, level: bool) -> bool:
    """Run `play` in a task that is cancelled at its suspension number `at`; whether it suspended that often."""

    async def run() -> bool:
        task = asyncio.current_task()
        assert task is not None
        with anyio.CancelScope() as scope:
            suspended = Suspended(play(), at, when, scope.cancel if level else task.cancel)
            try:
                await suspended
            except asyncio.CancelledError:
                if level:
                    raise
                task.uncancel()
        return suspended.suspensions >= at

    return await asyncio.create_task(run())


def new_app(world: World, log: list[str]) -> Grelmicro:
    tasks = Tasks()

    @tasks.every(seconds=60)
    async def tick() -> None:
        return

    return Grelmicro(uses=[Coordination(world.store()), Part("a", log), tasks])


async def idle(client: LockAdapter) -> None:
    await eventually(lambda: not client._background, "nothing goes on in the background")


@pytest.mark.parametrize("level", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_opening(matrix_world: World, when: When, level: bool) -> None:
    threads = threading.active_count()
    at, again = 1, True
    while again:
        log: list[str] = []
        micro = new_app(matrix_world, log)

        async def enter(micro: Grelmicro = micro) -> None:
            await micro.__aenter__()

        again = await cancelled_at(enter, at, when, level=level)
        at += 1
        if micro.is_open:  # the answer to the last step was there already, or nothing was cancelled
            await micro.__aexit__(None, None, None)
        assert not micro.is_open
        assert micro not in open_apps
        assert log.count("open a") == log.count("close a")
        async with micro, Lock("cart"):
            pass
    await eventually(lambda: threading.active_count() == threads, "no thread is left")


@pytest.mark.parametrize("level", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_closing(matrix_world: World, when: When, level: bool) -> None:
    threads = threading.active_count()
    at, again = 1, True
    while again:
        log: list[str] = []
        micro = new_app(matrix_world, log)
        await micro.__aenter__()

        async def leave(micro: Grelmicro = micro) -> None:
            await micro.__aexit__(None, None, None)

        again = await cancelled_at(leave, at, when, level=level)
        at += 1
        assert not micro.is_open
        assert micro not in open_apps
        assert log == ["open a", "close a"]
        async with micro, Lock("cart"):
            pass
    await eventually(lambda: threading.active_count() == threads, "no thread is left")


@pytest.mark.parametrize("level", [False, True], ids=["task", "scope"])
@pytest.mark.parametrize("when", [at_once, in_flight, when_answered])
async def test_closing_with_undos(matrix_world: World, when: When, level: bool) -> None:
    """However its closing is cancelled, the undo is done by the end of it, nothing goes on then, and all is closed."""
    at, again = 1, True
    while again:
        store = matrix_world.troubled()
        store.break_down(late(request=0.001, reply=0.001))
        client = LockAdapter(store)
        await client.__aenter__()
        handle = await Lock("renewed", backend=client, lease_duration=LONG, auto_renew=True).acquire()
        store.suffer("acquire", reply_lost)
        with suppress(OutcomeUnknownError):
            await Lock("cart", backend=client, lease_duration=LONG).acquire()

        async def leave(client: LockAdapter = client) -> None:
            await client.__aexit__(None, None, None)

        again = await cancelled_at(leave, at, when, level=level)
        at += 1
        assert not client.is_open
        assert not store.is_open
        assert not store.inner.is_open
        assert handle.lost
        await idle(client)
        async with matrix_world.client() as other:
            await Lock("cart", backend=other).acquire_nowait()
            for name in ("renewed", "cart"):
                record = await other.read(f"lock:{name}")
                assert record is not None
                if record.live:
                    await other.release(record)


@pytest.mark.parametrize("seed", range(20))
async def test_many_users_come_and_go(seed: int, nothing_left: None) -> None:
    """Whoever is cut off when, what they share is opened and closed in turn, and closed in the end."""
    chance, log = Random(seed), list[str]()

    class Shared(Resource):
        async def open(self) -> None:
            log.append("opens")
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            log.append("open")

        async def close(self) -> None:
            log.append("closes")
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            log.append("closed")

    shared = Shared()

    async def use() -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        async with shared:
            assert shared.is_open
            assert log[-1] == "open"
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)

    users = [asyncio.create_task(use()) for _ in range(30)]
    while not all(user.done() for user in users):
        if chance.random() < 0.3:
            chance.choice(users).cancel()
        await asyncio.sleep(0)
    outcomes = await asyncio.gather(*users, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
    assert not shared.is_open
    states = "".join({"opens": "[", "open": "(", "closes": ")", "closed": "]"}[entry] for entry in log)
    assert re.fullmatch(r"(\[(\(\)\]?)?)*", states), states


@pytest.fixture
async def turns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One entry for each turn of the event loop: the seconds for which it was ready to sleep."""
    turns: list[float] = []
    selector = vars(asyncio.get_running_loop())["_selector"]
    select = selector.select

    def counted(timeout: float | None = None) -> object:
        turns.append(0.0 if timeout is None else timeout)
        return select(timeout)

    monkeypatch.setattr(selector, "select", counted)
    return turns


async def test_outlasting_a_cancelled_scope_lets_the_event_loop_sleep(turns: list[float]) -> None:
    """A scope cancels each await at once, so waiting on must not run in circles, and must not hold others up."""
    hurried: list[bool] = []
    work = asyncio.create_task(asyncio.sleep(0.3, "done"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await outlast(work, hurry=lambda: hurried.append(work.done()))
    assert scope.cancelled_caught
    assert work.result() == "done"
    assert hurried == [False]
    assert len(turns) < 20
    assert sum(turns) > 0.2


async def test_closing_in_a_cancelled_scope_lets_the_event_loop_sleep(turns: list[float]) -> None:
    store = TroubledStore(MemoryStore())
    client = LockAdapter(store)
    await client.__aenter__()
    store.suffer("acquire", reply_lost)
    store.suffer("release", late(request=0.3))
    with suppress(OutcomeUnknownError):
        await Lock("cart", backend=client, lease_duration=LONG).acquire()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await client.__aexit__(None, None, None)
    assert scope.cancelled_caught
    assert not store.is_open
    assert len(turns) < 50
    assert sum(turns) > 0.2


async def test_outlasting_many_cancellations() -> None:
    hurried: list[bool] = []
    work = asyncio.create_task(asyncio.sleep(0.1, "done"))
    waiting = asyncio.create_task(outlast(work, hurry=lambda: hurried.append(work.done())))
    for _ in range(5):
        await asyncio.sleep(0.01)
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.result() == "done"
    assert hurried == [False]


async def test_a_thread_is_waited_for_in_a_cancelled_scope(turns: list[float]) -> None:
    """The task's lease outlives the thread, and the event loop sleeps meanwhile."""
    ended: list[bool] = []

    def work() -> None:
        time.sleep(0.3)
        ended.append(True)

    async with MemoryProvider().lock() as backend:
        lock = TaskLock("job", backend=backend)
        task = IntervalTask("job", work, 60, lock=lock)
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.05, scope.cancel)
            await task()
        assert scope.cancelled_caught
        assert ended
    assert len(turns) < 100


async def test_what_is_led_ends_in_order_in_a_cancelled_scope() -> None:
    """A scope cancels again and again; the work, which is outside of it, is cancelled once."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0.01)
            ended.append("in order")

    async with MemoryProvider().leaderelection() as backend:
        leader = LeaderElection("job", backend=backend)
        service = asyncio.create_task(leader())
        await leader.wait_for_leader()
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.05, scope.cancel)
            await leader.lead(work)
        assert scope.cancelled_caught
        assert ended == ["in order"]
        service.cancel()
        await asyncio.wait({service})


async def test_an_election_steps_down_before_a_cancelled_scope_ends(real_world: World) -> None:
    async with LeaderElectionAdapter(real_world.store()) as backend:
        leader = LeaderElection("job", backend=backend)
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.1, scope.cancel)
            await leader()
        assert scope.cancelled_caught
        assert not leader.is_running()
        record = await backend.read("leader:job")
        assert record is not None
        assert not record.live


async def test_what_is_outlasted_gives_its_answer() -> None:
    assert await outlast(asyncio.create_task(asyncio.sleep(0, "done"))) == "done"

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await outlast(asyncio.create_task(fail()))


async def hold_all(world: World, up: asyncio.Event) -> None:
    """An app with locks of each kind, a leader, and an acquire that is cut off."""
    leader = LeaderElection("job")
    app = Grelmicro(uses=[Coordination(world.store()), Tasks(tasks=[leader])])
    async with (
        app,
        TaskLock("report", lease_duration=LONG),
        MultiLock(Lock("a", lease_duration=LONG), Lock("b", lease_duration=LONG)),
        Lock("cart", lease_duration=LONG, auto_renew=True),
    ):
        await leader.wait_for_leader()
        up.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0), Lock("cut off", lease_duration=LONG):
                    await asyncio.sleep(0)


async def test_all_is_given_back_in_a_cancelled_scope(real_world: World) -> None:
    """As by the servers and frameworks that run an app in a scope of anyio, which cancels each await of its end."""
    up = asyncio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(hold_all, real_world, up)
        await up.wait()
        await asyncio.sleep(0.05)
        group.cancel_scope.cancel()
    async with real_world.client() as other:
        for name in ("tasklock:report", "lock:a", "lock:b", "lock:cart", "lock:cut off", "leader:job"):
            record = await other.read(name)
            assert record is None or not record.live or (name == "tasklock:report" and record.remaining < 2), name


@pytest.mark.parametrize("when", [at_once, in_flight])
async def test_a_lock_is_free_wherever_its_program_was_cancelled(real_world: World, when: When) -> None:
    at, again = 1, True
    while again:

        async def program() -> None:
            async with (
                Grelmicro(uses=[Coordination(real_world.store())]),
                Lock("cart", lease_duration=LONG).acquire(timeout=LONG),
            ):
                await asyncio.sleep(0)

        again = await cancelled_at(program, at, when, level=True)
        at += 1
        async with real_world.client() as other:
            record = await other.read("lock:cart")
            assert record is None or not record.live, at


async def test_an_event_loop_that_ends_lets_undos_end(tmp_path: Path) -> None:
    """It cancels the tasks that do them together with the one that closes the app."""

    async def program() -> None:
        store.suffer("acquire", reply_lost)
        store.suffer("release", late(request=0.2))
        async with Grelmicro(uses=[Coordination(store)]):
            with suppress(OutcomeUnknownError):
                await Lock("cart", lease_duration=LONG).acquire()
            begun.append(asyncio.current_task())
            await asyncio.sleep(LONG)

    async def main() -> None:
        task = asyncio.create_task(program())
        while not begun:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not task.done()

    begun: list[object] = []
    store = TroubledStore(SQLiteStore(tmp_path / "locks.db"))
    await asyncio.to_thread(asyncio.run, main())
    assert store.calls["release"] >= 1
    async with LockAdapter(SQLiteStore(tmp_path / "locks.db")) as other:
        await Lock("cart", backend=other).acquire_nowait()
