"""An application's own `Grelmicro` on memory for a test."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import (
    BackendUnavailableError,
    Coordination,
    LeaderElection,
    Lock,
    LockTimeoutError,
    TaskLock,
    WouldBlockError,
)
from grelmicro.coordination.adapters import LeaseAdapter
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.leases import LeaseStore
from grelmicro.providers.memory import MemoryProvider
from grelmicro.providers.redis import RedisProvider
from grelmicro.providers.sqlite import SQLiteProvider
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock, held_elsewhere, on_memory
from tests.helpers.worlds import eventually

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(params=[NOWHERE, "postgresql://127.0.0.1:1/shop", "sqlite:///{folder}/locks.db", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The store that an application is built for; no server is there."""
    return str(request.param).format(folder=tmp_path)


def store_of(micro: Grelmicro) -> LeaseStore:
    """Where the app has its locks now."""
    backend = micro.coordination.lock_backend
    assert isinstance(backend, LeaseAdapter)
    return backend.store


async def test_an_app_for_any_store_needs_none(url: str, tmp_path: Path, nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(url)])
    store = store_of(micro)
    built = micro.coordination.lock("cart")
    for _ in range(2):
        with on_memory(micro) as app:
            assert app is micro
            async with micro:
                async with Lock("cart") as held:
                    assert held.fencing_token == 1
                    with pytest.raises(WouldBlockError):
                        await built.acquire_nowait()
                async with built as held:
                    assert held.fencing_token == 2
                assert await micro.coordination.schedule_backend.claim("report", 1.0)
                assert micro.coordination.lock_backend.scope == "process"
    assert os.listdir(tmp_path) == []
    for backend in micro.coordination.backends:
        assert isinstance(backend, LeaseAdapter)
        assert backend.store is store
        assert backend.clock is store.clock


async def test_the_app_goes_on_with_its_own_store_afterwards(tmp_path: Path, nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(f"sqlite:///{tmp_path}/locks.db")])
    lock = Lock("cart")
    async with micro, lock as before:
        pass
    with on_memory(micro):
        async with micro, lock as in_memory:
            assert in_memory.fencing_token == 1
    async with micro, lock as after:
        assert after.fencing_token == before.fencing_token + 1


async def test_without_it_the_server_is_missed(nothing_left: None) -> None:
    """Which the other tests would not notice."""
    with pytest.raises(BackendUnavailableError):
        async with Grelmicro(uses=[Coordination.from_url(NOWHERE)]), Lock("cart"):
            pass


async def test_providers_that_the_app_opens_move_too(tmp_path: Path, nothing_left: None) -> None:
    provider, other = RedisProvider(NOWHERE), SQLiteProvider(tmp_path / "locks.db")
    micro = Grelmicro(uses=[provider, other, Coordination(provider, lock=other)])
    elsewhere = Lock("cart", backend=provider.lock())
    with on_memory(micro):
        late = other.leaderelection()
        async with micro:
            await provider.check()
            await other.check()
            async with provider.lock(), Lock("cart") as held, elsewhere:  # two stores, so two locks
                assert held.valid
            async with late:
                assert (await late.acquire("leader:feed", "a", 5.0)).granted_to("a")
    assert late.store is other.store
    assert elsewhere.backend is provider.lock()
    assert provider.lock().store is provider.store
    assert os.listdir(tmp_path) == []


async def test_a_coordination_without_an_app(nothing_left: None) -> None:
    coordination = Coordination.from_url(NOWHERE)
    with on_memory(coordination):
        async with coordination, coordination.lock("cart") as held:
            assert held.fencing_token == 1


async def test_the_test_moves_the_time_of_leases_and_of_tasks(nothing_left: None) -> None:
    tasks = Tasks()
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE), tasks])
    fires: list[float] = []
    clock = MovableClock()

    @tasks.every(seconds=60, lock=TaskLock(), name="tick")
    async def tick() -> None:
        fires.append(clock.now())

    with on_memory(micro, clock=clock):
        async with micro:
            await Lock("cart", lease_duration=30).acquire()
            await clock.advance(0)
            assert fires == [1_000.0]
            waiting = asyncio.create_task(Lock("cart").acquire())
            await clock.advance(29)
            assert not waiting.done()
            await clock.advance(2)
            assert (await waiting).valid
            await clock.advance(30)
            assert fires == [pytest.approx(1_000.0, abs=0.1), pytest.approx(1_060.0, abs=0.1)]


