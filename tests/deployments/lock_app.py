"""A FastAPI application with locked routes that stand still, block and fork.

URL is the store, DIARY the file in which the routes write what they do, and ORDERS a SQLite file with rows that are
written under fences.
"""

import asyncio
import multiprocessing
import os
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
from fastapi import FastAPI, Request, Response

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockHandle, LockNotOwnedError, LockTimeoutError
from grelmicro_fastapi import LockDep, install
from tests.helpers.programs import Diary

diary = Diary(Path(os.environ["DIARY"]))
orders = os.environ["ORDERS"]
micro = Grelmicro(uses=[Coordination.from_url(os.environ["URL"])])
app = FastAPI()
install(app, micro)

present = 0


@app.middleware("http")
async def count(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Count those that are being served."""
    global present
    present += 1
    try:
        return await call_next(request)
    finally:
        present -= 1


@app.get("/who")
async def who() -> dict[str, int]:
    """Who answers, and how many it serves."""
    return {"pid": os.getpid(), "present": present}


@app.get("/thread")
def thread() -> str:
    """Needs a thread of the pool."""
    return "a thread was free"


@app.post("/till")
def till(held: Annotated[LockHandle, LockDep("till", timeout=None)]) -> int:
    """Work of a plain function."""
    diary.note("begins")
    time.sleep(0.02)
    diary.note("ends")
    return held.fencing_token


OrderLock = Annotated[LockHandle, LockDep("order", timeout=30, lease_duration=1.5)]


@app.post("/order")
async def order(held: OrderLock, blocks: float = 0) -> dict[str, object]:
    """Write an order under its fence; before that, block the event loop for some seconds, as nobody should."""
    fence = held.fencing_token
    diary.note(f"holds {fence}")
    threading.Event().wait(blocks)
    diary.note(f"goes on {fence}, lost {held.lost}, written {write(fence)}")
    await asyncio.sleep(0.05)
    diary.note(f"is not cancelled {fence}")
    return {"pid": os.getpid(), "fence": fence}


def write(fence: int) -> bool:
    """Write under a fence; whether no newer one was there before."""
    with closing(sqlite3.connect(orders)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS orders (fence INTEGER NOT NULL)")
        (newest,) = connection.execute("SELECT coalesce(max(fence), 0) FROM orders").fetchone()
        if newest > fence:
            return False
        connection.execute("INSERT INTO orders VALUES (?)", (fence,))
        return True


@app.post("/fork")
async def fork(
    held: Annotated[LockHandle, LockDep("forked", timeout=0, lease_duration=1.5)], how: str, lasts: float = 0
) -> bool:
    """Fork while the lock is held, and end when the child has ended; whether the lock was held all the time."""
    begin = {"os.fork": os_fork, "multiprocessing": multiprocessing_fork}[how]
    await asyncio.to_thread(begin(held, lasts))
    await held.extend()
    return held.valid


def os_fork(held: LockHandle, lasts: float) -> Callable[[], object]:
    """Fork; what waits for the child."""
    pid = os.fork()
    if pid == 0:
        try:
            child(held, lasts)
        finally:
            os._exit(0)
    return partial(os.waitpid, pid, 0)


def multiprocessing_fork(held: LockHandle, lasts: float) -> Callable[[], object]:
    """The same with the standard library's processes."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(held, lasts))
    process.start()
    return process.join


def child(held: LockHandle, lasts: float) -> None:
    """See what the child of a holder has of the lock; it lives for some seconds."""
    diary.note(f"child: lost {held.lost}, valid {held.valid}, files of the store {len(open_files('locks.db'))}")
    asyncio.run(attempts(held))
    time.sleep(lasts)
    diary.note("child: ended")


async def attempts(held: LockHandle) -> None:
    """Try to renew, to release, and to take what the parent holds."""
    for attempt in (held.extend, held.release):
        try:
            await attempt()
        except LockNotOwnedError:
            diary.note(f"child: {attempt.__name__} refused")
    async with micro:
        try:
            await Lock("forked").acquire(timeout=0)
        except LockTimeoutError:
            diary.note("child: the parent holds it")


def open_files(part: str) -> list[str]:
    """The open files of this process with `part` in their path."""
    return [each.path for each in psutil.Process().open_files() if part in each.path]
