"""A forked child owns nothing of its parent's, disturbs nothing of it, and can begin anew."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.helpers.matrix import further
from tests.helpers.scripts import script

FORKED_IN_A_LOOP = """
import asyncio, os, sys, warnings
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockLostError, LockNotOwnedError, LockTimeoutError, TaskLock
from grelmicro.errors import OutOfContextError

warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what this is about
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])
lock, tasklock = Lock("cart", lease_duration=5, auto_renew=True), TaskLock("report")

def refused(error, text, act):
    try:
        act()
    except error as refusal:
        assert text in str(refusal), refusal
    else:
        raise AssertionError(f"{act} was not refused")

async def in_child(handle):
    for act in (handle.release, handle.extend):
        try:
            await act()
        except LockNotOwnedError as refusal:
            assert "inherited through a fork and belongs to the parent process" in str(refusal)
        else:
            raise AssertionError(f"{act} was not refused")
    await handle.wait_lost()
    try:
        await lock.acquire()
    except OutOfContextError as refusal:
        assert "before this process was forked" in str(refusal) or "is not open" in str(refusal), refusal
    else:
        raise AssertionError("an inherited app serves")
    async with micro:
        try:
            await lock.acquire(timeout=0)
        except LockTimeoutError as busy:
            assert busy.retry_after > 0
        else:
            assert sys.argv[1] == "memory://", "the parent holds it"
        assert not await lock.owned() or sys.argv[1] == "memory://"
        async with Lock("of the child") as own:
            assert own.token != handle.token
    assert not micro.is_open

def child(handle):
    assert handle.lost and not handle.valid and handle.expires_in == 0
    assert not micro.is_open and not micro.coordination.lock_backend.is_open
    refused(LockLostError, "inherited through a fork", handle.raise_if_lost)
    refused(LockLostError, "acquire it in the process that needs it", handle.raise_if_lost)
    refused(OutOfContextError, "", lock.from_thread.acquire)
    refused(OutOfContextError, "", handle.from_thread.release)
    asyncio.run(in_child(handle))
    asyncio.run(in_child(handle))

async def main():
    async with micro, lock as handle, tasklock:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(handle)
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        ended = asyncio.create_task(asyncio.to_thread(os.waitpid, pid, 0))
        for _ in range(70):
            await asyncio.sleep(0.1)
            assert handle.valid, "the parent's lease is renewed as before"
        assert (await ended)[1] == 0, "the child failed"
        await handle.extend()
        assert await lock.owned() and await tasklock.locked()
    assert not micro.is_open
    print("parent", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", *further("memory")])
def test_an_inherited_lock_is_lost_and_the_parents_lives_on(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    url = "memory://" if kind == "memory" else f"sqlite:///{path}"
    with script(FORKED_IN_A_LOOP, url, strict=False) as process:
        assert process.end() == (0, "parent\n", "")
    if kind == "sqlite":
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


FORKED_IN_A_SCRIPT = """
import multiprocessing, sys, warnings
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockTimeoutError

warnings.simplefilter("ignore", DeprecationWarning)
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])
lock = Lock("cart", lease_duration=60)

def child(handle):
    assert handle.lost
    with micro:
        try:
            lock.from_thread.acquire(timeout=0)
        except LockTimeoutError:
            pass
        else:
            raise AssertionError("the parent holds it")
        with Lock("other").from_thread:
            pass

with micro, lock.from_thread as handle:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, args=(handle,)) for _ in range(3)]
    for each in children:
        each.start()
    for each in children:
        each.join()
    assert [each.exitcode for each in children] == [0, 0, 0]
    handle.extend()
    assert lock.from_thread.owned()
print("parent", flush=True)
"""


def test_children_of_a_script_open_the_app_anew(tmp_path: Path) -> None:
    with script(FORKED_IN_A_SCRIPT, f"sqlite:///{tmp_path}/locks.db", strict=False) as process:
        assert process.end() == (0, "parent\n", "")


PRELOADED = """
import asyncio, os, sys
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, WouldBlockError
from grelmicro.leases.identity import mint

# Everything is built before the fork, as servers do that load the application first.
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])
lock = Lock("cart", worker=sys.argv[2] or None)
mint()

async def work():
    async with micro:
        try:
            handle = await lock.acquire_nowait()
        except WouldBlockError:
            return "busy"
        await asyncio.sleep(1.5)
        await handle.release()
        return handle.token


reading, writing = os.pipe()
for number in range(4):
    if os.fork() == 0:
        os.write(writing, (asyncio.run(work()) + " " + mint() + "\\n").encode())
        os._exit(0)
for _ in range(4):
    os.wait()
os.close(writing)
print(os.read(reading, 10_000).decode().strip().replace("\\n", ";"), flush=True)
"""


@pytest.mark.parametrize("worker", ["", "web-1"], ids=["random worker", "one worker for all"])
def test_workers_that_were_forked_from_one_process_exclude_each_other(tmp_path: Path, worker: str) -> None:
    with script(PRELOADED, f"sqlite:///{tmp_path}/locks.db", worker, strict=False) as process:
        answers = [answer.split(" ") for answer in process.hear().split(";")]
        assert process.end().code == 0
    assert sorted(token == "busy" for token, _ in answers) == [False, True, True, True]
    minted = [name[:16] for _, name in answers]
    assert len(set(minted)) == 4, "each has random bits of its own"
