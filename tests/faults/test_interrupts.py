"""Programs that are interrupted while they wait for, hold, open or close: no lease stays behind, the end is orderly."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from tests.helpers.scripts import script


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/locks.db"


@pytest.fixture
def micro(url: str) -> Iterator[Grelmicro]:
    """Another process's view: this one's."""
    with Grelmicro(uses=[Coordination.from_url(url)]) as micro:
        yield micro


HEAD = """
import sys, time
from contextlib import asynccontextmanager
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock

micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1])])
lock = Lock("cart", lease_duration=3600)
"""


@pytest.mark.parametrize("timeout", ["None", "3600"])
def test_waiting_for_a_lock(url: str, micro: Grelmicro, timeout: str) -> None:
    waiting = f"""
with micro:
    print("waiting", flush=True)
    try:
        lock.from_thread.acquire(timeout={timeout})
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.readline()
    with lock.from_thread:
        print("held", flush=True)
"""
    with Lock("cart").from_thread as held, script(HEAD + waiting, url) as process:
        assert process.hear() == "waiting"
        time.sleep(0.3)
        process.send(signal.SIGINT)
        assert process.hear() == "interrupted"
        held.release()
        # Whom nobody serves any more is not in the way.
        Lock("cart").from_thread.acquire(timeout=5).release()
        process.tell()
        assert process.hear() == "held"
        assert process.end() == (0, "", "")


def test_holding_a_lock(url: str, micro: Grelmicro) -> None:
    holding = """
with micro, lock.from_thread:
    print("held", flush=True)
    time.sleep(60)
"""
    with script(HEAD + holding, url) as process:
        assert process.hear() == "held"
        process.send(signal.SIGINT)
        code, said, errors = process.end()
        assert (code, said) == (-signal.SIGINT, "")
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert "Error" not in errors
        Lock("cart").from_thread.acquire(timeout=0)


def test_acquiring_and_releasing_all_the_time(url: str, micro: Grelmicro) -> None:
    """Wherever it comes in, the program ends at once; a lease that it could not give back any more ends by itself."""
    working = """
lock = Lock("cart", lease_duration=2)
with micro:
    print("works", flush=True)
    while True:
        with lock.from_thread:
            pass
"""
    for number in range(6):
        with script(HEAD + working, url) as process:
            assert process.hear() == "works"
            time.sleep(0.01 + 0.0037 * number)
            process.send(signal.SIGINT)
            code, _, errors = process.end(10)
            assert code == -signal.SIGINT
            assert "KeyboardInterrupt" in errors
            Lock("cart").from_thread.acquire(timeout=10).release()


def test_in_a_coroutine(url: str, micro: Grelmicro) -> None:
    holding = """
import asyncio

async def main():
    async with micro, lock:
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    with script(HEAD + holding, url) as process:
        assert process.hear() == "held"
        process.send(signal.SIGINT)
        assert process.end().code == -signal.SIGINT
        Lock("cart").from_thread.acquire(timeout=0)


@pytest.mark.parametrize("kind", ["with", "async with"])
def test_an_exit_in_the_body(url: str, micro: Grelmicro, kind: str) -> None:
    sync = "with micro, lock.from_thread:\n    sys.exit(3)\n"
    coroutine = """
import asyncio

async def main():
    async with micro, lock:
        sys.exit(3)

asyncio.run(main())
"""
    with script(HEAD + (sync if kind == "with" else coroutine), url) as process:
        assert process.end() == (3, "", "")
        Lock("cart").from_thread.acquire(timeout=0)


def test_while_it_opens(url: str, micro: Grelmicro) -> None:
    opening = """
import asyncio

@asynccontextmanager
async def slow():
    print("opening", flush=True)
    try:
        await asyncio.sleep(0 if opened else 60)
        yield
    finally:
        print("closed", flush=True)

class Slow:
    async def __aenter__(self):
        self.inner = slow()
        await self.inner.__aenter__()
    async def __aexit__(self, *error):
        await self.inner.__aexit__(*error)

opened = False
micro.use(Slow())
try:
    with micro:
        print("not reached", flush=True)
except KeyboardInterrupt:
    assert not micro.is_open
    print("interrupted", flush=True)
opened = True
with micro, lock.from_thread:
    print("held", flush=True)
"""
    with script(HEAD + opening, url) as process:
        assert process.hear() == "opening"
        process.send(signal.SIGINT)
        assert [process.hear() for _ in range(2)] == ["closed", "interrupted"]
        assert [process.hear() for _ in range(3)] == ["opening", "held", "closed"]
        assert process.end() == (0, "", "")


def test_a_second_one_ends_a_close_that_hangs(url: str, micro: Grelmicro) -> None:
    hanging = """
import asyncio

class Hangs:
    async def __aenter__(self):
        return self
    async def __aexit__(self, *error):
        print("closing", flush=True)
        await asyncio.sleep(60)

micro.use(Hangs())
with micro:
    print("open", flush=True)
    time.sleep(60)
"""
    with script(HEAD + hanging, url, strict=False) as process:
        assert process.hear() == "open"
        process.send(signal.SIGINT)
        assert process.hear() == "closing"
        process.send(signal.SIGINT)
        assert process.end(10).code != 0
