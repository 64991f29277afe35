"""`TaskLockDep`: work that a request begins, and that is not to be repeated soon."""

import asyncio
import threading
import time
from typing import Annotated

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import LockHandle, TaskLock
from grelmicro.errors import SettingsValidationError, WouldBlockError
from grelmicro.testing.clock import MovableClock
from grelmicro_fastapi import TaskLockDep
from tests.helpers.stores import TroubledStore, request_lost
from tests.helpers.worlds import eventually
from tests.integrations.asgi import Visitor, client_of, new_app, take_away

Report = Annotated[LockHandle, TaskLockDep("report:{day}", min_hold_duration=5)]


def task_app() -> tuple[FastAPI, MovableClock]:
    clock = MovableClock()
    app, _ = new_app(MemoryStore(clock=clock))

    @app.get("/{day}")
    async def report(day: int, held: Report) -> str:
        return held.name

    @app.get("/fails/{day}")
    async def fail(day: int, held: Report) -> None:
        raise HTTPException(418)

    @app.get("/plain/{day}")
    def plain(day: int, held: Report) -> str:
        return held.name

    return app, clock


@pytest.mark.parametrize(("url", "status"), [("/07", 200), ("/fails/7", 418), ("/plain/7", 200)])
def test_task_lock_stays_for_its_minimum_hold(url: str, status: int) -> None:
    app, clock = task_app()
    with TestClient(app) as client:
        assert client.get(url).status_code == status
        clock.from_thread.advance(2)
        refusal = client.get("/7")
        assert (refusal.status_code, refusal.json()["type"]) == (409, "urn:grelmicro:busy")
        assert refusal.headers["retry-after"] == "3"
        clock.from_thread.advance(2.5)
        assert client.get("/7").status_code == 409
        assert client.get("/8").status_code == 200
        clock.from_thread.advance(1)
        assert client.get("/7").json() == "report:7"


async def test_task_lock_is_refused_while_the_work_runs() -> None:
    app, micro = new_app()
    reached, go_on = asyncio.Event(), asyncio.Event()

    @app.get("/{day}")
    async def report(day: int, held: Annotated[LockHandle, TaskLockDep("report:{day}", min_hold_duration=0.01)]) -> int:
        reached.set()
        await go_on.wait()
        return held.fencing_token

    async with client_of(app) as client:
        first = asyncio.create_task(client.get("/1"))
        await asyncio.wait_for(reached.wait(), 10)
        assert (await client.get("/1")).status_code == 409
        with pytest.raises(WouldBlockError):
            async with TaskLock("report:1", backend=micro.coordination.lock_backend):
                pass
        go_on.set()
        assert (await first).json() == 1


async def test_lost_task_lock_ends_the_handler_or_waits_for_its_thread() -> None:
    app, micro = new_app()
    ended = threading.Event()

    @app.get("/{day}")
    async def report(day: int, held: Annotated[LockHandle, TaskLockDep("report:{day}", lease_duration=1)]) -> None:
        await take_away(micro, held)
        await asyncio.sleep(30)

    @app.get("/plain/{day}")
    def plain(day: int, held: Annotated[LockHandle, TaskLockDep("report:{day}", lease_duration=1)]) -> None:
        asyncio.run_coroutine_threadsafe(take_away(micro, held), micro.get_loop()).result()
        held.from_thread.wait_lost()
        time.sleep(0.2)
        ended.set()

    async with client_of(app) as client:
        for url in ("/1", "/plain/2"):
            answer = await client.get(url)
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:grelmicro:lost")
        assert ended.is_set()


async def test_cancelled_plain_handler_keeps_the_task_lock_while_its_thread_may_run() -> None:
    app, micro = new_app()
    reached, go_on = threading.Event(), threading.Event()

    @app.get("/{day}")
    def report(
        day: int, held: Annotated[LockHandle, TaskLockDep("report:{day}", min_hold_duration=0.01, lease_duration=1.5)]
    ) -> None:
        reached.set()
        go_on.wait(20)

    async with client_of(app) as client:
        request = Visitor(app, "/1").start()
        await eventually(reached.is_set, "the thread runs")
        request.cancel()
        await asyncio.wait({request}, timeout=5)
        lock = TaskLock("report:1", backend=micro.coordination.lock_backend)
        assert await lock.locked()
        go_on.set()
        async with asyncio.timeout(10):
            while (await client.get("/1")).status_code == 409:
                await asyncio.sleep(0.05)


async def test_unanswered_end_of_a_task_lock_keeps_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    store = TroubledStore(MemoryStore())
    app, _ = new_app(store)

    @app.get("/{day}")
    async def report(day: int, held: Report) -> str:
        store.suffer("renew", request_lost)
        return "done"

    async with client_of(app) as client:
        answer = await client.get("/1")
        assert (answer.status_code, answer.json()) == (200, "done")
        assert any("runs out later" in record.message for record in caplog.records)


def test_settings_of_a_task_lock_come_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_REPORT_LEASE_DURATION", "7")
    app, _ = new_app()

    @app.get("/{day}")
    async def report(day: int, held: Annotated[LockHandle, TaskLockDep("report:{day}")]) -> list[object]:
        return [6 < held.expires_in <= 7, held.renewed_automatically]

    with TestClient(app) as client:
        assert client.get("/1").json() == [True, True]
    with pytest.raises(SettingsValidationError, match="min_hold_duration"):
        TaskLockDep("report:{day}", min_hold_duration=8)
