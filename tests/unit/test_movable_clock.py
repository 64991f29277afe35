"""The clock that tests move."""

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from time import monotonic
from time import sleep as sleep_in_thread
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.clock import Clock, Signal, TimeLimit, end_within, sleep, working
from grelmicro.coordination import Coordination, LeaderElection, TaskLock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import Tasks
from grelmicro.testing import MovableClock
from grelmicro.testing.clock import ROUNDS, WORK_LIMIT


def test_it_is_a_clock() -> None:
    clock = MovableClock(now=10.0, wall=1_000.0)
    assert isinstance(clock, Clock)
    assert (clock.now(), clock.wall()) == (10.0, 1_000.0)


async def test_it_stands_still_until_it_is_moved() -> None:
    clock = MovableClock(now=10.0, wall=1_000.0)
    await asyncio.sleep(0.01)
    assert (clock.now(), clock.wall()) == (10.0, 1_000.0)
    await clock.advance(2.5)
    assert (clock.now(), clock.wall()) == (12.5, 1_002.5)


async def test_one_that_runs_can_be_moved_too() -> None:
    clock = MovableClock(now=10.0, wall=1_000.0, running=True)
    await sleep(clock, 0.01)
    assert 10.01 <= clock.now() < 40.0
    assert clock.wall() - clock.now() == pytest.approx(990.0)
    began = monotonic()
    far, near = asyncio.create_task(sleep(clock, 3600.0)), asyncio.create_task(sleep(clock, 3600.3))
    await clock.advance(3600.0)
    await far
    assert not near.done()
    await near  # what is left of it passes by itself
    assert 0.3 <= monotonic() - began < 30.0


@pytest.mark.parametrize("move", ["advance", "shift"])
async def test_one_that_runs_fires_each_timer_once(move: str) -> None:
    clock = MovableClock(running=True)
    fired: list[str] = []
    clock.call_later(0.05, partial(fired.append, "soon"))
    clock.call_later(0.05, partial(fired.append, "never")).cancel()
    clock.call_later(100.1, partial(fired.append, "later"))
    await getattr(clock, move)(100.0)
    assert fired == ["soon"]
    while len(fired) < 2:
        await asyncio.sleep(0.01)
    await clock.advance(1.0)
    await asyncio.sleep(0.1)
    assert fired == ["soon", "later"]


async def test_what_falls_due_happens_in_its_order_and_at_its_time() -> None:
    clock = MovableClock(now=0.0)
    seen: list[tuple[str, float]] = []

    async def steps(name: str, *pauses: float) -> None:
        for pause in pauses:
            await sleep(clock, pause)
            seen.append((name, clock.now()))

    async with asyncio.TaskGroup() as group:
        group.create_task(steps("a", 3.0, 1.0))
        group.create_task(steps("b", 1.0, 1.0, 1.5))
        await clock.advance(3.0)
        assert seen == [("b", 1.0), ("b", 2.0), ("a", 3.0)]
        await clock.advance(10.0)
    assert seen[3:] == [("b", 3.5), ("a", 4.0)]
    assert clock.now() == 13.0


async def test_timers_of_one_instant_fire_in_the_order_of_their_making() -> None:
    clock = MovableClock()
    seen: list[int] = []
    for number in range(5):
        clock.call_later(1.0, partial(seen.append, number))
    await clock.advance(1.0)
    assert seen == [0, 1, 2, 3, 4]


async def test_a_cancelled_timer_never_fires() -> None:
    clock = MovableClock()
    seen: list[str] = []
    clock.call_later(1.0, lambda: seen.append("late")).cancel()
    await clock.advance(2.0)
    assert seen == []


async def test_a_suspended_machine_sees_everything_late() -> None:
    clock = MovableClock(now=0.0)
    seen: list[tuple[float, float]] = []

    def fire(delay: float) -> None:
        seen.append((delay, clock.now()))

    for delay in (2.0, 1.0, 100.0):
        clock.call_later(delay, partial(fire, delay))
    await clock.shift(50.0)
    assert seen == [(1.0, 50.0), (2.0, 50.0)]


async def test_the_wall_clock_can_be_set_while_leases_go_on() -> None:
    clock = MovableClock(now=10.0, wall=1_000.0)
    clock.shift_wall(-500.0)
    assert (clock.now(), clock.wall()) == (10.0, 500.0)
    await clock.advance(1.0)
    assert (clock.now(), clock.wall()) == (11.0, 501.0)


async def test_limits_and_signals_follow_it() -> None:
    clock = MovableClock()

    async def limited() -> None:
        async with TimeLimit(clock, 5.0):
            await asyncio.Event().wait()

    waiting, signalled = asyncio.create_task(limited()), asyncio.create_task(Signal().wait(clock, 5.0))
    await clock.advance(4.9)
    assert not waiting.done()
    assert not signalled.done()
    await clock.advance(0.2)
    assert signalled.result() is False
    with pytest.raises(TimeoutError):
        await waiting


