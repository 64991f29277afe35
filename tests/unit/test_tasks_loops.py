"""Tasks and elections serve one event loop after another, also when one ended without closing them."""

import asyncio
import logging

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, TaskLock
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import Tasks


class Service:
    """An app with an election and two tasks, at module level, as it were."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.leader = LeaderElection("job")
        self.tasks = Tasks(tasks=[self.leader])
        self.tasks.every(seconds=0.02, name="locked", lock=TaskLock())(self.locked)
        self.tasks.every(seconds=0.02, name="gated", leader=self.leader)(self.gated)
        self.micro = Grelmicro(uses=[Coordination(MemoryProvider()), self.tasks])

    async def locked(self) -> None:
        self.ran.append("locked")

    async def gated(self) -> None:
        self.ran.append("gated")

    async def all_run(self) -> None:
        """Wait until both tasks ran again."""
        self.ran.clear()
        async with asyncio.timeout(10):
            while not {"locked", "gated"} <= set(self.ran):
                await asyncio.sleep(0.005)


def test_they_open_on_one_loop_after_another(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()

    async def main() -> None:
        async with service.micro:
            await service.all_run()
        assert not service.leader.is_running()

    for _ in range(3):
        asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_they_open_after_a_loop_that_ended_without_closing_them() -> None:
    service = Service()

    async def main() -> None:
        await service.micro.__aenter__()
        await service.all_run()

    async def close() -> None:
        async with service.micro:
            await service.all_run()

    for _ in range(3):
        asyncio.run(main())
        assert not service.leader.is_leader()
    asyncio.run(close())
