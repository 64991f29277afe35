"""An outage of a store: one warning at its begin and one at its end, however many users of the store notice it."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from grelmicro import Grelmicro
from grelmicro.backends.hints import ANSWER_LIMIT, LONGEST_PAUSE, Hints
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, HealthCheck, LeaderElection, Lock, TaskLock
from grelmicro.coordination.provider import Provider
from grelmicro.events import Event, listen
from grelmicro.leases.outage import STALE_AFTER_S, Outage, shared_outage
from grelmicro.task import Tasks
from grelmicro.testing import MovableClock
from tests.helpers.stores import TroubledStore, refused
from tests.helpers.switchboard import Switchboard
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartRedis

pytestmark = pytest.mark.usefixtures("nothing_left")

logger = logging.getLogger("grelmicro.coordination")
DOWN = ConnectionRefusedError("refused")


@pytest.fixture
def events() -> Iterator[list[tuple[str, str, str]]]:
    seen: list[tuple[str, str, str]] = []

    def hear(event: Event) -> None:
        if event.kind in ("outage", "recovered"):
            seen.append((event.kind, event.name, event.detail))

    stop = listen(hear)
    yield seen
    stop()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in told if "trouble" in line or "works again" in line]


# The outage itself


def test_it_lasts_until_all_who_noticed_it_have_had_success(
    caplog: pytest.LogCaptureFixture, events: list[tuple[str, str, str]]
) -> None:
    outage = Outage("the store", logger, emits=True)
    outage.note(DOWN, 1.0, source="a")
    outage.note(DOWN, 2.0, source="b")
    outage.note(DOWN, 3.0, source="c", awaited=False)
    outage.over(4.0, "a")
    outage.over(4.0, "another")
    assert outage.is_on, "b has had none yet, so that one that fails alone does not end and begin it again and again"
    outage.over(5.0, "b")
    assert not outage.is_on
    assert warnings(caplog) == [
        "the store (a) has trouble since 0.0 s: refused",
        "the store works again after 4.0 s",
    ]
    assert events == [("outage", "the store", "ConnectionRefusedError"), ("recovered", "the store", "")]


def test_who_is_not_heard_of_any_more_is_not_awaited(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("the store", logger)
    outage.note(DOWN, 0.0, source="a")
    outage.over(STALE_AFTER_S - 1.0, "b")
    assert outage.is_on
    outage.over(STALE_AFTER_S, "b")
    assert not outage.is_on
    assert len(warnings(caplog)) == 2


def test_who_leaves_is_not_awaited(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("the store", logger)
    outage.note(DOWN, 0.0, source="a")
    outage.note(DOWN, 0.0, source="b")
    outage.leave("a")
    outage.leave("c")
    outage.over(1.0)
    assert outage.is_on
    outage.leave("b")
    assert outage.is_on
    outage.over(2.0)
    assert not outage.is_on
    assert len(warnings(caplog)) == 2
    outage.note(DOWN, 3.0, source="a")
    outage.forget()
    outage.over(4.0)
    assert len(warnings(caplog)) == 3, "nobody has used the store since"


def test_one_that_nobody_is_awaited_for_ends_with_the_first_success(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("the store", logger)
    outage.note(DOWN, 0.0, source="hints", awaited=False)
    outage.over(1.0)
    assert not outage.is_on


def test_backends_that_tell_no_outage_have_one_of_their_own() -> None:
    own = Outage("own", logger)
    store = MemoryStore()
    assert shared_outage(Provider(store).lock(), own) is shared_outage(Provider(store).leaderelection(), own)
    assert shared_outage(object(), own) is own


# Its users


async def test_all_users_of_a_store_tell_it_once(
    clock: MovableClock, caplog: pytest.LogCaptureFixture, events: list[tuple[str, str, str]]
) -> None:
    store = TroubledStore(MemoryStore(clock=clock))
    coordination = Coordination(store)
    leaders = [LeaderElection(f"role{number}") for number in range(3)]
    check = HealthCheck(coordination, leaders=leaders, clock=clock)
    tasks = Tasks(tasks=leaders, clock=clock)
    for number in range(3):
        tasks.every(seconds=2, name=f"job{number}", lock=TaskLock())(lambda: None)
    async with Grelmicro(uses=[coordination, check, tasks]):
        await eventually(lambda: all(leader.is_leader() for leader in leaders), "all lead")
        locks = [Lock(f"lock{number}", lease_duration=30.0, auto_renew=True) for number in range(3)]
        for lock in locks:
            await lock.acquire()
        for _ in range(2):
            store.break_down(refused)
            await clock.advance(100.0)
            assert len(warnings(caplog)) == 1
            store.heal()
            await clock.advance(30.0)
            await eventually(lambda: not store.outage.is_on, "it is over")
            begun, over = warnings(caplog)
            assert begun.startswith("TroubledStore (")
            assert ") has trouble since 0.0 s: " in begun
            assert begun.endswith("the store is down"), "whoever noticed it first"
            assert over.startswith("TroubledStore works again after ")
            caplog.clear()
    assert [kind for kind, _, _ in events] == ["outage", "recovered"] * 2


async def test_a_store_that_is_closed_or_left_by_a_fork_has_no_outage(clock: MovableClock) -> None:
    store = MemoryStore(clock=clock)
    backend = Provider(store).lock()
    async with backend:
        store.outage.note(DOWN, 0.0)
    assert not store.outage.is_on
    store.outage.note(DOWN, 0.0)
    backend.abandon()
    assert not store.outage.is_on


async def test_hints_tell_an_outage_of_the_store_as_such(clock: MovableClock, caplog: pytest.LogCaptureFixture) -> None:
    feed, store = Switchboard(), Outage("the store", logger)
    feed.down = True
    hints = Hints(feed, clock, store)
    await hints.start()
    async with hints.watch("a") as waiter:
        await clock.advance(100.0)
        assert warnings(caplog) == ["the store (hints) has trouble since 0.0 s: connection refused"]
        feed.down = False
        await clock.advance(LONGEST_PAUSE)
        await eventually(lambda: waiter.pushes, "hints come again")
        assert len(warnings(caplog)) == 2
        assert not store.is_on
    await hints.close()


async def test_hints_that_fail_alone_are_told_alone(clock: MovableClock, caplog: pytest.LogCaptureFixture) -> None:
    feed, store = Switchboard(), Outage("the store", logger)
    feed.deaf = True
    hints = Hints(feed, clock, store)
    starting = asyncio.create_task(hints.start())
    await asyncio.sleep(0.01)
    await clock.advance(ANSWER_LIMIT + 1.0)
    await starting
    async with hints.watch("a"):
        await clock.advance(100.0)
        assert not store.is_on
        (warning,) = warnings(caplog)
        assert warning.startswith("the store: waking waiters at once (they poll meanwhile) has trouble")
    await hints.close()


async def test_a_real_server_that_is_away_for_a_while(
    start_redis: StartRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever notices it first."""
    server = start_redis()
    coordination = Coordination.from_url(server.url)
    leaders = [
        LeaderElection(f"role{number}", lease_duration=3.0, renew_deadline=2.0, retry_interval=0.2, backend_timeout=1.0)
        for number in range(3)
    ]
    check = HealthCheck(coordination, leaders=leaders, interval=0.2)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(Grelmicro(uses=[coordination, check, Tasks(tasks=leaders)]))
        await eventually(lambda: all(leader.is_leader() for leader in leaders), "all lead")
        held = [await Lock(f"lock{number}", lease_duration=1.5, auto_renew=True).acquire() for number in range(3)]
        server.stop()
        await eventually(lambda: all(not each.valid for each in held), "the locks are lost")
        server.start()
        await eventually(lambda: all(leader.is_leader() for leader in leaders), "all lead again")
        await eventually(lambda: len(warnings(caplog)) == 2, "it is over")
        begun, over = warnings(caplog)
        assert begun.startswith(server.url)
        assert over.startswith(f"{server.url} works again after ")
        await asyncio.sleep(0.5)
        assert len(warnings(caplog)) == 2