async def test_work_that_never_waits_is_ended_without_a_timer() -> None:
    clock = MovableClock()

    async def work() -> None:
        done.append(asyncio.current_task())

    done: list[object] = []
    await end_within(clock, 0.0, work())
    assert done == [asyncio.current_task()]


async def test_work_that_waits_is_ended_within_the_limit() -> None:
    clock = MovableClock()
    going_on, done = asyncio.Event(), []

    async def work() -> None:
        async with asyncio.timeout(60):  # a scope that is entered before the limit, and left inside it
            try:
                await going_on.wait()
                await asyncio.sleep(0)
                done.append("worked")
            finally:
                done.append("cleaned up")

    for cut_off in (False, True):
        done.clear()
        going_on.clear()
        ending = asyncio.create_task(end_within(clock, 5.0, work()))
        await clock.advance(4.9)
        assert not ending.done()
        if cut_off:
            await clock.advance(0.2)
            with pytest.raises(TimeoutError):
                await ending
            assert done == ["cleaned up"]
        else:
            going_on.set()
            await ending
            assert done == ["worked", "cleaned up"]
        assert ending.cancelling() == 0


async def test_a_cancelled_caller_cancels_the_work() -> None:
    done = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # what it has to do then may wait, too
            done.append("cancelled")
            raise

    ending = asyncio.create_task(end_within(MovableClock(), 5.0, work()))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert done == ["cancelled"]


