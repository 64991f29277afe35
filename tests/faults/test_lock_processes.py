"""Processes that are killed or paused while they hold or wait for a lock."""

import asyncio
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from grelmicro.coordination import Coordination
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.leases import Lease
from tests.helpers.scripts import script

HOLD = """
import asyncio, sys
from grelmicro.coordination import Coordination, Lock

async def main(url, seconds, renew):
    async with Coordination.from_url(url).lock_backend as backend:
        lock = Lock("cart", backend=backend, lease_duration=float(seconds), auto_renew=renew == "renew")
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                async with lock as handle:
                    print("held", handle.fencing_token, flush=True)
                    await asyncio.to_thread(sys.stdin.readline)
                    # Woken from a pause, the very next step already knows.
                    print("valid" if handle.valid else "lost", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
            else:
                print("released", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'locks.db'}"


def test_the_lock_of_a_killed_process_frees_itself(url: str) -> None:
    with script(HOLD, url, 2, "no") as holder, script(HOLD, url, 60, "no") as waiter:
        holder.tell()
        fence = int(holder.hear().split()[1])
        waiter.tell()
        began = time.monotonic()
        holder.send(signal.SIGKILL)
        word, later = waiter.hear().split()
        assert word == "held"
        assert int(later) > fence
        assert 0.5 < time.monotonic() - began < 10
        waiter.tell()
        assert [waiter.hear(), waiter.hear()] == ["valid", "released"]
        assert waiter.end().code == 0


def test_those_who_wait_in_a_process_follow_one_another(any_url: str) -> None:
    """The first after the lease of a killed holder, the second right after the first."""
    wait_twice = """
    import asyncio, sys, time
    from grelmicro.coordination import Coordination, Lock

    async def wait(lock, number):
        async with await lock.acquire(timeout=20):
            print(number, time.monotonic(), flush=True)
            await asyncio.sleep(0.05)

    async def main(url):
        async with Coordination.from_url(url).lock_backend as backend:
            lock = Lock("cart", backend=backend, lease_duration=60)
            await asyncio.gather(wait(lock, 1), wait(lock, 2))

    sys.stdin.readline()
    asyncio.run(main(sys.argv[1]))
    """
    with script(HOLD, any_url, 2, "no") as holder, script(wait_twice, any_url) as waiters:
        holder.tell()
        holder.hear()
        waiters.tell()
        time.sleep(0.3)
        holder.send(signal.SIGKILL)
        first, second = waiters.hear().split(), waiters.hear().split()
        assert (first[0], second[0]) == ("1", "2")
        assert 0.05 <= float(second[1]) - float(first[1]) < 5
        assert waiters.end().code == 0


def test_a_holder_that_was_paused_for_longer_than_its_lease_knows_that_it_lost(any_url: str) -> None:
    with script(HOLD, any_url, 1.5, "renew") as holder, script(HOLD, any_url, 60, "no") as successor:
        holder.tell()
        fence = int(holder.hear().split()[1])
        holder.send(signal.SIGSTOP)
        successor.tell()
        assert int(successor.hear().split()[1]) > fence
        holder.tell("leave")
        holder.send(signal.SIGCONT)
        said = holder.hear()
        assert (holder.hear() if said == "lost" else said) == "LockLostError"
        successor.tell()
        assert [successor.hear(), successor.hear()] == ["valid", "released"]


def test_a_renewed_lease_outlives_its_duration_in_a_process_that_runs(url: str) -> None:
    with script(HOLD, url, 1, "renew") as holder, script(HOLD, url, 60, "no") as waiter:
        holder.tell()
        holder.hear()
        waiter.tell()
        time.sleep(3)
        assert not waiter.said()
        holder.tell("leave")
        assert [holder.hear(), holder.hear()] == ["valid", "released"]
        assert waiter.hear().startswith("held")


def test_a_waiter_that_was_paused_during_the_hand_over_asks_again(any_url: str) -> None:
    """What happened while it slept is no grant: it holds the lock only after whoever took it meanwhile."""
    with (
        script(HOLD, any_url, 60, "no") as holder,
        script(HOLD, any_url, 1, "no") as sleeper,
        script(HOLD, any_url, 60, "no") as competitor,
    ):
        holder.tell()
        holder.hear()
        sleeper.tell()
        time.sleep(0.5)
        sleeper.send(signal.SIGSTOP)
        holder.tell("leave")
        assert [holder.hear(), holder.hear()] == ["valid", "released"]
        competitor.tell()
        fence = int(competitor.hear().split()[1])
        time.sleep(2)
        sleeper.send(signal.SIGCONT)
        time.sleep(0.5)
        assert not sleeper.said()
        competitor.tell("leave")
        competitor.hear()
        assert int(sleeper.hear().split()[1]) > fence


async def leases(url: str) -> list[Lease]:
    """All records."""
    backend = Coordination.from_url(url).lock_backend
    assert isinstance(backend, LockAdapter)
    async with backend.store as store:
        return [lease async for lease in store.scan()]


@pytest.mark.timeout(180)  # nine programs, one after the other
def test_no_kill_leaves_a_lock_for_ever(any_url: str) -> None:
    """Whenever a process is killed, there is no held record without an end, and the next one gets it."""
    again_and_again = """
    import asyncio, sys
    from grelmicro.coordination import Coordination, Lock

    async def main(url):
        async with Coordination.from_url(url).lock_backend as backend:
            lock = Lock("cart", backend=backend, lease_duration=0.3)
            await lock.acquire(timeout=20)
            print("got it", flush=True)
            await lock.release()
            while True:
                async with lock:
                    pass

    asyncio.run(main(sys.argv[1]))
    """
    moments = Random(5)
    for _ in range(8):
        with script(again_and_again, any_url, strict=False) as process:
            assert process.hear() == "got it"
            time.sleep(moments.random() * 0.05)
            process.send(signal.SIGKILL)
        # Kubernetes keeps whole seconds.
        assert all(lease.expires_at <= lease.now + 1.0 for lease in asyncio.run(leases(any_url)) if lease.holder)
    with script(again_and_again, any_url) as last:
        assert last.hear() == "got it"


PARTITIONED = """
import asyncio, sqlite3, sys, time
from grelmicro.coordination import Coordination, Lock, LockLostError
from grelmicro.coordination.adapters import LockAdapter
from tests.helpers.stores import TroubledStore, silence

