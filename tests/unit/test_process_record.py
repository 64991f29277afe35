"""Each process publishes a record of itself at each store, which holds nobody up and ends with the process."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, Lock, process
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.leases import LeaseStore
from grelmicro.leases.identity import process_id
from grelmicro.testing import MovableClock
from tests.helpers.scripts import script
from tests.helpers.stores import Apply, Fault, TroubledStore, refused, reply_lost, request_lost, silence
from tests.helpers.worlds import World

pytestmark = pytest.mark.usefixtures("nothing_left")

NAME = f"process:{process_id()}"


class DroppingStore(TroubledStore):
    """A store that drops nothing by itself, and what it is told to where that is allowed."""

    def __init__(self, memory: MemoryStore, *, allowed: bool) -> None:
        super().__init__(memory)
        self._memory = memory
        self._allowed = allowed

    async def drop(self, name: str) -> bool:
        """Drop a record."""
        if self._allowed:
            for records in (self._memory._free, self._memory._granted, self._memory._records):
                records.pop(name, None)
        return self._allowed


@pytest.fixture
def store(clock: MovableClock) -> TroubledStore:
    return TroubledStore(MemoryStore(clock=clock))


@asynccontextmanager
async def opened(store: LeaseStore, clock: MovableClock, *, passed: float = 3.0) -> AsyncIterator[Grelmicro]:
    """An app on `store`, some time after it was opened."""
    micro = Grelmicro(uses=[Coordination(store)], worker="web-1")
    async with micro:
        await clock.advance(passed)
        yield micro


async def test_it_tells_what_an_operator_asks_for(store: TroubledStore, clock: MovableClock) -> None:
    async with opened(store, clock):
        record = await store.inner.read(NAME)
        assert record is not None
        assert (record.live, record.worker, record.process) == (True, "web-1", process_id())
        assert record.data.keys() == {"host", "pid", "application", "started", "worker"}
        assert all(record.data.values())
    record = await store.inner.read(NAME)
    assert record is not None
    assert (record.holder, dict(record.data)) == ("", {}), "it is gone with the process"


async def test_a_program_that_is_soon_done_publishes_nothing(store: TroubledStore, clock: MovableClock) -> None:
    async with opened(store, clock, passed=0.9):
        pass
    assert sum(store.calls.values()) == 0


async def test_an_idle_process_writes_seldom(store: TroubledStore, clock: MovableClock) -> None:
    async with opened(store, clock):
        for _ in range(12):
            await clock.advance(299.0)
            record = await store.inner.read(NAME)
            assert record is not None
            assert record.remaining > 299.0
        assert sum(store.calls.values()) <= 13


async def test_a_store_of_one_process_has_none(clock: MovableClock) -> None:
    memory = MemoryStore(clock=clock)
    async with opened(memory, clock):
        assert await memory.read(NAME) is None


@pytest.mark.parametrize("fault", [refused, request_lost, reply_lost, silence])
async def test_trouble_with_it_holds_nothing_up(
    store: TroubledStore, clock: MovableClock, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CLOSE_LIMIT", 0.1)

    async def troubled(apply: Apply) -> object:
        return await (fault(apply) if publishing else apply())

    publishing = True
    store.break_down(troubled, "acquire")
    began = monotonic()
    async with opened(store, clock):
        assert store.calls["acquire"] == 1
        publishing = False
        async with Lock("cart"):
            pass
        publishing = True
        await clock.advance(130.0)  # it is tried again
        assert store.calls["acquire"] >= 3
        store.heal()
        await clock.advance(70.0)
        record = await store.inner.read(NAME)
        assert record is not None
        assert record.live
        store.break_down(silence, "release")
    assert monotonic() - began < 8.0
    store.heal()


async def test_two_apps_of_a_process_share_it(store: TroubledStore, clock: MovableClock) -> None:
    async with opened(store, clock):
        async with opened(store, clock):
            pass
        record = await store.inner.read(NAME)
        assert record is not None
        assert record.live


async def test_where_nothing_is_dropped_it_drops_itself_and_what_is_old(clock: MovableClock) -> None:
    store = DroppingStore(MemoryStore(clock=clock), allowed=True)
    async with store:
        for name in ("process:killed", "break:lock:cart", "lock:cart"):
            await store.acquire(name, "a", 900.0)
        await clock.advance(25 * 3600.0)
        await store.acquire("process:young", "a", 900.0)
        async with opened(store, clock):
            names = [lease.name async for lease in store.scan()]
        assert sorted(names) == sorted(["lock:cart", NAME, "process:young"])
        assert [lease.name async for lease in store.scan()] == ["lock:cart", "process:young"]


async def test_where_nothing_may_be_dropped_there_is_none(clock: MovableClock) -> None:
    store = DroppingStore(MemoryStore(clock=clock), allowed=False)
    async with opened(store, clock, passed=1000.0):
        assert [lease async for lease in store.scan()] == []


HOLDER = """
import asyncio, os, sys
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock, process

process.PUBLISH_DELAY = 0.01
url, namespace, way = sys.argv[1:]
micro = Grelmicro(uses=[Coordination.from_url(url, namespace=namespace)], worker="web-2")

async def hold():
    async with micro:
        async with Lock("cart:42"):
            store = micro.coordination.lock_backend.store
            while not any([lease.live and lease.data async for lease in store.scan("process:")]):
                await asyncio.sleep(0.02)
            print(os.getpid(), flush=True)
            await asyncio.to_thread(sys.stdin.readline)

if way == "forked":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
asyncio.run(hold())
"""


@pytest.mark.parametrize("way", ["ended", "killed", "forked"])
async def test_a_lock_leads_to_the_process_that_holds_it(
    real_world: World, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real_world.kind == "memory":
        pytest.skip("the store of one process")
    if way == "forked" and real_world.kind != "sqlite":
        pytest.skip("the same on every store")
    monkeypatch.setattr(process, "PUBLISH_DELAY", 3600.0)
    url = real_world.url or f"sqlite:///{real_world.path}"
    namespace = real_world.namespace
    watching = Coordination.from_url(url, namespace=namespace)
    with script(HOLDER, url, namespace, way) as program:
        pid = int(await asyncio.to_thread(program.hear))
        async with watching:
            found = await watching.holder_of("cart:42")
            assert found is not None
            assert (found.worker, found.pid) == ("web-2", pid)
            assert found.host
            assert found.application
            assert found.started_at is not None
            assert found.seen_at is not None
            assert found.since <= found.until
            if way == "killed":
                program.send(signal.SIGKILL)
                await asyncio.to_thread(program._process.wait)
                assert (await watching.holder_of("cart:42")) is not None
                return
            program.tell()
            assert (await asyncio.to_thread(program.end)).code == 0
            assert await watching.holder_of("cart:42") is None
            backend = watching.lock_backend
            assert isinstance(backend, LockAdapter)
            assert not [lease async for lease in backend.store.scan("process:") if lease.live or lease.data]