async def test_what_the_work_raises_is_raised() -> None:
    async def work(*, waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise LookupError

    for waits in (False, True):
        with pytest.raises(LookupError):
            await end_within(MovableClock(), 5.0, work(waits=waits))


async def test_a_timer_of_another_event_loop_fires_there() -> None:
    clock = MovableClock()
    set_up, threads = threading.Event(), []

    async def elsewhere() -> None:
        fired = asyncio.Event()

        def fire() -> None:
            threads.append(threading.current_thread())
            fired.set()

        clock.call_later(1.0, fire)
        set_up.set()
        await fired.wait()

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(set_up.wait)
    await clock.advance(1.0)
    await asyncio.to_thread(thread.join)
    assert threads == [thread]


def without_pytest(code: str, folder: Path) -> str:
    """What a program prints where pytest is not installed."""
    hidden = "import sys\nsys.modules['pytest'] = None\n"
    done = subprocess.run([sys.executable, "-c", hidden + code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_it_needs_no_pytest(tmp_path: Path) -> None:
    code = "from grelmicro.testing import MovableClock\nprint(MovableClock(now=1.0).now())"
    assert without_pytest(code, tmp_path) == "1.0\n"


@pytest.mark.parametrize(
    "statement", ["from grelmicro.testing import LeaseStoreContract", "import grelmicro.testing.contract"]
)
def test_the_contract_says_what_it_needs(statement: str, tmp_path: Path) -> None:
    code = f"""
from grelmicro.errors import DependencyNotFoundError
try:
    {statement}
except DependencyNotFoundError as error:
    print(error)
"""
    assert without_pytest(code, tmp_path) == (
        'the contract of stores runs under pytest: install it with pip install "grelmicro-suite[testing]"\n'
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    import grelmicro.testing

    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = grelmicro.testing.Nothing


async def test_a_thread_moves_it_on_the_loop_that_waits() -> None:
    clock = MovableClock(now=0.0)
    seen: list[float] = []
    threads: list[threading.Thread] = []

    async def steps() -> None:
        for pause in (1.0, 1.5, 10.0):
            await sleep(clock, pause)
            seen.append(clock.now())
            threads.append(threading.current_thread())

    waiting = asyncio.create_task(steps())
    await asyncio.sleep(0)
    await asyncio.to_thread(clock.from_thread.advance, 3.0)
    assert seen == [1.0, 2.5]
    await asyncio.to_thread(clock.from_thread.shift, 20.0)
    assert seen == [1.0, 2.5, 23.0]
    assert set(threads) == {threading.current_thread()}
    await waiting
    with pytest.raises(OutOfContextError, match="would wait for itself"):
        clock.from_thread.advance(1.0)
    assert clock.now() == 23.0


def test_a_thread_moves_it_where_nobody_waits() -> None:
    clock = MovableClock(now=0.0)
    clock.from_thread.advance(3.0)
    clock.from_thread.shift(1.0)
    assert clock.now() == 4.0

    async def wait() -> None:
        await sleep(clock, 1.0)

    async def steps() -> None:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await asyncio.to_thread(clock.from_thread.advance, 2.0)
        await waiting

    asyncio.run(steps())
    clock.from_thread.advance(1.0)  # that loop is gone
    assert clock.now() == 7.0


async def test_a_thread_form_is_refused_on_a_loop_that_never_waited() -> None:
    clock = MovableClock(now=0.0)
    with pytest.raises(OutOfContextError, match="would wait for itself"):
        clock.from_thread.advance(1.0)
    assert clock.now() == 0.0


@pytest.mark.parametrize("wrong", [-100.0, float("nan"), float("inf"), "5", True])
async def test_time_passes_forward_and_by_a_number(wrong: Any) -> None:
    clock = MovableClock(now=10.0, wall=1_000.0)
    for name in ("advance", "shift"):
        with pytest.raises(SettingsValidationError, match="seconds should be a number of seconds, 0 or more"):
            await getattr(clock, name)(wrong)
        with pytest.raises(SettingsValidationError, match="seconds should be a number of seconds, 0 or more"):
            await asyncio.to_thread(getattr(clock.from_thread, name), wrong)
    await clock.advance(0)
    assert (clock.now(), clock.wall()) == (10.0, 1_000.0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), "5", True])
def test_the_wall_clock_is_set_by_a_number(wrong: Any) -> None:
    clock = MovableClock(now=10.0, wall=1_000.0)
    with pytest.raises(SettingsValidationError, match=r"shift_wall\(\): seconds should be a finite number"):
        clock.shift_wall(wrong)
    assert clock.wall() == 1_000.0


async def test_time_goes_back_for_nobody_when_two_let_it_pass(clock: MovableClock) -> None:
    begun = clock.now()

    async def long_work() -> None:
        await clock.advance(50)

    clock.call_later(1, lambda: asyncio.ensure_future(long_work()))
    await clock.advance(2)
    assert clock.now() == begun + 51


async def test_it_waits_for_the_real_work_of_tasks(clock: MovableClock, nothing_left: None) -> None:
    """Of coroutines and of threads, and before it moves on as well as at the end."""
    tasks, runs = Tasks(clock=clock), Counter[str]()
    backend = LockAdapter(MemoryStore(clock=clock))
    start = clock.now()

    @tasks.every(seconds=5, name="coroutine")
    async def coroutine() -> None:
        await asyncio.sleep(0.02)
        runs[f"coroutine at {clock.now() - start:g}"] += 1

    @tasks.every(seconds=5, name="locked", lock=TaskLock(backend=backend))
    async def locked() -> None:
        await asyncio.sleep(0.1)  # longer than the others, for which it is not waited then
        runs[f"locked at {clock.now() - start:g}"] += 1

    @tasks.every(seconds=5, name="thread", lock=TaskLock(backend=backend))
    def thread() -> None:
        sleep_in_thread(0.02)
        runs[f"thread at {clock.now() - start:g}"] += 1

    async with backend, tasks:
        await clock.advance(10)
    assert runs == {f"{kind} at {due}": 1 for kind in ("coroutine", "locked", "thread") for due in (0, 5, 10)}


async def test_what_follows_work_has_its_time_whenever_that_ends(clock: MovableClock) -> None:
    seen: list[float] = []

    async def work(rounds: int) -> None:
        with working(clock):
            for _ in range(rounds):
                await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        seen.append(clock.now())

    for rounds in range(2 * ROUNDS):
        begun = clock.now()
        task = asyncio.create_task(work(rounds))
        await clock.advance(1)
        await task
        assert seen.pop() == begun, f"the clock moved before what follows work of {rounds} rounds"


async def test_it_waits_for_the_real_work_of_the_leader(clock: MovableClock, nothing_left: None) -> None:
    leader, runs = LeaderElection("job"), []
    tasks = Tasks(tasks=[leader], clock=clock)

    @tasks.every(seconds=5, leader=leader)
    async def job() -> None:
        began = clock.now()
        await asyncio.sleep(0.02)
        runs.append(clock.now() - began)

    async with Grelmicro(uses=[Coordination(MemoryProvider(clock=clock)), tasks]):
        while not leader.is_leader():
            await asyncio.sleep(0)
        await clock.advance(10)
    assert len(runs) >= 3
    assert set(runs) == {0.0}


async def test_it_does_not_wait_for_work_that_waits_for_it(clock: MovableClock, nothing_left: None) -> None:
    tasks, ran = Tasks(clock=clock), []

    @tasks.every(seconds=100)
    async def job() -> None:
        await sleep(clock, 7.0)
        ran.append(clock.now())

    async with tasks:
        begun = monotonic()
        await clock.advance(8.0)
        assert ran == [clock.now() - 1.0]
        assert monotonic() - begun < WORK_LIMIT


async def test_it_waits_for_work_no_longer_than_its_limit(
    clock: MovableClock, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once only."""
    monkeypatch.setattr("grelmicro.testing.clock.WORK_LIMIT", 0.2)
    tasks, go_on = Tasks(clock=clock), asyncio.Event()
    tasks.every(seconds=1, name="job")(go_on.wait)
    async with tasks:
        begun = monotonic()
        for _ in range(200):
            await clock.advance(1.0)
        assert 0.2 <= monotonic() - begun < 20.0
        go_on.set()
