"""Leases in a SQLite file that several processes share: crowds, forks, kills, and ends without a close."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


class Worker:
    """A Python program in a process of its own, which is told things line by line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    def tell(self, line: str = "") -> None:
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def hear(self) -> Any:
        """Its next line, which is JSON."""
        line = self._stdout.readline()
        assert line, "it ended"
        return json.loads(line)


@contextmanager
def worker(code: str, *args: object) -> Iterator[Worker]:
    """Run a program; it must end without an error once it has been told everything."""
    command = [sys.executable, "-c", code, *map(str, args)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Worker(process)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


@contextmanager
def workers(code: str, number: int, *args: object) -> Iterator[Sequence[Worker]]:
    """Run a program several times; its first argument tells which one it is."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker(code, each, *args)) for each in range(number)]


OPEN_AND_TAKE = """
import asyncio, sys
from grelmicro.backends.sqlite import SQLiteStore

async def take(path):
    async with SQLiteStore(path) as store:
        return int((await store.acquire("lock:a", sys.argv[1], 60)).granted_to(sys.argv[1]))

print(0, flush=True)
for line in sys.stdin:
    print(asyncio.run(take(line.strip())), flush=True)
"""


@pytest.mark.slow
def test_many_processes_may_create_a_file_at_once(tmp_path: Path) -> None:
    with workers(OPEN_AND_TAKE, 6) as crowd:
        for each in crowd:
            each.hear()
        for turn in range(4):
            for each in crowd:
                each.tell(str(tmp_path / f"{turn}.db"))
            assert sum(each.hear() for each in crowd) == 1
    for turn in range(4):
        with closing(sqlite3.connect(tmp_path / f"{turn}.db")) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert connection.execute("SELECT count(*) FROM grelmicro_leases").fetchone() == (1,)


CROWD = """
import asyncio, json, sys, time
from grelmicro.backends.sqlite import SQLiteProvider

async def main(me, path, seconds):
    errors, done, longest, fences = [], 0, 0.0, []
    async with SQLiteProvider(path) as provider, provider.lock() as locks, provider.schedule() as schedules:
        print("0", flush=True)
        sys.stdin.readline()
        until = time.monotonic() + seconds

        async def task(number):
            nonlocal done, longest
            while time.monotonic() < until:
                begun, holder = time.monotonic(), f"{me}:{number}:{done}"
                try:
                    for name in (f"lock:{me}:{number}", "lock:shared"):
                        lease = await locks.acquire(name, holder, 5)
                        if lease.granted_to(holder):
                            if name == "lock:shared":
                                fences.append(lease.fence)
                            if not await locks.release(lease):
                                errors.append("lost")
                    if done % 50 == 0:
                        await schedules.claim(f"s{number}", time.time())
                except Exception as error:
                    errors.append(f"{type(error).__name__}: {error}")
                done += 1
                longest = max(longest, time.monotonic() - begun)

        await asyncio.gather(*(task(number) for number in range(8)))
    print(json.dumps({"errors": errors[:5], "done": done, "longest": longest, "fences": fences}))

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


@pytest.mark.slow
def test_a_crowd_never_sees_the_file_locked(path: Path) -> None:
    with workers(CROWD, 5, path, 2.5) as crowd:
        for each in crowd:
            each.hear()
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            # A backup, say: what it sees must be kept for it, so the log cannot be tidied meanwhile.
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM grelmicro_leases").fetchone()
            for each in crowd:
                each.tell()
            with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as writer:
                time.sleep(0.5)
                writer.execute("BEGIN IMMEDIATE")
                time.sleep(1.0)
                writer.execute("ROLLBACK")
            answers = [each.hear() for each in crowd]
    assert [error for answer in answers for error in answer["errors"]] == []
    assert min(answer["done"] for answer in answers) > 20
    assert max(answer["longest"] for answer in answers) < 5.0
    fences = [fence for answer in answers for fence in answer["fences"]]
    assert len(fences) == len(set(fences)) > 20


TAKE_TURNS = """
import asyncio, json, sys, time
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter

async def main(me, path, tasks, seconds):
    begun, waits, fences = [], [], []
    async with SQLiteLockAdapter(path) as backend:
        print("0", flush=True)
        sys.stdin.readline()
        until = time.monotonic() + seconds

        async def task():
            lock = Lock("turns", backend=backend)
            while time.monotonic() < until:
                asked = time.monotonic()
                async with lock as held:
                    waits.append(time.monotonic() - asked)
                    fences.append(held.fencing_token)
                    begun.append((time.clock_gettime(time.CLOCK_BOOTTIME), me))
                    await asyncio.sleep(0.001)

        await asyncio.gather(*(task() for _ in range(tasks)))
    print(json.dumps({"begun": begun, "waits": waits, "fences": fences}))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
"""


@pytest.mark.slow
def test_processes_take_turns(path: Path) -> None:
    with workers(TAKE_TURNS, 3, path, 4, 1.5) as crowd:
        for each in crowd:
            each.hear()
        for each in crowd:
            each.tell()
        answers = [each.hear() for each in crowd]
    grants = [len(answer["fences"]) for answer in answers]
    fences = [fence for answer in answers for fence in answer["fences"]]
    assert len(fences) == len(set(fences)) == max(fences) - min(fences) + 1
    assert min(grants) > sum(grants) / 50  # a third each on an idle machine
    assert max(wait for answer in answers for wait in answer["waits"]) < 3.0


WAIT_FOR_IT = """
import asyncio, json, sys, time
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter

async def main(path):
    async with SQLiteLockAdapter(path) as backend:
        lock = Lock("hand-over", backend=backend)
        print("0", flush=True)
        for line in sys.stdin:
            print("0", flush=True)
            async with lock:
                print(json.dumps(time.clock_gettime(time.CLOCK_BOOTTIME)), flush=True)

asyncio.run(main(sys.argv[1]))
"""

HOLD_IT = """
import asyncio, json, sys, time
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter

async def main(path):
    async with SQLiteLockAdapter(path) as backend:
        lock = Lock("hand-over", backend=backend)
        for line in sys.stdin:
            async with lock:
                print("0", flush=True)
                sys.stdin.readline()
                now = time.clock_gettime(time.CLOCK_BOOTTIME)
            print(json.dumps(now), flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
def test_another_process_is_woken_soon_after_a_release(path: Path) -> None:
    delays = []
    with worker(HOLD_IT, path) as holder, worker(WAIT_FOR_IT, path) as waiter:
        waiter.hear()
        for turn in range(11):
            holder.tell()
            holder.hear()
            waiter.tell()
            waiter.hear()
            time.sleep(0.03 + 0.0037 * (turn % 17))
            holder.tell()
            delays.append(waiter.hear() - holder.hear())
    assert median(delays) < 0.04  # 0.001 on an idle machine, a tenth where waiters poll


def run(code: str, *args: object, send: signal.Signals | None = None) -> tuple[int, str, str, float]:
    """Run a program, and send a signal when it says so: its exit code, its output and how long its end took."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        begun = time.monotonic()
        if send is not None:
            process.send_signal(send)
        rest, errors = process.communicate(timeout=30)
        return process.returncode, said + rest, errors, time.monotonic() - begun
    finally:
        process.kill()
        process.communicate()


NEVER_CLOSED = """
import asyncio, sys, time
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter

async def main():
    backend = SQLiteLockAdapter(sys.argv[1])
    await backend.__aenter__()
    lock = Lock("a", backend=backend)
    await lock.acquire()
    async with backend.watch("lock:a"):
        print("held", flush=True)
        {end}

{start}
"""

ENDS = {
    "returns": ("pass", "asyncio.run(main())", None, 0),
    "exits": ("sys.exit(3)", "asyncio.run(main())", None, 3),
    "is interrupted": ("await asyncio.sleep(60)", "asyncio.run(main())", signal.SIGINT, -signal.SIGINT),
    "is interrupted in a request": (
        "[await backend.acquire(f'lock:{each}', 'h', 5) for each in range(100_000)]",
        "asyncio.run(main())",
        signal.SIGINT,
        -signal.SIGINT,
    ),
    "leaves its loop": (
        "pass",
        "asyncio.new_event_loop().run_until_complete(main())",
        None,
        0,
    ),
}


@pytest.mark.parametrize(("end", "start", "send", "code"), ENDS.values(), ids=ENDS)
def test_a_program_that_never_closes_it_ends_all_the_same(
    path: Path, end: str, start: str, send: signal.Signals | None, code: int
) -> None:
    returned, _, errors, seconds = run(NEVER_CLOSED.format(end=end, start=start), path, send=send)
    assert returned == code
    assert seconds < 3.0
    lines = errors.splitlines()
    assert [line for line in lines if "sqlite" in line.lower() and "File" not in line] == []
    assert (lines == []) is (send is None), errors


EXIT_IN_TRAFFIC = """
import asyncio, sys
from grelmicro.backends.sqlite import SQLiteStore

async def main():
    store = SQLiteStore(sys.argv[1])
    await store.__aenter__()
    requests = [asyncio.create_task(store.acquire(f"lock:{number}", "h", 5)) for number in range(200)]
    await asyncio.sleep(0.003)
    print("busy", flush=True)
    sys.exit(3)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_traffic(path: Path) -> None:
    for _ in range(5):
        assert run(EXIT_IN_TRAFFIC, path)[:3] == (3, "busy\n", "")


FORK = """
import asyncio, os, sys
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.errors import OutOfContextError

store = SQLiteStore(sys.argv[1])

def descriptors():
    # One of them is the list itself, which is gone by now.
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link) and sys.argv[1] in os.readlink(link)]

