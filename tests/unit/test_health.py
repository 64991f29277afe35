"""`HealthCheck`: what is known of the stores and elections at any moment, whatever the stores do."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from grelmicro import lifecycle
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, HealthCheck, HealthReport, LeaderElection
from grelmicro.coordination.adapters import LONGEST_PAUSE
from grelmicro.errors import SettingsValidationError
from grelmicro.testing import MovableClock
from tests.helpers.elections import Fleet
from tests.helpers.stores import Apply, Fault, TroubledStore, refused, reply_lost, reply_never, request_lost, silence
from tests.helpers.timeline import takes
from tests.helpers.worlds import World

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass
class Checked:
    """A check of one store, on a clock that the test moves."""

    check: HealthCheck
    store: TroubledStore
    clock: MovableClock

    async def report_after(self, seconds: float) -> HealthReport:
        """The report when so much time has passed."""
        for _ in range(round(seconds / 0.5)):
            await self.clock.advance(0.5)
        return await self.check.report()


@asynccontextmanager
async def checked(**settings: Any) -> AsyncIterator[Checked]:
    clock = MovableClock()
    store = TroubledStore(MemoryStore(clock=clock))
    coordination = Coordination(store)
    check = HealthCheck(coordination, clock=clock, **settings)
    async with coordination:
        try:
            async with check:
                yield Checked(check, store, clock)
        finally:
            store.heal()
            await clock.advance(LONGEST_PAUSE)  # an undo that is under way is repeated


async def test_a_store_that_answers_is_good() -> None:
    async with checked() as it:
        assert (await it.check.report()).store.status == "good"
        report = await it.report_after(300)
        assert it.store.calls["release"] == 61
    assert (report.good, report.store.status, report.store.error) == (True, "good", "")
    assert report.store.age is not None
    assert report.store.age <= 5


@pytest.mark.parametrize("fault", [refused, request_lost, reply_lost, silence, reply_never])
async def test_a_store_in_trouble_is_failing_until_it_answers_again(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    async with checked() as it:
        assert (await it.check.report()).good
        it.store.break_down(fault, "acquire")
        report = await it.report_after(11)
        assert not report.good
        assert report.store.status == "failing"
        assert report.store.error in ("BackendUnavailableError", "OutcomeUnknownError", "TimeoutError")
        assert (await it.report_after(100)).store.status == "failing"
        it.store.heal()
        assert (await it.report_after(6)).good
    told = [re.sub(r"\d+\.\d s", "N s", line.message) for line in caplog.records if line.levelno == logging.WARNING]
    assert told[0].startswith("TroubledStore (the health check) has trouble since N s: ")
    assert told[1:] == ["TroubledStore works again after N s"]


async def test_a_store_that_takes_no_release_is_failing() -> None:
    async with checked() as it:
        it.store.break_down(refused, "release")
        assert (await it.report_after(6)).store.status == "failing"


class Unmoved:
    """The request cannot be cancelled until it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()

    async def __call__(self, apply: Apply) -> object:
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        return await apply()


async def test_a_look_that_cannot_be_cut_short_makes_it_stale() -> None:
    unmoved = Unmoved()
    async with checked() as it:
        assert (await it.check.report()).good
        it.store.break_down(unmoved, "acquire")
        try:
            assert (await it.report_after(14)).good
            report = await it.report_after(2)
            assert (report.good, report.store.status) == (False, "stale")
            assert report.store.age == 16
        finally:
            unmoved.let_go.set()
            it.store.heal()
        assert (await it.report_after(1)).store.status != "stale"
        assert (await it.report_after(6)).good


async def test_the_age_counts_from_the_beginning_of_a_look() -> None:
    async with checked() as it:
        assert (await it.check.report()).good
        it.store.break_down(takes(it.clock, reply=2.0), "acquire")
        assert (await it.report_after(8)).store.age == pytest.approx(3)


async def test_a_machine_that_was_suspended_knows_nothing_until_the_next_look() -> None:
    async with checked() as it:
        assert (await it.check.report()).good
        it.store.break_down(silence)
        await it.clock.shift(3600)
        assert (await it.check.report()).store.status == "stale"
        it.store.heal()
        assert (await it.report_after(6)).good


async def test_nothing_is_known_before_and_after() -> None:
    async with checked() as it:
        pass
    report = await it.check.report()
    assert (report.good, report.store.status, report.store.age) == (False, "unknown", None)


async def test_a_forked_process_knows_nothing_that_its_parent_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked() as it:
        assert (await it.check.report()).good
        with monkeypatch.context() as forked:
            forked.setattr(lifecycle, "generation", lifecycle.Generation())
            assert (await it.check.report()).store.status == "unknown"


