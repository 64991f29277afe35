"""Bare providers and backends serve all they can, and several Coordinations of an app are told apart by name."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock, synchronized
from grelmicro.coordination.memory import MemoryLeaderElectionAdapter, MemoryLockAdapter, MemoryScheduleAdapter
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.providers.sqlite import SQLiteProvider
from grelmicro.task import Tasks
from grelmicro.testing import held_elsewhere, leads, on_memory
from tests.helpers.worlds import eventually

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("provider", [MemoryProvider, MemoryProvider()])
async def test_a_bare_provider_serves_everything(provider: Any) -> None:
    leader, tasks, ran = LeaderElection("feed"), Tasks(), []

    @tasks.every(seconds=60, lock=TaskLock())
    async def job() -> None:
        ran.append(1)

    tasks.add_task(leader)
    async with Grelmicro(uses=[None, provider, tasks]) as micro:
        async with Lock("cart") as held:
            assert held.valid
            assert await micro.coordination.lock("cart").locked()
        await leader.wait_for_leader()
        await eventually(lambda: bool(ran), "the task runs")
        assert await micro.coordination.schedule_backend.claim("report", 1.0)
    with pytest.raises(OutOfContextError):
        await Lock("cart").acquire()


@pytest.mark.parametrize(
    ("adapter", "slot"),
    [
        (MemoryLockAdapter, "lock"),
        (MemoryLeaderElectionAdapter, "election"),
        (MemoryScheduleAdapter, "schedule"),
    ],
)
async def test_a_bare_backend_serves_its_slot_alone(adapter: Callable[[], Any], slot: str) -> None:
    for item in (adapter, adapter()):
        async with Grelmicro(uses=[item]) as micro:
            for each in ("lock", "election", "schedule"):
                if each == slot:
                    assert getattr(micro.coordination, f"{each}_backend").is_open
                else:
                    with pytest.raises(OutOfContextError, match=f"has no {each} backend"):
                        getattr(micro.coordination, f"{each}_backend")


async def test_a_bare_backend_goes_before_a_provider(tmp_path: Path) -> None:
    locks, provider = MemoryLockAdapter(), SQLiteProvider(tmp_path / "locks.db")
    async with Grelmicro(uses=[provider, locks]) as micro:
        assert micro.coordination.lock_backend is locks
        assert micro.coordination.election_backend is provider.leaderelection()


async def test_a_coordination_goes_before_what_is_bare(tmp_path: Path) -> None:
    provider, coordination = SQLiteProvider(tmp_path / "locks.db"), Coordination(MemoryProvider())
    async with Grelmicro(uses=[provider, coordination]) as micro:
        assert micro.coordination is coordination
        assert provider.is_open


@pytest.mark.parametrize("kind", [MemoryProvider, MemoryLockAdapter])
def test_two_that_would_serve_the_same_are_refused(kind: Callable[[], object]) -> None:
    micro = Grelmicro(uses=[kind(), kind()])
    with pytest.raises(SettingsValidationError) as caught:
        _ = micro.coordination
    title = type(kind()).__name__
    assert str(caught.value) == (
        f"Grelmicro uses: {title} and {title} would both serve the slot lock: give the app a Coordination(lock=...) "
        "that says which, or several with name="
    )


async def test_what_is_used_later_is_served_too() -> None:
    micro = Grelmicro()
    with pytest.raises(OutOfContextError, match="this app has no coordination: add one"):
        _ = micro.coordination
    micro.use(MemoryProvider())
    bare = micro.coordination
    async with micro, Lock("cart"):
        assert await bare.lock("cart").locked()


async def test_what_is_bare_is_opened_as_a_coordination_is(caplog: pytest.LogCaptureFixture) -> None:
    async with Grelmicro(uses=[MemoryProvider], environment="production", worker="web-1") as micro:
        assert micro.coordination.is_open
        async with Lock("cart") as held:
            assert held.token.startswith("web-1:task:")
    assert not micro.coordination.is_open
    assert "MemoryStore coordinates within this process only, but this is production" in caplog.text


async def test_it_opens_again_and_on_memory(tmp_path: Path) -> None:
    micro = Grelmicro(uses=[SQLiteProvider(tmp_path / "locks.db")])
    leader = LeaderElection("feed")
    for _ in range(2):
        with on_memory(micro):
            async with micro, held_elsewhere(micro, "cart"), leads(micro, leader):
                assert micro.coordination.lock_backend.scope == "process"
                assert await Lock("cart").locked()
    assert not (tmp_path / "locks.db").exists()
    async with micro:
        assert micro.coordination.lock_backend.scope == "host"


@pytest.fixture
def analytics() -> Coordination:
    return Coordination(MemoryProvider(), name="analytics")


async def test_several_coordinations_are_told_apart_by_name(analytics: Coordination) -> None:
    default = Coordination(MemoryProvider())
    async with Grelmicro(uses=[default, analytics]) as micro:
        assert micro.coordination is default is micro.get("coordination")
        assert micro.get("coordination", "analytics") is analytics
        async with Lock("cart"), TaskLock("report"):
            for source in (analytics, "analytics", analytics.lock_backend):
                assert not await Lock("cart", backend=source).locked()
                assert not await TaskLock("report", backend=source).locked()
            async with Lock("cart", backend="analytics") as held:
                assert held.valid
                assert await analytics.lock("cart").locked()
                assert Lock("cart", backend="analytics").backend is analytics.lock_backend
            await asyncio.to_thread(Lock("cart", backend="analytics").from_thread.locked)

        @synchronized("cart", backend="analytics")
        async def guarded() -> bool:
            return await analytics.lock("cart").locked()

        assert await guarded()
        for source in (analytics, "analytics"):
            assert LeaderElection("feed", backend=source).backend is analytics.election_backend


async def test_a_task_keeps_the_name_of_its_locks_backend(analytics: Coordination) -> None:
    tasks, seen = Tasks(), []

    @tasks.every(seconds=60, lock=TaskLock(backend="analytics"), name="report")
    async def report() -> None:
        seen.append(await analytics.tasklock("report").locked())

    async with Grelmicro(uses=[MemoryProvider, analytics, tasks]):
        await eventually(lambda: bool(seen), "the task runs")
    assert seen == [True]


async def test_a_test_holds_a_lock_where_it_is(analytics: Coordination) -> None:
    micro = Grelmicro(uses=[MemoryProvider, analytics])
    lock = Lock("cart", backend="analytics")
    async with micro, held_elsewhere(micro, lock):
        assert await lock.locked()
        assert not await Lock("cart").locked()


async def test_a_name_that_no_coordination_has_is_refused(analytics: Coordination) -> None:
    async with Grelmicro(uses=[analytics]) as micro:
        with pytest.raises(OutOfContextError, match="no coordination named 'default', but 'analytics': add one"):
            await Lock("cart").locked()
        with pytest.raises(OutOfContextError, match="no coordination named 'default', but 'analytics': add one"):
            _ = micro.coordination
        with pytest.raises(OutOfContextError, match="no coordination named 'cache', but 'analytics'"):
            await Lock("cart", backend="cache").locked()
        with pytest.raises(OutOfContextError, match="this app has no tasks named 'default'"):
            micro.get("tasks")


def test_two_of_one_name_are_refused(analytics: Coordination) -> None:
    with pytest.raises(SettingsValidationError, match="has two Coordinations named 'analytics': give one a name"):
        Grelmicro(uses=[analytics, Coordination(MemoryProvider(), name="analytics")])


@pytest.mark.parametrize("text", ["redis://:secret@cache", ""])
def test_a_url_is_no_name(text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        Lock("cart", backend=text)
    assert str(caught.value).startswith("Lock 'cart': backend is text, but no name of a Coordination: give a URL to ")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", [Lock, TaskLock, LeaderElection])
def test_the_environment_can_be_left_out_for_one(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setenv(f"GREL_{kind.__name__.upper()}_CART_LEASE_DURATION", "33")
    assert kind("cart").config.lease_duration == kind("cart", env_load=True).config.lease_duration == 33
    default = type(kind("cart").config)().lease_duration
    assert kind("cart", env_load=False).config.lease_duration == default
    assert kind("cart", env_load=False, lease_duration=44).config.lease_duration == 44


def test_a_task_without_the_environment_gives_its_lock_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_TASKLOCK_REPORT_LEASE_DURATION", "333")
    assert TaskLock().for_task("report", 60).config.lease_duration == 333
    assert TaskLock(env_load=False).for_task("report", 60).config.lease_duration == 60


async def test_settings_are_replaced_by_keyword() -> None:
    for kind in (Lock, TaskLock, LeaderElection):
        made: Any = kind("cart")
        await made.reconfigure(new_config=made.config.model_copy(update={"lease_duration": 20.0}))
        assert made.config.lease_duration == 20


def test_errors_are_at_the_paths_of_the_design() -> None:
    import grelmicro
    from grelmicro import errors
    from grelmicro.coordination import errors as coordination_errors
    from grelmicro.task import errors as task_errors

    for module in (coordination_errors, task_errors):
        for name in module.__all__:
            assert getattr(module, name) is getattr(errors, name)
    for name in ("GrelmicroError", "OutOfContextError", "SettingsValidationError", "DependencyNotFoundError"):
        assert getattr(grelmicro, name) is getattr(errors, name)
