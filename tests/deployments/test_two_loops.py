"""An application whose locks are built at import serves one event loop after another, and leaves nothing behind."""

import signal
from pathlib import Path

import pytest

from tests.helpers.scripts import script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

HEAD = """
import asyncio, sys
from typing import Annotated

import httpx2, uvicorn
from fastapi import FastAPI

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, LockHandle
from grelmicro.task import Tasks
from grelmicro_fastapi import LockDep, install

tasks = Tasks()
micro = Grelmicro(uses=[Coordination.from_url(sys.argv[1]), tasks])
leader = micro.coordination.leaderelection("job")
tasks.add_task(leader)
lock = Lock("cart:1")
app = FastAPI()
install(app, micro)

@app.get("/carts/{cart_id}")
async def show(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> int:
    await asyncio.sleep(0.01)
    return held.fencing_token

async def serve():
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as client:
        async with lock:
            waiting = [asyncio.create_task(client.get("/carts/1")) for _ in range(5)]
            await asyncio.sleep(0.1)
            await leader.wait_for_leader()
        fences = [(await each).json() for each in waiting]
    assert len(set(fences)) == 5, fences
    return server, serving
"""

CLOSED = """
async def main():
    server, serving = await serve()
    server.should_exit = True
    await serving

for _ in range(3):
    asyncio.run(main())
print("done", flush=True)
"""

LEFT = """
async def main():
    await serve()

for _ in range(2):
    asyncio.run(main())
print("done", flush=True)
"""

INTERRUPTED = """
async def main():
    server, serving = await serve()
    print("serves", flush=True)
    await serving

asyncio.run(main())
"""


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/locks.db"


def test_one_loop_after_another(tmp_path: Path) -> None:
    with script(HEAD + CLOSED, url(tmp_path)) as program:
        assert program.end() == (0, "done\n", "")


def complaints(errors: str) -> list[str]:
    """The lines that tell of something that was left behind, but for the server's own sockets."""
    words = ("Warning", "never", "ignored", "closed", "different loop", "destroyed")
    lines = (line for line in errors.splitlines() if "<socket.socket" not in line)
    return [line for line in lines if any(word in line for word in words)]


def test_a_server_that_is_left_running(tmp_path: Path) -> None:
    """The end of the event loop cancels its lifespan."""
    with script(HEAD + LEFT, url(tmp_path)) as program:
        code, said, errors = program.end()
    assert (code, said, complaints(errors)) == (0, "done\n", [])


def test_an_interrupted_server(tmp_path: Path) -> None:
    with script(HEAD + INTERRUPTED, url(tmp_path)) as program:
        assert program.hear() == "serves"
        program.send(signal.SIGINT)
        code, _, errors = program.end()
    assert code in (0, -signal.SIGINT)
    assert complaints(errors) == []
