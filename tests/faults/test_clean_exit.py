"""A program that closes what it used leaves no task, thread, file or warning; one that does not ends all the same."""

import signal
from pathlib import Path

import pytest

from tests.helpers.scripts import script

KINDS = ("memory", "sqlite")


def url_of(kind: str, tmp_path: Path) -> str:
    return "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/locks.db"


EVERYTHING = """
import asyncio, gc, os, sys, threading
from grelmicro import Grelmicro
from grelmicro.coordination import (
    Coordination, LeaderElection, Lock, LockLostError, LockTimeoutError, OutcomeUnknownError, TaskLock, WouldBlockError,
)
from grelmicro.task import Tasks

tasks = Tasks()
ran = 0

@tasks.every(seconds=0.1, lock=TaskLock(min_hold_duration=0.01, lease_duration=5))
async def tick():
    global ran
    ran += 1

@tasks.every(seconds=0.1)
def sync_tick():
    global ran
    ran += 1

election = LeaderElection("main", lease_duration=3, renew_deadline=2, retry_interval=0.05, backend_timeout=1)
tasks.add_task(election)
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1]), tasks])
lock = Lock("cart", lease_duration=2.4, auto_renew=True)
descriptors_before = None

def descriptors():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link) for link in links if os.path.lexists(link))

async def use_all():
    async with micro:
        async with lock as handle:
            waiters = [asyncio.create_task(hold()) for _ in range(20)]
            granted = handle.deadline
            while handle.deadline == granted:  # until it is renewed
                await asyncio.sleep(0.01)
            try:
                await Lock("cart").acquire_nowait()
            except WouldBlockError:
                pass
            try:
                await Lock("cart").acquire(timeout=0.05)
            except LockTimeoutError:
                pass
            await handle.extend()
            for waiter in waiters[10:]:
                waiter.cancel()
        await asyncio.gather(*waiters[:10])
        await asyncio.to_thread(use_threads)
        cut_off = [asyncio.create_task(Lock(f"cut off {n}").acquire()) for n in range(10)]
        await asyncio.sleep(0)
        for task in cut_off:
            task.cancel()
        await asyncio.wait_for(election.wait_for_leader(), 10)
        lost = Lock("lost", lease_duration=0.5, auto_renew=True)
        try:
            async with lost as held:
                held.lose("a test said so")
        except LockLostError:
            pass
        while ran < 6:
            await asyncio.sleep(0.01)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left

async def hold():
    async with lock:
        pass

def use_threads():
    with lock.from_thread, TaskLock("report", min_hold_duration=0.01).from_thread:
        pass

async def main():
    global descriptors_before
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, lambda: None)
    descriptors_before = descriptors()
    for _ in range(2):
        await use_all()
    gc.collect()
    assert descriptors() == descriptors_before, (descriptors(), descriptors_before)

asyncio.run(main(), debug=True)
with micro:
    use_threads()
names = [thread.name for thread in threading.enumerate()]
assert names == ["MainThread"], names
gc.collect()
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_was_used_is_gone(kind: str, tmp_path: Path) -> None:
    with script(EVERYTHING, url_of(kind, tmp_path)) as process:
        ending = process.end()
    # A store in memory answers before a task is cancelled. A busy machine makes the event loop complain of its delays.
    expected = (
        "lost lock:lost: a test said so",
        "lost lock:cut off",
        "lock 'cart' is waited for by the task",
        "Executing <",
        "task __main__:",
        "the event loop was blocked",
    )
    lines = [line for line in ending.errors.splitlines() if not line.startswith(expected)]
    assert (ending.code, ending.said, lines) == (0, "done\n", [])


MODULE_LEVEL = """
import asyncio, sys
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock

micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])
lock = Lock("cart")
fences = []

async def main():
    {open}
    async with lock as handle:
        waiter = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0.01)
        fences.append(handle.fencing_token)
    await (await waiter).release()
    {close}

for _ in range(3):
    asyncio.run(main())
assert fences == sorted(set(fences))
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_one_lock_in_several_runs(kind: str, closes: bool, tmp_path: Path) -> None:
    source = MODULE_LEVEL.replace("{open}", "await micro.__aenter__()")
    source = source.replace("{close}", "await micro.__aexit__(None, None, None)" if closes else "pass")
    with script(source, url_of(kind, tmp_path)) as process:
        assert process.end() == (0, "done\n", "")


LEFT = """
import asyncio, sys, time
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock

micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])
lock = Lock("cart", auto_renew=True)

def in_a_script():
    micro.__enter__()
    lock.from_thread.acquire()
    print("held", flush=True)

async def in_a_coroutine():
    await micro.__aenter__()
    handle = await lock.acquire()
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("in_a_script()", 0),
        ("in_a_script(); sys.exit(3)", 3),
        ("asyncio.run(in_a_coroutine())", 0),
        ("in_a_script(); raise SystemExit(4)", 4),
    ],
)
def test_a_program_that_closes_nothing_ends(kind: str, end: str, code: int, tmp_path: Path) -> None:
    with script(LEFT + end, url_of(kind, tmp_path)) as process:
        assert process.hear() == "held"
        assert process.end(10).code == code


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_program_that_closes_nothing_ends(kind: str, tmp_path: Path) -> None:
    with script(LEFT + "asyncio.run(in_a_coroutine())", url_of(kind, tmp_path), strict=False) as process:
        assert process.hear() == "held"
        process.send(signal.SIGINT)
        assert process.end(10).code == -signal.SIGINT
