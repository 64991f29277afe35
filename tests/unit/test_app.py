"""An app opens what it uses in order, unwinds what it could not finish, and can be opened again."""

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.context import bound, open_apps
from grelmicro.coordination import Coordination, Lock, OutcomeUnknownError
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import LockNotOwnedError, OutOfContextError, SettingsValidationError
from grelmicro.leases import LeaseStore
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import Tasks
from tests.helpers.parts import Part
from tests.helpers.stores import Gate, TroubledStore, reply_lost
from tests.helpers.worlds import World, eventually

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def log() -> list[str]:
    return []


async def test_parts_open_in_order_and_close_in_reverse(log: list[str]) -> None:
    async with Grelmicro(uses=[Part("a", log), Part("b", log)]):
        log.append("work")
    assert log == ["open a", "open b", "work", "close b", "close a"]


async def test_tasks_open_last_and_close_first(log: list[str]) -> None:
    tasks = Tasks()

    @tasks.every(seconds=60)
    async def tick() -> None:
        return

    class Watched(Part):
        async def __aenter__(self) -> "Watched":
            assert not tasks.is_open
            return await super().__aenter__()

        async def __aexit__(self, *error: object) -> None:
            assert not tasks.is_open
            await super().__aexit__(*error)

    async with Grelmicro(uses=[tasks, Watched("a", log), Coordination(MemoryProvider())]):
        assert tasks.is_open
    assert log == ["open a", "close a"]


async def test_a_part_that_fails_to_open_unwinds_those_before(log: list[str]) -> None:
    failure = ConnectionError("no server")
    micro = Grelmicro(uses=[Part("a", log), Part("b", log, opening=failure), Part("c", log)])
    with pytest.raises(ConnectionError) as caught:
        await micro.__aenter__()
    assert caught.value is failure, "what went wrong is what is raised"
    assert log == ["open a", "close a"]
    assert not micro.is_open
    assert micro not in open_apps
    assert bound.get() is None


async def test_a_part_that_fails_to_close_keeps_no_other_open(log: list[str]) -> None:
    failure = ConnectionError("gone")
    micro = Grelmicro(uses=[Part("a", log), Part("b", log, closing=failure), Part("c", log)])
    with pytest.raises(ConnectionError):
        async with micro:
            pass
    assert log[3:] == ["close c", "close b", "close a"]
    assert not micro.is_open
    assert micro not in open_apps


async def test_a_coordination_that_fails_to_open_closes_its_other_backends(world: World) -> None:
    class Unreachable(TroubledStore):
        async def open(self) -> None:
            raise ConnectionError("no server")

    first, second = world.client(), LockAdapter(Unreachable(world.store()))
    coordination = Coordination(lock=first, election=Unreachable(world.store()))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no server"):
            await coordination.__aenter__()
        assert not first.is_open
        assert not first.store.is_open
    assert not second.is_open


async def test_it_opens_again_after_a_failure_and_after_it_closed(log: list[str]) -> None:
    part = Part("a", log, opening=ConnectionError("not yet"))
    micro = Grelmicro(uses=[Coordination(MemoryProvider()), part])
    with pytest.raises(ConnectionError):
        await micro.__aenter__()
    part.opening = None
    for _ in range(2):
        async with micro, Lock("cart"):
            pass
    assert log == ["open a", "close a"] * 2


async def test_two_users_share_it_and_the_last_one_closes_it(log: list[str]) -> None:
    micro = Grelmicro(uses=[Part("a", log)])
    async with micro:
        async with micro:
            pass
        assert micro.is_open
        assert log == ["open a"]
        assert bound.get() is micro
    assert log == ["open a", "close a"]


async def test_who_comes_while_it_opens_waits_for_that(world: World, log: list[str]) -> None:
    opening = asyncio.Event()

    class Slow(Part):
        async def __aenter__(self) -> "Slow":
            await opening.wait()
            return await super().__aenter__()

    client = world.client()
    micro = Grelmicro(uses=[client, Slow("a", log)])

    async def use() -> bool:
        async with micro:
            return opening.is_set()

    users = [asyncio.create_task(use()) for _ in range(3)]
    await asyncio.sleep(0.01)
    opening.set()
    assert await asyncio.gather(*users) == [True] * 3
    assert not micro.is_open
    assert not client.store.is_open
    assert log == ["open a", "close a"] * (len(log) // 2), "it never opens what is open"


async def test_who_comes_while_it_closes_finds_it_open(world: World) -> None:
    client = LockAdapter(store := world.troubled())
    await client.__aenter__()
    undo = Gate()
    store.suffer("acquire", reply_lost)
    store.suffer("release", undo)
    with pytest.raises(OutcomeUnknownError):
        await Lock("cart", backend=client).acquire()
    await undo.arrived.wait()
    closing = asyncio.create_task(client.__aexit__(None, None, None))
    await asyncio.sleep(0.01)
    opening = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0.01)
    undo.open.set()
    await closing
    await opening
    assert client.is_open
    assert client.store.is_open
    await (await Lock("cart", backend=client).acquire(timeout=5)).release()
    await client.__aexit__(None, None, None)
    assert not client.store.is_open


async def test_cancelled_while_it_opens_it_is_closed(log: list[str]) -> None:
    forever = asyncio.Event()

    @asynccontextmanager
    async def never() -> AsyncIterator[None]:
        await forever.wait()
        yield

    micro = Grelmicro(uses=[Part("a", log), never()])
    opening = asyncio.create_task(micro.__aenter__())
    await eventually(lambda: log == ["open a"], "it began to open")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert log == ["open a", "close a"]
    assert not micro.is_open