async def in_child():
    try:
        await store.read("lock:parent")
    except OutOfContextError as error:
        assert "forked" in str(error)
    else:
        raise AssertionError("an inherited store can be used")
    async with store:
        assert not (await store.acquire("lock:parent", "child", 60)).granted_to("child")
        lease = await store.acquire("lock:child", "child", 60)
        assert lease.granted_to("child")
        await store.release(lease)

async def in_parent(lease, child):
    assert await store.renew(lease, 60) is not None
    assert os.waitpid(child, 0)[1] == 0
    assert await store.renew(lease, 60) is not None
    assert await store.release(lease)
    await store.__aexit__(None, None, None)

async def before():
    await store.__aenter__()
    await store.read("lock:parent")
    return await store.acquire("lock:parent", "parent", 60)

loop = asyncio.new_event_loop()
lease = loop.run_until_complete(before())
assert descriptors() != []
child = os.fork()
if child:
    loop.run_until_complete(in_parent(lease, child))
    print("parent", flush=True)
else:
    code = 1
    try:
        assert descriptors() == [], descriptors()
        asyncio.run(in_child())
        code = 0
    finally:
        os._exit(code)  # an ordinary end would close the parent's event loop, which asyncio does not survive
"""


def test_a_fork_takes_no_connection_along(path: Path) -> None:
    returned, said, errors, _ = run(FORK, path)
    assert (returned, said, errors) == (0, "parent\n", "")


FORK_IN_TRAFFIC = """
import asyncio, os, sys
from grelmicro.backends.sqlite import SQLiteStore

