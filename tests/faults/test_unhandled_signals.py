"""A web process that a signal ends at once, since its server handles none, hands leadership over before."""

import signal
from pathlib import Path

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from tests.helpers.scripts import script

PROGRAM = """
import asyncio, sys
from starlette.applications import Starlette
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from grelmicro.task import Tasks
from grelmicro_starlette import install, lifespan

url, kind, work = sys.argv[1:]
sys.modules["grelmicro_starlette.lifespan"].LEAVE_LIMIT = 0.3 if work == "stubborn" else 30
micro = Grelmicro(uses=[Coordination.from_url(url)])
leader = micro.coordination.leaderelection("feed")
app = Starlette()

async def feed():
    print("leads", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(60 if work == "stubborn" else 0.2)

async def main():
    if kind == "lead":
        app.router.lifespan_context = lifespan(micro, lead={leader: feed})
    else:
        micro.use(Tasks(tasks=[leader]))
        install(app, micro)
    async with app.router.lifespan_context(app):
        if kind == "tasks":
            await leader.wait_for_leader()
            print("leads", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def leads(url: str) -> bool:
    async with Grelmicro(uses=[Coordination.from_url(url)]) as micro:
        record = await micro.coordination.election_backend.read("leader:feed")
    return record is not None and record.live


@pytest.mark.parametrize("kind", ["lead", "tasks"])
@pytest.mark.parametrize("times", [1, 3])
async def test_it_hands_over_and_dies_of_the_signal(tmp_path: Path, kind: str, times: int) -> None:
    url = f"sqlite:///{tmp_path / 'locks.db'}"
    with script(PROGRAM, url, kind, "prompt") as program:
        assert program.hear() == "leads"
        for _ in range(times):  # servers send their workers another one after the terminal did
            program.send(signal.SIGTERM)
        assert program.end().code == -signal.SIGTERM
    assert not await leads(url)


async def test_work_that_does_not_end_keeps_no_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'locks.db'}"
    with script(PROGRAM, url, "lead", "stubborn") as program:
        assert program.hear() == "leads"
        program.send(signal.SIGTERM)
        assert program.end().code == -signal.SIGTERM
    assert await leads(url)