async def test_held_elsewhere_and_a_timeout_need_no_waiting(nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    clock = MovableClock()
    with on_memory(micro, clock=clock):
        async with micro, held_elsewhere(micro, "cart"):
            waiting = asyncio.create_task(Lock("cart").acquire(timeout=30))
            await clock.advance(31)
            with pytest.raises(LockTimeoutError):
                await waiting


async def test_each_block_counts_from_zero_and_the_counts_before_come_back(nothing_left: None) -> None:
    tasks = Tasks()
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), tasks])

    @tasks.every(seconds=3600, name="tick")
    async def tick() -> None: ...

    (task,) = tasks.tasks
    assert isinstance(task, IntervalTask)

    async def fire_once() -> None:
        async with micro:
            await eventually(lambda: task.last_fire, "it fired")
            assert task.outcomes["success"] == 1

    async with micro:
        await eventually(lambda: task.outcomes["success"] == 1, "it fired")
    before = task.last_fire
    for _ in range(2):
        with on_memory(micro):
            assert task.last_fire is None
            await fire_once()
    assert task.last_fire is before
    assert task.outcomes["success"] == 1


def test_what_a_thread_left_held_is_free_in_the_next_test() -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    lock = Lock("cart")
    for clock in (None, MovableClock(), MovableClock(), None):
        with on_memory(micro, clock=clock), micro:
            assert lock.from_thread.acquire().fencing_token == 1


def test_what_a_thread_left_held_in_the_own_store_is_free_in_memory(tmp_path: Path) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(f"sqlite:///{tmp_path}/locks.db")])
    lock = Lock("cart")
    with micro:
        lock.from_thread.acquire()
    with on_memory(micro), micro:
        assert lock.from_thread.acquire().fencing_token == 1


async def test_leases_are_renewed_by_the_clock_of_the_test(nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    clock = MovableClock()
    with on_memory(micro, clock=clock):
        async with micro, Lock("cart", lease_duration=9, auto_renew=True) as held:
            await clock.advance(100)
            assert held.valid


async def test_tasks_have_their_own_time_back(nothing_left: None) -> None:
    tasks = Tasks()
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), tasks])
    fires: list[None] = []
    tasks.every(seconds=0.02, name="tick")(lambda: fires.append(None))
    with on_memory(micro, clock=MovableClock()):
        async with micro:
            await eventually(lambda: fires, "it fired")
    async with micro:
        await eventually(lambda: len(fires) > 3, "it fires in real time")


def test_it_serves_one_event_loop_after_another() -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    lock = Lock("cart")

    async def steps() -> None:
        async with micro, lock as held:
            assert held.fencing_token == 1

    for _ in range(2):
        with on_memory(micro):
            asyncio.run(steps())


def test_a_plain_with_opens_it_in_a_thread() -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    with on_memory(micro), micro, Lock("cart").from_thread as held:
        assert held.fencing_token == 1


# What is refused.