GUARDED = "UPDATE guarded SET fence = ?, writer = ? WHERE fence <= ?"

async def main(me, url, storage):
    store = TroubledStore(Coordination.from_url(url).lock_backend.store)
    rows = sqlite3.connect(storage, isolation_level=None, timeout=30)
    rows.execute("CREATE TABLE IF NOT EXISTS guarded (fence INTEGER, writer TEXT)")
    if me == "first":
        rows.execute("INSERT INTO guarded VALUES (0, '')")
    async with LockAdapter(store) as backend:
        lock = Lock("cart", backend=backend, lease_duration=1.5, auto_renew=True)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        handle = await lock.acquire()
        accepted = refused = 0
        valid_at = time.monotonic()

        def write():
            nonlocal accepted, refused
            if rows.execute(GUARDED, (handle.fencing_token, me, handle.fencing_token)).rowcount:
                accepted += 1
            else:
                refused += 1

        if me == "first":
            store.break_down(silence)
        write()
        print("held", time.monotonic(), flush=True)
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not end.done():
            # It goes on writing whatever it learns: only the fence stops it.
            write()
            now = time.monotonic()  # before the question: a process may stand still after it
            if handle.valid:
                valid_at = now
            if me == "first" and refused and not handle.valid:
                break
            await asyncio.sleep(0.01)
        print(accepted, refused, valid_at, flush=True)
        store.heal()
        await end
    rows.close()

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_holder_that_cannot_reach_the_store_is_kept_off_the_storage_by_its_fence(
    any_url: str, tmp_path: Path
) -> None:
    storage = tmp_path / "storage.db"
    with (
        script(PARTITIONED, "first", any_url, storage, strict=False) as first,
        script(PARTITIONED, "second", any_url, storage, strict=False) as second,
    ):
        for each in (first, second):
            assert each.hear() == "ready"
        first.tell()
        first.hear()
        second.tell()
        held_at = float(second.hear().split()[1])
        accepted, refused, valid_at = first.hear().split()
        first.tell()
        assert int(accepted) > 0
        assert int(refused) > 0
        assert float(valid_at) < held_at, "it knew before the other one began"
        second.tell()
        theirs = second.hear().split()
        assert theirs[1] == "0", "none of its writes was refused"
    with closing(sqlite3.connect(storage)) as connection:
        assert connection.execute("SELECT writer FROM guarded").fetchone() == ("second",)


STARVE = """
import asyncio, sys
from grelmicro.coordination import Coordination, Lock

async def main(url, tasks, enough):
    grants, stopped = 0, False
    async with Coordination.from_url(url).lock_backend as backend:
        lock = Lock("cart", backend=backend)

        async def work():
            nonlocal grants
            while not stopped:
                async with lock:
                    grants += 1
                    if grants == int(enough):
                        print("enough", flush=True)
                    await asyncio.sleep(0.002)

        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        working = asyncio.gather(*(work() for _ in range(int(tasks))))
        await asyncio.to_thread(sys.stdin.readline)
        stopped = True
        await working
    print(grants, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("tasks", "others"), [(8, 1), (1, 1)], ids=["many against one", "one against one"])
def test_a_process_that_always_wants_it_lets_others_have_it(any_url: str, tasks: int, others: int) -> None:
    with script(STARVE, any_url, tasks, 20) as greedy, script(STARVE, any_url, others, 20) as modest:
        both = (greedy, modest)
        for word in ("ready", "enough"):
            for each in both:
                assert each.hear() == word
            for each in both:
                each.tell()
        grants = [int(each.hear()) for each in both]
    assert min(grants) >= sum(grants) / 20, grants
