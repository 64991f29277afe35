"""A store that ignores cancellation does not hold up the end of an app, and the log names what is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, HealthCheck, LeaderElection, Lock, TaskLock
from grelmicro.task import Tasks
from tests.helpers.stores import Apply, TroubledStore
from tests.helpers.worlds import eventually

LONG = 3600.0
PROMPT = 10.0
"""Real seconds within which an app must close whose limits are a tenth of a second; the machine may be busy."""


class DeafStore(TroubledStore):
    """One whose requests can be made to go on, whatever cancels them, until `hear` is set."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.hear = asyncio.Event()
        self.deaf_at_the_end = False

    async def ignore(self, apply: Apply) -> object:
        """What becomes of a request."""
        while not self.hear.is_set():
            with suppress(asyncio.CancelledError):
                await self.hear.wait()
        return await apply()

    async def close(self) -> None:
        if self.deaf_at_the_end:
            await self.ignore(super().close)
        else:
            await super().close()


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> AsyncIterator[DeafStore]:
    for limit in (
        "lifecycle.END_LIMIT",
        "coordination.adapters.DRAIN_LIMIT",
        "leases.lease.CLOSE_LIMIT",
        "task.tasks.RELEASE_LIMIT",
    ):
        monkeypatch.setattr(f"grelmicro.{limit}", 0.1)
    store = DeafStore()
    yield store
    store.hear.set()


async def end(app: Grelmicro) -> None:
    async with asyncio.timeout(PROMPT):
        await app.__aexit__(None, None, None)


async def test_a_release(store: DeafStore, caplog: pytest.LogCaptureFixture) -> None:
    app = Grelmicro(uses=[Coordination(store)])
    async with app:
        pass
    await app.__aenter__()
    handle = await Lock("cart", lease_duration=LONG).acquire()
    store.break_down(store.ignore, "release")
    releasing = asyncio.create_task(handle.release())
    await eventually(lambda: store.calls["release"], "it is sent")
    handle.give_back()
    await end(app)
    assert "closing before 1 releases were confirmed, such as of lock:cart: the leases end by themselves" in caplog.text
    assert "ending lock:cart ignores its cancellation, and is left behind" in caplog.text
    store.hear.set()
    await asyncio.wait({releasing})


async def test_a_renewal(store: DeafStore, caplog: pytest.LogCaptureFixture) -> None:
    app = Grelmicro(uses=[Coordination(store)])
    await app.__aenter__()
    handle = await Lock("cart", lease_duration=0.3, auto_renew=True).acquire()
    store.break_down(store.ignore, "renew_many")
    await eventually(lambda: store.calls["renew_many"], "it is sent")
    await end(app)
    assert handle.lost
    assert "renewing 1 leases, such as lock:cart, ignores its cancellation, and is left behind" in caplog.text


async def test_its_own_end(store: DeafStore, caplog: pytest.LogCaptureFixture) -> None:
    app = Grelmicro(uses=[Coordination(store)])
    await app.__aenter__()
    store.deaf_at_the_end = True
    await end(app)
    assert not store.is_open
    assert "closing DeafStore took longer than 0.1 s, and is cancelled" in caplog.text
    assert "closing DeafStore ignores its cancellation, and is left behind" in caplog.text


@pytest.mark.parametrize("operation", ["acquire", "renew"])
async def test_a_task_with_a_lock(store: DeafStore, caplog: pytest.LogCaptureFixture, operation: str) -> None:
    """Before its function, or after it."""
    runs: list[str] = []
    tasks = Tasks(shutdown_timeout=0.1)

    @tasks.every(seconds=60, lock=TaskLock(), name="job")
    async def job() -> None:
        runs.append("run")

    store.break_down(store.ignore, operation)
    app = Grelmicro(uses=[Coordination(store), tasks])
    await app.__aenter__()
    await eventually(lambda: store.calls[operation], "it is sent")
    await end(app)
    assert "grelmicro-task-job ignores its cancellation, and is left behind" in caplog.text
    before = list(runs)
    store.hear.set()
    await asyncio.sleep(0.05)
    assert runs == before, "nothing runs once the app is closed"


@pytest.mark.parametrize("operation", ["watch", "acquire", "renew", "release"])
async def test_an_election(store: DeafStore, caplog: pytest.LogCaptureFixture, operation: str) -> None:
    leader = LeaderElection(
        "job", lease_duration=0.3, renew_deadline=0.2, retry_interval=0.02, backend_timeout=0.1, error_interval=1
    )
    app = Grelmicro(uses=[Coordination(store), Tasks(tasks=[leader], shutdown_timeout=1.0)])
    store.break_down(store.ignore, operation)
    await app.__aenter__()
    if operation == "release":
        await asyncio.wait_for(leader.wait_for_leader(), PROMPT)
    else:
        await eventually(lambda: store.calls[operation], "it is sent")
    await end(app)
    assert "grelmicro-election-job ignores its cancellation, and is left behind" in caplog.text
    store.hear.set()
    await eventually(lambda: not leader.is_running(), "it ends once it can")
    assert not leader.is_leader()


async def test_a_health_check(store: DeafStore, caplog: pytest.LogCaptureFixture) -> None:
    coordination = Coordination(store)
    app = Grelmicro(uses=[coordination])
    app.use(HealthCheck(coordination))
    store.break_down(store.ignore, "acquire")
    await app.__aenter__()
    await eventually(lambda: store.calls["acquire"], "it is sent")
    await end(app)
    assert "grelmicro-health ignores its cancellation, and is left behind" in caplog.text


async def test_a_function_in_a_thread_has_all_the_time(store: DeafStore) -> None:
    """Nothing can end it, so its lease is kept until it has ended."""
    tasks = Tasks(shutdown_timeout=0.0)
    ended: list[str] = []
    loop = asyncio.get_running_loop()

    @tasks.every(seconds=60, lock=TaskLock(auto_renew=True), name="job")
    def job() -> None:
        asyncio.run_coroutine_threadsafe(store.hear.wait(), loop).result(PROMPT)
        ended.append("job")

    app = Grelmicro(uses=[Coordination(store), tasks])
    await app.__aenter__()
    await eventually(lambda: store.calls["acquire"], "it runs")
    loop.call_later(0.5, store.hear.set)
    await end(app)
    assert ended == ["job"]