store = SQLiteStore(sys.argv[1])

async def pairs(name, holder, number):
    for _ in range(number):
        lease = await store.acquire(name, holder, 60)
        assert lease.granted_to(holder)
        assert await store.release(lease)

async def in_child():
    async with store:
        await pairs(f"lock:{os.getpid()}", "child", 20)

def fork():
    child = os.fork()
    if not child:
        code = 1
        try:
            asyncio.run(in_child())
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]

async def main():
    async with store:
        traffic = [asyncio.create_task(pairs(f"lock:p{n}", "parent", 400)) for n in range(4)]
        for _ in range(12):
            assert await asyncio.to_thread(fork) == 0
        await asyncio.gather(*traffic)
    print("done", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_forks_in_the_middle_of_traffic_harm_nobody(path: Path) -> None:
    returned, said, errors, _ = run(FORK_IN_TRAFFIC, path)
    assert (returned, said, errors) == (0, "done\n", "")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


KILLED = """
import asyncio, sys
from grelmicro.backends.sqlite import SQLiteStore

async def main():
    async with SQLiteStore(sys.argv[1]) as store:
        await store.acquire("lock:held", "killed", 0.7)
        print("held", flush=True)
        number = 0
        while True:
            await store.acquire(f"lock:{number}", "killed", 0.5)
            number += 1

asyncio.run(main())
"""

AFTER_THE_KILL = """
import asyncio, sys
from grelmicro.coordination import Lock
from grelmicro.coordination.sqlite import SQLiteLockAdapter

async def main():
    async with SQLiteLockAdapter(sys.argv[1]) as backend:
        async with Lock("held", backend=backend):
            print("held", flush=True)

asyncio.run(main())
"""


def test_a_killed_process_leaves_leases_that_end_by_themselves(path: Path) -> None:
    assert run(KILLED, path, send=signal.SIGKILL)[0] == -signal.SIGKILL
    begun = time.monotonic()
    assert run(AFTER_THE_KILL, path)[:3] == (0, "held\n", "")
    assert time.monotonic() - begun < 5.0
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