async def test_one_app_on_two_event_loops_is_refused(log: list[str]) -> None:
    micro = Grelmicro(uses=[Part("a", log)])
    async with micro:
        with pytest.raises(OutOfContextError, match="is open on another event loop: close it there first"):
            await asyncio.to_thread(lambda: asyncio.run(micro.__aenter__()))
        assert micro.is_open


def test_a_lock_of_the_module_works_in_one_run_after_another() -> None:
    lock = Lock("cart")
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])

    async def main() -> int:
        async with micro, lock as handle:
            waiter = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0)
            fence = handle.fencing_token
        await (await waiter).release()
        return fence

    async def closes_later() -> int:
        async with micro:
            async with lock as handle:
                waiter = asyncio.create_task(lock.acquire())
                await asyncio.sleep(0)
            await (await waiter).release()
        return handle.fencing_token

    assert asyncio.run(closes_later()) < asyncio.run(closes_later())
    with pytest.raises((OutOfContextError, LockNotOwnedError)):  # refused, or given back
        asyncio.run(main())


def test_an_app_that_was_left_open_by_a_run_opens_in_the_next() -> None:
    lock = Lock("cart", auto_renew=True)
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])

    async def leave_open() -> None:
        await micro.__aenter__()
        await lock.acquire()
        await asyncio.sleep(0)

    async def main() -> None:
        async with micro:
            await Lock("other").acquire(timeout=1)

    asyncio.run(leave_open())
    asyncio.run(main())


def leave_what_waits_and_go_on() -> None:
    """Close a loop on which a lock is held, and open the app again on another one."""
    lock = Lock("cart", auto_renew=True)
    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    left: list[asyncio.Task[None]] = []

    async def hold() -> None:
        async with lock as handle:
            left.append(asyncio.create_task(handle.wait_lost()))
            await asyncio.sleep(3600)

    async def leave_open() -> None:
        await micro.__aenter__()
        left.append(asyncio.create_task(holding))
        await asyncio.sleep(0.01)

    async def main() -> None:
        async with micro:
            await Lock("other").acquire(timeout=1)

    holding = hold()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_open())
    loop.close()
    asyncio.run(main())
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    with suppress(RuntimeError):  # its block ends without the loop
        holding.close()


def test_what_waits_on_a_loop_that_was_closed_does_not_disturb_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # A block whose loop is gone cannot be left in order, so Python reports it: here, and not in a later test.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    leave_what_waits_and_go_on()
    gc.collect()


async def test_add_everything_before_it_opens(log: list[str]) -> None:
    micro = Grelmicro()
    micro.use(Part("a", log))
    async with micro:
        with pytest.raises(OutOfContextError) as caught:
            micro.use(Part("b", log))
    assert str(caught.value) == "use() came after the app was opened: add everything before"


def test_what_cannot_be_opened_is_refused() -> None:
    with pytest.raises(SettingsValidationError, match="not int"):
        Grelmicro(uses=[5])
    with pytest.raises(SettingsValidationError, match="uses has two Coordinations named 'default'"):
        Grelmicro(uses=[Coordination(MemoryProvider()), Coordination(MemoryProvider())])
    with pytest.raises(SettingsValidationError, match="environment= should be one of development, test"):
        Grelmicro(environment="prod")


def test_the_environment_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Grelmicro().environment == "development"
    monkeypatch.setenv("GREL_ENVIRONMENT", "production")
    assert Grelmicro().environment == "production"
    assert Grelmicro(environment="test").environment == "test"
    monkeypatch.setenv("GREL_ENVIRONMENT", "prod")
    with pytest.raises(SettingsValidationError, match="GREL_ENVIRONMENT should be one of"):
        Grelmicro()


@pytest.mark.parametrize("environment", ["staging", "production"])
async def test_a_store_of_one_process_warns_where_it_is_deployed(
    caplog: pytest.LogCaptureFixture, environment: str
) -> None:
    caplog.set_level(logging.WARNING)
    async with Grelmicro(uses=[Coordination(MemoryProvider())], environment=environment):
        pass
    assert f"coordinates within this process only, but this is {environment}" in caplog.text


async def test_a_store_of_one_process_warns_under_several_workers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Grelmicro(uses=[Coordination(MemoryProvider())]):
        pass
    assert caplog.text == ""
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    async with Grelmicro(uses=[Coordination(MemoryProvider())]):
        pass
    assert "but several worker processes run" in caplog.text


def test_a_scope_can_be_required(world: World) -> None:
    store: LeaseStore = world.store()
    with pytest.raises(SettingsValidationError, match=f"coordinates within one {store.scope} only"):
        Coordination(store, requires="cluster")
    Coordination(store, requires="process")


def test_uses_is_a_list() -> None:
    coordination: Any = Coordination(MemoryProvider())
    with pytest.raises(SettingsValidationError, match=r"should be a list, not Coordination: Grelmicro\(uses="):
        Grelmicro(uses=coordination)


def test_another_kind_of_event_loop_is_refused() -> None:
    """What trio and other libraries do: they run coroutines, and asyncio knows of nothing that runs."""

    async def in_a_block() -> None:
        async with Lock("cart"):
            pass

    micro = Grelmicro(uses=[Coordination(MemoryProvider())])
    with micro:
        for coroutine in (micro.__aenter__(), in_a_block(), Lock("cart").acquire(timeout=1)):
            with pytest.raises(OutOfContextError, match="no event loop of asyncio runs here"):
                coroutine.send(None)
