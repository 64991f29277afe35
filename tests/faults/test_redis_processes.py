"""Processes that use Redis: closed or not, interrupted, forked, killed, paused."""

import signal
import time

import pytest

from tests.faults.test_clean_exit import EVERYTHING, LEFT, MODULE_LEVEL
from tests.faults.test_fork import FORKED_IN_A_LOOP, FORKED_IN_A_SCRIPT, PRELOADED
from tests.helpers.scripts import Ending, script


@pytest.fixture
def url(redis_url: str, namespace: str) -> str:
    """The shared server; what is in it belongs to this test."""
    return f"{redis_url}?namespace={namespace}"


def complaints(ending: Ending) -> list[str]:
    """What it wrote to stderr, but for what is expected and for what a busy machine makes it write."""
    expected = (
        "lost lock:lost: a test said so",
        "lock 'cart' is waited for by the task",
        "Executing <",
        "task __main__:",
        "the event loop was blocked",
    )
    return [line for line in ending.errors.splitlines() if not line.startswith(expected)]


def test_everything_that_was_used_is_gone(url: str) -> None:
    with script(EVERYTHING, url) as process:
        ending = process.end()
    assert (ending.code, ending.said, complaints(ending)) == (0, "done\n", [])


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_one_lock_in_several_runs(url: str, closes: bool) -> None:
    source = MODULE_LEVEL.replace("{open}", "await micro.__aenter__()")
    source = source.replace("{close}", "await micro.__aexit__(None, None, None)" if closes else "pass")
    with script(source, url) as process:
        ending = process.end()
    assert (ending.code, ending.said, complaints(ending)) == (0, "done\n", [])


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("in_a_script()", 0),
        ("in_a_script(); sys.exit(3)", 3),
        ("asyncio.run(in_a_coroutine())", 0),
    ],
)
def test_a_program_that_closes_nothing_ends(url: str, end: str, code: int) -> None:
    with script(LEFT + end, url) as process:
        assert process.hear() == "held"
        ending = process.end(10)
        assert ending.code == code
        assert "event loop is closed" not in ending.errors.lower()
        assert "different loop" not in ending.errors


@pytest.mark.parametrize("strict", [True, False])
def test_an_interrupted_program_ends(url: str, strict: bool) -> None:
    with script(LEFT + "asyncio.run(in_a_coroutine())", url, strict=strict) as process:
        assert process.hear() == "held"
        process.send(signal.SIGINT)
        ending = process.end(10)
        assert ending.code == -signal.SIGINT
        assert "event loop is closed" not in ending.errors.lower()
        assert "ResourceWarning" not in ending.errors


CLOSED_LOOP = """
import asyncio, gc, sys
from grelmicro.coordination.redis import RedisLockAdapter

backend = RedisLockAdapter(sys.argv[1])

async def use():
    await backend.__aenter__()
    assert (await backend.acquire("lock:a", "h", 300.0)).granted_to("h")

for _ in range(3):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(use())
    loop.close()  # without ending what still runs
print("done", flush=True)
"""


def test_a_loop_that_was_closed_over_open_connections_is_left_behind(url: str) -> None:
    with script(CLOSED_LOOP, url, strict=False) as process:
        ending = process.end()
    assert (ending.code, ending.said) == (0, "done\n")


def test_an_inherited_lock_is_lost_and_the_parents_lives_on(url: str) -> None:
    with script(FORKED_IN_A_LOOP, url, strict=False) as process:
        assert process.end() == (0, "parent\n", "")


def test_children_of_a_script_open_the_app_anew(url: str) -> None:
    with script(FORKED_IN_A_SCRIPT, url, strict=False) as process:
        assert process.end() == (0, "parent\n", "")


@pytest.mark.parametrize("worker", ["", "web-1"], ids=["random worker", "one worker for all"])
def test_workers_that_were_forked_from_one_process_exclude_each_other(url: str, worker: str) -> None:
    with script(PRELOADED, url, worker, strict=False) as process:
        answers = [answer.split(" ") for answer in process.hear().split(";")]
        assert process.end().code == 0
    assert sorted(token == "busy" for token, _ in answers) == [False, True, True, True]