async def test_an_open_app_is_refused(nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    async with micro:
        with (
            pytest.raises(
                OutOfContextError,
                match="Grelmicro is open: enter it before the app is opened; if this test did not open it, an earlier",
            ),
            on_memory(micro),
        ):
            pass
        async with Lock("cart") as held:
            assert held.fencing_token == 1
    with on_memory(micro):
        pass


@pytest.mark.parametrize("part", ["coordination", "provider"])
async def test_an_app_of_which_a_part_is_open_is_refused(part: str, nothing_left: None) -> None:
    provider = MemoryProvider()
    micro = Grelmicro(uses=[provider, Coordination(provider)])
    opened: AbstractAsyncContextManager[object] = provider if part == "provider" else micro.coordination
    async with opened:
        with pytest.raises(OutOfContextError, match="is open: enter it before"), on_memory(micro):
            pass
    with on_memory(micro):
        pass


def test_two_blocks_around_one_app_are_refused() -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    store = store_of(micro)
    with on_memory(micro):
        with pytest.raises(OutOfContextError, match="on memory already"), on_memory(micro):
            pass
        assert store_of(micro) is not store
    assert store_of(micro) is store


async def test_an_app_that_is_left_open_is_told(nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    async with AsyncExitStack() as stack:
        told = pytest.raises(OutOfContextError, match="close it inside the block, also when the test fails")
        with told, on_memory(micro):
            await stack.enter_async_context(micro)
        async with Lock("cart") as held:  # it still serves, and reaches for no server
            assert held.valid
    with on_memory(micro):
        async with micro:
            pass


async def test_the_error_of_a_test_stays_the_first(nothing_left: None) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    store = store_of(micro)
    with pytest.raises(LookupError) as failed, on_memory(micro):
        async with micro:
            raise LookupError
    assert not hasattr(failed.value, "__notes__")
    assert store_of(micro) is store
    async with AsyncExitStack() as stack:
        with pytest.raises(LookupError) as failed, on_memory(micro):
            await stack.enter_async_context(micro)
            raise LookupError
        assert "close it inside the block" in failed.value.__notes__[0]


def test_what_a_dead_event_loop_left_open_is_closed() -> None:
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
    store = store_of(micro)
    lock = Lock("cart")

    async def steps() -> None:
        await micro.__aenter__()
        await lock.acquire()

    for _ in range(2):
        with on_memory(micro):
            asyncio.run(steps())
            assert micro.is_open
        assert not micro.is_open
        assert store_of(micro) is store


class Silent:
    """A backend of locks that is not on a store of leases."""

    scope = "cluster"

    async def __aenter__(self) -> "Silent":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def test_what_cannot_be_replaced_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    coordination = Coordination.from_url("memory://")
    monkeypatch.setattr(coordination, "_lock", Silent())
    provider = SQLiteProvider(tmp_path / "locks.db")
    for micro, title in (
        (Grelmicro(uses=[provider, coordination]), "Silent"),
        (Grelmicro(uses=[provider.store, Coordination(provider)]), "SQLiteStore"),
    ):
        with pytest.raises(SettingsValidationError, match=f"take the place of {title}: give the app"), on_memory(micro):
            pass
        assert type(provider.store).__name__ == "SQLiteStore"


async def test_what_else_the_app_uses_is_left_alone(nothing_left: None) -> None:
    opened: list[str] = []

    @asynccontextmanager
    async def database() -> AsyncIterator[None]:
        opened.append("database")
        yield
        opened.append("closed")

    with on_memory(Grelmicro(uses=[database(), Coordination.from_url(NOWHERE)])) as micro:
        async with micro:
            assert opened == ["database"]
    assert opened == ["database", "closed"]


async def test_an_election_needs_no_server(nothing_left: None) -> None:
    leader = LeaderElection("feed")
    micro = Grelmicro(uses=[Coordination.from_url(NOWHERE), Tasks(tasks=[leader])])
    for _ in range(2):
        with on_memory(micro):
            async with micro:
                await leader.wait_for_leader()
                assert leader.guard().fence == 1


def test_apps_of_several_threads_share_nothing() -> None:
    problems: list[BaseException] = []
    ready = threading.Barrier(4)

    def run(steps: Callable[[], object]) -> None:
        try:
            steps()
        except BaseException as problem:
            problems.append(problem)

    def steps() -> None:
        async def hold() -> None:
            async with micro, Lock("cart") as held:
                assert held.fencing_token == 1
                with suppress(threading.BrokenBarrierError):
                    await asyncio.to_thread(ready.wait, 10)

        micro = Grelmicro(uses=[Coordination.from_url(NOWHERE)])
        with on_memory(micro):
            asyncio.run(hold())

    threads = [threading.Thread(target=run, args=(steps,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
