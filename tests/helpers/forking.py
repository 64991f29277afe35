"""Parts of programs that fork while they have a store open: how the child ends, and how the parent waits for that.

Between them stands a program's coroutine function `main`, in which `await fork()` makes a child that ends in the `way`
of its name; the store's adapter is `backend`.
"""

import pytest

from tests.helpers.matrix import FURTHER

WAYS = ["exits", "abandons", "forgets", "opens anew", "ends the loop", "is a process"]

ALWAYS = [("plain", "exits"), ("plain", "ends the loop"), ("encrypted", "forgets"), ("encrypted", "is a process")]

CASES = [
    pytest.param(kind, way, marks=() if (kind, way) in ALWAYS else FURTHER)
    for kind in ("plain", "encrypted")
    for way in WAYS
]
"""How the connection is made, and what becomes of the child."""

CHILDREN = """
import asyncio, gc, multiprocessing, os, sys, warnings

warnings.simplefilter("ignore", DeprecationWarning)
url, plain, way = sys.argv[1:]

async def anew():
    async with backend:
        gc.collect()
        assert (await backend.acquire("lock:a", "other", 1.0)).holder == "h"

def end():
    if way == "abandons":
        backend.store.abandon()
        gc.collect()
    if way == "opens anew":
        asyncio.run(anew())
    if way == "forgets":
        backend.store._opened = None
        del globals()["backend"]
        gc.collect()
    sys.exit(0)

async def fork():
    if way == "is a process":
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        await asyncio.to_thread(child.join)
        assert child.exitcode == 0
        return
    pid = os.fork()
    if pid == 0:
        if way == "ends the loop":
            sys.exit(0)
        raise KeyError  # out of the loop, which is left as it is
    if way != "ends the loop":
        assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
        return
    # The child has closed the loop, and with it, as asyncio does it, what tells the parent's loop of threads.
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        await asyncio.sleep(0.01)
    assert ended[1] == 0
"""

RUN = """
if way == "ends the loop":
    asyncio.run(main())
else:
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
    except KeyError:
        end()
    loop.close()
"""