CARELESS_CHILD = """
import asyncio, gc, os, sys
from grelmicro.coordination.redis import RedisLockAdapter

async def in_child():
    # What the parent has open is thrown away while another loop runs here.
    if sys.argv[2] == "forgets":
        backend.store._opened = None
        gc.collect()
        return
    for _ in range(2):
        async with backend:
            gc.collect()
            assert (await backend.acquire("lock:a", "other", 1.0)).holder == "h"

async def main():
    global backend
    async with RedisLockAdapter(sys.argv[1]) as backend:
        lease = await backend.acquire("lock:a", "h", 300.0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                asyncio.run(in_child())
                code = 0
            finally:
                os._exit(code)
        assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
        for _ in range(20):
            assert await asyncio.wait_for(backend.renew(lease, 300.0), 3) is not None
        async with backend.watch("lock:a") as waiter:
            assert waiter.pushes
            async with RedisLockAdapter(sys.argv[1]) as other:
                await backend.acquire("lock:a", "b", 300.0, waiting=True)
                assert await other.release(lease)
            assert await asyncio.wait_for(waiter.wait(9), 3), "its message came"
    print("parent", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("child", ["forgets", "opens anew"])
def test_a_child_does_not_reach_into_its_parent(url: str, child: str) -> None:
    with script(CARELESS_CHILD, url, child, strict=False) as process:
        assert process.end() == (0, "parent\n", "")


HOLD = """
import asyncio, sys
from grelmicro.coordination import Lock
from grelmicro.coordination.redis import RedisLockAdapter

async def main(url, seconds, renew):
    async with RedisLockAdapter(url) as backend:
        lock = Lock("cart", backend=backend, lease_duration=float(seconds), auto_renew=renew == "renew")
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                async with lock as handle:
                    print("held", handle.fencing_token, flush=True)
                    await asyncio.to_thread(sys.stdin.readline)
                    print("valid" if handle.valid else "lost", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)
            else:
                print("released", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_the_lock_of_a_killed_process_frees_itself(url: str) -> None:
    with script(HOLD, url, 2, "renew") as holder, script(HOLD, url, 60, "no") as waiter:
        holder.tell()
        fence = int(holder.hear().split()[1])
        waiter.tell()
        time.sleep(3)
        assert not waiter.said(), "it is renewed"
        began = time.monotonic()
        holder.send(signal.SIGKILL)
        word, later = waiter.hear().split()
        assert word == "held"
        assert int(later) == fence + 1
        assert 0.5 < time.monotonic() - began < 10
        waiter.tell()
        assert [waiter.hear(), waiter.hear()] == ["valid", "released"]
        assert waiter.end().code == 0


def test_a_paused_holder_knows_that_it_lost(url: str) -> None:
    with script(HOLD, url, 1.5, "renew") as holder, script(HOLD, url, 60, "no") as waiter:
        holder.tell()
        fence = int(holder.hear().split()[1])
        waiter.tell()
        holder.send(signal.SIGSTOP)
        assert int(waiter.hear().split()[1]) == fence + 1
        holder.tell()
        holder.send(signal.SIGCONT)
        assert holder.hear() in ("lost", "LockLostError")
        waiter.tell()
        assert [waiter.hear(), waiter.hear()] == ["valid", "released"]


def test_a_paused_waiter_does_not_come_back_with_an_old_grant(url: str) -> None:
    with (
        script(HOLD, url, 60, "no") as holder,
        script(HOLD, url, 1, "no") as waiter,
        script(HOLD, url, 60, "no") as third,
    ):
        holder.tell()
        fence = int(holder.hear().split()[1])
        waiter.tell()
        time.sleep(0.5)
        waiter.send(signal.SIGSTOP)
        holder.tell()
        assert [holder.hear(), holder.hear()] == ["valid", "released"]
        third.tell()
        assert int(third.hear().split()[1]) > fence
        time.sleep(2)
        waiter.send(signal.SIGCONT)
        time.sleep(0.5)
        assert not waiter.said(), "the third has it"
        third.tell()
        assert [third.hear(), third.hear()] == ["valid", "released"]
        assert waiter.hear().split()[0] == "held"
