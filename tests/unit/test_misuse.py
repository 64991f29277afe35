"""What is likely to be meant otherwise is refused with what to do instead."""

import asyncio
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, MultiLock, TaskLock
from grelmicro.errors import OutOfContextError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import Tasks

KEYWORDS = [
    (Lock, "timeout", "acquire(timeout=) says how long a caller waits, and lease_duration= says how many seconds"),
    (Lock, "ttl", "lease_duration= says how many seconds it may be held without a renewal"),
    (Lock, "blocking_timeout", "acquire(timeout=) says how long a caller waits"),
    (Lock, "lease_duraton", "did you mean lease_duration=?"),
    (Lock, "autorenew", "did you mean auto_renew=?"),
    (Lock, "colour", "it knows backend=, worker=, lease_duration=, retry_interval=, retry_jitter=, auto_renew=, "),
    (TaskLock, "ttl", "lease_duration= says how many seconds it may be held without a renewal"),
    (TaskLock, "min_hold", "did you mean min_hold_duration=?"),
    (LeaderElection, "renew_deadine", "did you mean renew_deadline=?"),
    (LeaderElection, "meta", "did you mean metadata=?"),
]


@pytest.mark.parametrize(("kind", "keyword", "hint"), KEYWORDS)
def test_a_keyword_that_is_not_known_is_told_the_right_one(kind: Any, keyword: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind("cart", **{keyword: 30})
    text = f"{kind.__name__}() got an unexpected keyword argument '{keyword}': {hint}"
    assert str(caught.value).startswith(text)
    with pytest.raises(TypeError, match="unexpected keyword"):
        getattr(Coordination(MemoryProvider()), kind.__name__.lower())("cart", **{keyword: 30})


HOLDERS: list[Callable[[], object]] = [
    lambda: Lock("cart"),
    lambda: TaskLock("cart"),
    lambda: MultiLock(Lock("cart")),
    lambda: LeaderElection("feed"),
    lambda: Coordination(MemoryProvider()),
    lambda: Coordination(MemoryProvider()).lock_backend,
    MemoryProvider,
    Grelmicro,
    Tasks,
]


@pytest.mark.parametrize("build", HOLDERS)
@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_belongs_to_a_process_is_not_copied(build: Callable[[], object], use: Callable[[object], object]) -> None:
    made = build()
    with pytest.raises(TypeError) as caught:
        use(made)
    assert str(caught.value) == (
        f"{type(made).__name__} cannot be copied or pickled, since what it holds belongs to this process: build it "
        "where it is used, such as at the top of a module that each process imports, and pass names"
    )


async def in_another_loop(use: Callable[[], Any]) -> str:
    """The refusal of what is used on another event loop than that of the app, in a context of its own."""

    async def refused() -> str:
        with pytest.raises(OutOfContextError) as caught:
            await use()
        return str(caught.value)

    return await asyncio.to_thread(lambda: asyncio.run(refused()))


@pytest.mark.parametrize("url", ["memory://", "sqlite:///{folder}/locks.db"])
async def test_another_event_loop_is_refused_in_the_name_of_the_lock(url: str, tmp_path: Path) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(url.format(folder=tmp_path))])
    async with micro:
        handle = await Lock("held").acquire()
        lock, tasklock = Lock("cart"), TaskLock("report")
        for title, use in (
            ("lock 'cart'", lock.acquire),
            ("lock 'cart'", lock.acquire_nowait),
            ("lock 'cart'", lock.locked),
            ("tasklock 'report'", tasklock.__aenter__),
            ("lock 'held'", handle.release),
            ("lock 'held'", handle.extend),
        ):
            assert await in_another_loop(use) == (
                f"{title}: its backend serves another event loop than the running one: "
                "use it on the loop that opened it, through `from_thread` in a thread, or through a lock's `from_loop` "
                "in a coroutine"
            )
        await handle.release()


FORKED = """
import asyncio, os, sys, warnings
from contextvars import Context
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock

warnings.simplefilter("ignore", DeprecationWarning)
coordination = Coordination.from_url("memory://")
with Grelmicro(uses=[coordination]):
    if os.fork() == 0:
        for run in (lambda use: use(), Context().run):
            for use in (Lock("cart").from_thread.locked, coordination.lock("cart").from_thread.locked):
                try:
                    run(use)
                except RuntimeError as refusal:
                    print(refusal, flush=True)
        os._exit(0)
    os.wait()
"""

OF_THE_APP = (
    "Lock 'cart': the app was opened before this process was forked, and serves the parent only: open it in this "
    "process, in the lifespan of a web application (also with gunicorn --preload), in Celery's worker_process_init, or "
    "in the function that multiprocessing runs"
)
OF_A_BACKEND = "LockAdapter was opened before this process was forked: open it again in this process"


def output(code: str, folder: Path, name: str = "program.py") -> list[str]:
    """The lines that a program writes, also to standard error."""
    (folder / name).write_text(code)
    command = [sys.executable, name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout + done.stderr).splitlines()


def test_a_child_is_told_that_it_was_forked(tmp_path: Path) -> None:
    assert output(FORKED, tmp_path) == [OF_THE_APP, OF_A_BACKEND] * 2


GEVENT = """
from gevent import monkey
monkey.patch_all()
import asyncio
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination

micro = Grelmicro(uses=[Coordination.from_url("memory://")])
try:
    with micro:
        print("open")
except RuntimeError as refusal:
    print(refusal)

async def main():
    async with micro:
        print("open")

try:
    asyncio.run(main())
except RuntimeError as refusal:
    print(refusal)
"""


def test_threads_of_gevent_are_refused(tmp_path: Path) -> None:
    text = (
        "gevent has replaced threads and sockets of this process, and is not supported: run it without "
        "monkey-patching, as with a worker of gunicorn that is none of gevent, such as gthread or uvicorn's"
    )
    assert output(GEVENT, tmp_path) == [text, text]


def test_gevent_beside_is_no_matter(tmp_path: Path) -> None:
    program = GEVENT.replace("monkey.patch_all()", "monkey.patch_subprocess()")
    assert output(program, tmp_path) == ["open", "open"]


@pytest.mark.parametrize(
    ("package", "url", "library"),
    [
        ("redis", "redis://localhost", "the Redis store needs redis-py"),
        ("asyncpg", "postgresql://localhost", "the PostgreSQL store needs asyncpg"),
        ("kubernetes_asyncio", "kubernetes://", "the Kubernetes store needs kubernetes-asyncio"),
    ],
)
def test_a_file_that_hides_a_client_library_is_named(tmp_path: Path, package: str, url: str, library: str) -> None:
    program = f"from grelmicro.coordination import Coordination\nCoordination.from_url({url!r})\n"
    hiding = tmp_path / f"{package}.py"
    text = (
        f"grelmicro.errors.DependencyNotFoundError: {library}, and the file {hiding} is imported in its place: rename "
        "that file"
    )
    assert output(program, tmp_path, hiding.name)[-1] == text, "the program itself is that file"
    hiding.write_text("")
    assert output(program, tmp_path)[-1] == text