async def test_the_first_answer_of_a_silent_store_is_not_waited_for_long() -> None:
    async with checked() as it:
        it.store.break_down(silence, "acquire")
        async with asyncio.timeout(5):
            assert (await it.check.report()).store.status == "unknown"


async def test_another_check_at_the_same_moment_changes_nothing() -> None:
    clock = MovableClock()
    store = MemoryStore(clock=clock)
    async with store:
        await store.acquire("lock:grelmicro-check", "another", 1000)
        coordination = Coordination(store)
        async with coordination, HealthCheck(coordination, clock=clock) as check:
            assert (await check.report()).good


async def test_each_of_several_stores_must_answer() -> None:
    clock = MovableClock()
    locks, elections = (TroubledStore(MemoryStore(clock=clock)) for _ in range(2))
    coordination = Coordination(lock=locks, election=elections)
    async with coordination:
        await coordination.check()
        assert (locks.calls["acquire"], elections.calls["acquire"]) == (1, 1)
        for broken, well in ((locks, elections), (elections, locks)):
            broken.break_down(refused)
            async with HealthCheck(coordination, clock=clock) as check:
                assert (await check.report()).store.status == "failing"
            broken.heal()
            well.heal()


async def test_one_store_is_asked_once() -> None:
    store = TroubledStore(MemoryStore())
    coordination = Coordination(store)
    async with coordination:
        await coordination.check()
    assert store.calls["acquire"] == 1


@pytest.mark.parametrize("fault", [silence, Unmoved], ids=["silence", "unmoved"])
async def test_closing_does_not_wait_for_a_silent_store(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "END_LIMIT", 0.1)
    unmoved = Unmoved()
    async with checked() as it:
        it.store.break_down(unmoved if fault is Unmoved else fault, "acquire")
        await it.report_after(6)
        closing = asyncio.create_task(it.check.__aexit__(None, None, None))
        try:
            done, _ = await asyncio.wait({closing}, timeout=5)
            assert done
        finally:
            unmoved.let_go.set()
            await closing
            await it.check.__aenter__()


async def test_election_follows_leads_and_stops(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        first = await fleet.leading()
        second = fleet.worker()
        await fleet.let_pass(45.5)
        leaders = [first.election, second.election]
        # The store wakes a candidate, so that one seldom asks, however often the store itself is looked at.
        check = HealthCheck(Coordination(world.store()), leaders=[first.election], interval=0.2, clock=clock)
        other = HealthCheck(Coordination(world.store()), leaders=[second.election], interval=0.2, clock=clock)
        assert [leader.is_leader() for leader in leaders] == [True, False]
        leading, following = [(await each.report()).elections["job"] for each in (check, other)]
        assert (leading.status, leading.leads) == ("good", True)
        assert (following.status, following.leads) == ("good", False)
        assert leading.age is not None
        assert leading.age <= 3
        assert following.age is not None
        assert 3 < following.age <= 11
        await first.stop()
        assert (await check.report()).elections["job"].status == "stopped"


@pytest.mark.parametrize("fault", [refused, silence])
async def test_election_that_the_store_does_not_answer_is_stale(
    world: World, clock: MovableClock, fault: Fault
) -> None:
    async with Fleet(world, clock) as fleet:
        for worker in (await fleet.leading(), fleet.worker("other")):
            await fleet.let_pass(1)
            check = HealthCheck(Coordination(world.store()), leaders=[worker.election], clock=clock)
            worker.store.break_down(fault, "watch", "acquire", "renew")
            await fleet.let_pass(30)
            report = (await check.report()).elections[worker.election.name]
            assert (report.status, report.leads) == ("stale", False)
            worker.store.heal()
            await fleet.let_pass(20)
            assert (await check.report()).elections[worker.election.name].status == "good"


async def test_election_that_never_heard_of_the_store_is_stale(world: World, clock: MovableClock) -> None:
    async with Fleet(world, clock) as fleet:
        worker = fleet.worker(start=False)
        worker.store.break_down(silence)
        worker.start()
        await fleet.settle()
        check = HealthCheck(Coordination(world.store()), leaders=[worker.election], clock=clock)
        report = (await check.report()).elections["job"]
        assert (report.status, report.age) == ("stale", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0},
        {"interval": 1e-6},
        {"interval": "5"},
        {"stale_after": -1.0},
        {"interval": 5.0, "stale_after": 14.0},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsValidationError, match=r"HealthCheck (interval|stale_after) should be"):
        HealthCheck(Coordination.from_url("memory://"), **wrong)


async def test_report_tells_no_holder_and_no_address() -> None:
    leader = LeaderElection("feed", worker="web-1")
    coordination = Coordination(TroubledStore(MemoryStore()))
    async with coordination, HealthCheck(coordination, leaders=[leader]) as check:
        assert "web-1" not in repr(await check.report())
