"""Hints that a server pushes: when they are believed, and what happens when they stop."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from grelmicro.backends.hints import (
    ANSWER_LIMIT,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_UNUSED,
    OPENING_LIMIT,
    TEST_INTERVAL,
    Hints,
)
from grelmicro.leases.outage import Outage
from grelmicro.testing import MovableClock
from tests.helpers.switchboard import Switchboard
from tests.helpers.worlds import eventually


@asynccontextmanager
async def opened(feed: Switchboard, clock: MovableClock, *, lazy: bool = False) -> AsyncIterator[Hints]:
    hints = Hints(feed, clock, Outage("the store", logging.getLogger("grelmicro.coordination")), lazy=lazy)
    starting = asyncio.create_task(hints.start())
    while not starting.done():
        await asyncio.sleep(0.002)
        if feed.hanging or feed.deaf:
            await clock.advance(OPENING_LIMIT)
    try:
        yield hints
    finally:
        await hints.close()


@pytest.fixture
def feed(nothing_left: None) -> Switchboard:
    return Switchboard()


async def test_a_hint_reaches_who_waits_for_its_topic_and_nobody_else(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as a, hints.watch("b") as b:
        assert (a.pushes, b.pushes) == (True, True)
        feed.deliver("a")
        assert await asyncio.wait_for(a.wait(100.0), 5.0) is True
        waiting = asyncio.create_task(b.wait(100.0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await clock.advance(100.0)
        assert await asyncio.wait_for(waiting, 5.0) is False


async def test_a_hint_between_entry_and_wait_is_not_missed(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        feed.deliver("a")
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(waiter.wait(100.0), 5.0) is True


async def test_a_release_of_this_process_needs_no_server(feed: Switchboard, clock: MovableClock) -> None:
    feed.down = True
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        hints.send("a")
        assert await asyncio.wait_for(waiter.wait(100.0), 5.0) is True
        hints.send("nobody waits for this")


async def test_without_its_own_hint_the_feed_is_not_believed(
    feed: Switchboard, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    feed.deaf = True
    with caplog.at_level(logging.WARNING, "grelmicro"):
        async with opened(feed, clock) as hints, hints.watch("a") as waiter:
            assert not waiter.pushes, "nor while the first one may still come"
            for _ in range(40):
                await clock.advance(ANSWER_LIMIT)
                assert not waiter.pushes
            warnings = [record.getMessage() for record in caplog.records]
            assert len(warnings) == 1
            assert "the store: waking waiters at once (they poll meanwhile) has trouble" in warnings[0]
            feed.deaf = False
            await clock.advance(LONGEST_PAUSE)
            await eventually(lambda: waiter.pushes, "hints are believed again")
        assert "works again" in caplog.records[-1].getMessage()


async def test_a_broken_connection_wakes_everybody_and_is_made_anew(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as a, hints.watch("b") as b:
        waits = [asyncio.create_task(waiter.wait(1_000.0)) for waiter in (a, b)]
        await asyncio.sleep(0.01)
        feed.down = True
        feed.cut()
        assert await asyncio.wait_for(asyncio.gather(*waits), 5.0) == [True, True]
        assert (a.pushes, b.pushes) == (False, False)
        waits = [asyncio.create_task(waiter.wait(1_000.0)) for waiter in (a, b)]
        feed.down = False
        await clock.advance(LONGEST_PAUSE)
        # Of what happened meanwhile nobody tells: both ask again.
        assert await asyncio.wait_for(asyncio.gather(*waits), 5.0) == [True, True]
        await eventually(lambda: a.pushes and b.pushes, "hints are believed again")
        feed.deliver("b")
        assert await asyncio.wait_for(b.wait(1_000.0), 5.0) is True


async def test_a_server_that_is_away_is_asked_less_and_less_often_until_it_is_back(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        for _ in range(2):  # the second time as the first
            asked = feed.calls["listen"]
            feed.down = True
            feed.cut()
            await clock.advance(1.0)
            assert feed.calls["listen"] >= asked + 2, "it may be back at once"
            async with hints.watch("another") as another:
                assert not another.pushes
            await clock.advance(4 * LONGEST_PAUSE)
            assert feed.calls["listen"] <= asked + 15
            feed.down = False
            await clock.advance(LONGEST_PAUSE)
            await eventually(lambda: waiter.pushes, "hints are believed again")


async def test_a_new_connection_is_not_believed_for_what_the_old_one_did(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        assert waiter.pushes
        feed.deaf = True
        feed.cut()
        await eventually(lambda: not waiter.pushes, "the end is noticed")
        await clock.advance(FIRST_PAUSE * 4)
        await eventually(lambda: "a" in feed.topics, "it is subscribed again")
        await asyncio.sleep(0.01)
        assert not waiter.pushes


async def test_a_gap_in_what_is_told_wakes_everybody_and_nothing_is_made_anew(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as a, hints.watch("b") as b:
        listened = feed.calls["listen"]
        waits = [asyncio.create_task(waiter.wait(1_000.0)) for waiter in (a, b)]
        await asyncio.sleep(0.01)
        feed.connect_again()
        assert await asyncio.wait_for(asyncio.gather(*waits), 5.0) == [True, True]
        assert (a.pushes, b.pushes) == (True, True)
        assert feed.calls["listen"] == listened


async def test_hints_that_are_doubted_are_tested_before_they_are_believed_again(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        for _ in range(2):
            tests = feed.calls["send"]
            waiting = asyncio.create_task(waiter.wait(1_000.0))
            await asyncio.sleep(0.01)
            hints.doubt()
            assert not waiter.pushes
            assert await asyncio.wait_for(waiting, 5.0) is True, "who waits polls"
            await eventually(lambda: waiter.pushes, "the test succeeded")
            assert feed.calls["send"] == tests + 1
        feed.deaf = True
        asked = feed.calls["listen"]
        hints.doubt()
        await asyncio.sleep(0.01)
        await clock.advance(ANSWER_LIMIT + 1.0)
        assert not waiter.pushes
        assert feed.calls["listen"] > asked, "it is made anew"


async def test_a_doubt_during_a_test_has_the_hints_tested_once_more(
    feed: Switchboard, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        tests = feed.calls["send"]
        deliver = feed.deliver

        def doubted(topic: str) -> None:
            monkeypatch.setattr(feed, "deliver", deliver)
            hints.doubt()
            deliver(topic)

        monkeypatch.setattr(feed, "deliver", doubted)
        hints.doubt()
        await eventually(lambda: waiter.pushes, "the second test succeeded")
        assert feed.calls["send"] == tests + 2


async def test_a_lazy_feed_is_not_connected_before_somebody_waits(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock, lazy=True) as hints:
        await clock.advance(3 * TEST_INTERVAL)
        await asyncio.sleep(0.01)
        assert not feed.calls
        async with hints.watch("a") as waiter:
            assert await asyncio.wait_for(waiter.wait(1_000.0), 5.0), "something may have been missed until now"
            await eventually(lambda: waiter.pushes, "hints are believed")
            feed.deliver("a")
            assert await asyncio.wait_for(waiter.wait(1_000.0), 5.0)
    async with opened(feed, clock, lazy=True):
        pass


async def test_a_lazy_feed_that_breaks_is_connected_again_for_who_waits(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock, lazy=True) as hints, hints.watch("a") as waiter:
        await eventually(lambda: waiter.pushes, "hints are believed")
        feed.cut()
        await eventually(lambda: not waiter.pushes, "the end is noticed")
        await clock.advance(LONGEST_PAUSE)
        await eventually(lambda: waiter.pushes, "hints are believed again")


async def test_a_lazy_feed_that_is_opened_again_is_not_connected_before_somebody_waits(
    feed: Switchboard, clock: MovableClock
) -> None:
    hints = Hints(feed, clock, Outage("the store", logging.getLogger("grelmicro.coordination")), lazy=True)
    await hints.start()
    async with hints.watch("a") as waiter:
        await eventually(lambda: waiter.pushes, "hints are believed")
    await hints.close()
    listened = feed.calls["listen"]
    await hints.start()
    await clock.advance(TEST_INTERVAL)
    assert feed.calls["listen"] == listened
    await hints.close()


async def test_a_feed_that_falls_silent_is_found_out_while_somebody_waits(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints:
        sent = feed.calls["send"]
        await clock.advance(TEST_INTERVAL * 3)
        await asyncio.sleep(0.01)
        assert feed.calls["send"] == sent, "nobody waits, so nothing is asked"
        async with hints.watch("a") as waiter:
            await eventually(lambda: feed.calls["send"] == sent + 1, "it is tested before it is relied on for long")
            assert waiter.pushes
            feed.deaf = True
            waiting = asyncio.create_task(waiter.wait(1_000.0))
            await clock.advance(TEST_INTERVAL)
            await asyncio.sleep(0.01)
            await clock.advance(ANSWER_LIMIT)
            assert await asyncio.wait_for(waiting, 5.0) is True
            assert not waiter.pushes


async def test_a_connection_that_hangs_does_not_delay_opening_for_long(feed: Switchboard, clock: MovableClock) -> None:
    feed.hanging = {"listen"}
    async with asyncio.timeout(5.0), opened(feed, clock) as hints, hints.watch("a") as waiter:
        assert not waiter.pushes
        assert not feed.calls["follow"], "there is nothing yet to subscribe on"
        feed.hanging = set()
        await clock.advance(ANSWER_LIMIT + LONGEST_PAUSE)
        await eventually(lambda: waiter.pushes, "it is given up, and another one made")


async def test_a_subscription_that_hangs_is_given_up_and_its_topic_polled(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints:
        feed.hanging = {"follow"}
        sent = feed.calls["send"]

        async def enter() -> bool:
            async with hints.watch("a") as waiter:
                return waiter.pushes

        entering = asyncio.create_task(enter())
        await asyncio.sleep(0.01)
        assert not entering.done()
        await clock.advance(ANSWER_LIMIT)
        assert await asyncio.wait_for(entering, 5.0) is False
        await eventually(lambda: feed.calls["send"] == sent + 1, "it is tested whether the connection is to blame")
        feed.hanging = set()
        async with hints.watch("a") as waiter:
            assert waiter.pushes


async def test_one_subscription_serves_all_who_wait_also_when_the_first_is_cancelled(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints:

        async def wait() -> bool:
            async with hints.watch("a") as waiter:
                return await waiter.wait(1_000.0)

        followed = feed.calls["follow"]
        waits = [asyncio.create_task(wait()) for _ in range(50)]
        await asyncio.sleep(0)
        waits[0].cancel()
        await eventually(lambda: "a" in feed.topics, "it is subscribed")
        await asyncio.sleep(0.01)
        assert feed.calls["follow"] == followed + 1
        feed.deliver("a")
        answers = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 5.0)
        assert isinstance(answers[0], asyncio.CancelledError)
        assert answers[1:] == [True] * 49


async def test_subscriptions_that_nobody_uses_do_not_pile_up(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock) as hints:
        async with hints.watch("kept") as kept:
            for number in range(MOST_UNUSED + 300):
                async with hints.watch(f"name {number}"):
                    pass
            await eventually(lambda: len(feed.topics) <= MOST_UNUSED + 2, "they are ended")
            await eventually(lambda: not hints._ending, "nothing is kept of them")
            assert hints._echo.idle
            assert kept.pushes
            assert "kept" in feed.topics
        async with hints.watch("name 0") as again:
            assert again.pushes
            assert "name 0" in feed.topics


@pytest.mark.parametrize("use", ["again", "still"])
async def test_a_subscription_that_somebody_uses_again_or_still_is_not_ended(
    feed: Switchboard, clock: MovableClock, use: str
) -> None:
    async with opened(feed, clock) as hints, AsyncExitStack() as stack:
        followed = feed.calls["follow"]
        if use == "still":
            kept = await stack.enter_async_context(hints.watch("kept"))
        async with hints.watch("kept"):
            pass
        if use == "again":
            kept = await stack.enter_async_context(hints.watch("kept"))
        assert feed.calls["follow"] == followed + 1
        for number in range(MOST_UNUSED + 1):
            async with hints.watch(f"name {number}"):
                pass
        await eventually(lambda: "name 0" not in feed.topics, "what nobody uses is ended")
        feed.deliver("kept")
        assert await asyncio.wait_for(kept.wait(1_000.0), 5.0) is True


async def test_who_still_waits_when_it_is_closed_leaves_nothing_behind(feed: Switchboard, clock: MovableClock) -> None:
    hints = Hints(feed, clock, Outage("the store", logging.getLogger("grelmicro.coordination")))
    await hints.start()
    async with hints.watch("a") as waiter:
        await hints.close()
        assert not feed.topics, "nothing listens any more"
        assert await asyncio.wait_for(waiter.wait(1_000.0), 5.0) is True
    assert not hints.used
    await hints.start()
    for number in range(MOST_UNUSED + 1):
        async with hints.watch(f"name {number}"):
            pass
    await hints.close()


async def test_an_end_on_the_way_does_not_undo_a_new_subscription(feed: Switchboard, clock: MovableClock) -> None:
    feed.slow = {"unfollow"}
    async with opened(feed, clock) as hints:
        for number in range(MOST_UNUSED + 1):
            async with hints.watch(f"name {number}"):
                pass
        async with hints.watch("name 0") as waiter:  # its subscription is being ended just now
            assert waiter.pushes
            await asyncio.sleep(0.01)
            feed.deliver("name 0")
            assert await asyncio.wait_for(waiter.wait(1_000.0), 5.0) is True


async def test_an_end_that_hangs_does_not_keep_anybody_for_long(feed: Switchboard, clock: MovableClock) -> None:
    async with opened(feed, clock) as hints:
        feed.hanging = {"unfollow"}
        for number in range(MOST_UNUSED + 1):
            async with hints.watch(f"name {number}"):
                pass

        async def enter() -> bool:
            async with hints.watch("name 0") as waiter:
                return await waiter.wait(1_000.0)

        entering = asyncio.create_task(enter())
        await asyncio.sleep(0.01)
        await clock.advance(ANSWER_LIMIT + LONGEST_PAUSE)
        assert await asyncio.wait_for(entering, 5.0) is True


@pytest.mark.parametrize("steps", range(8))
async def test_closing_ends_also_when_the_connection_breaks_just_then(
    feed: Switchboard, clock: MovableClock, steps: int
) -> None:
    hints = Hints(feed, clock, Outage("the store", logging.getLogger("grelmicro.coordination")))
    await hints.start()
    feed.cut()
    for _ in range(steps):  # whether the end of the connection is noticed before or after
        await asyncio.sleep(0)
    await asyncio.wait_for(hints.close(), 5.0)


async def test_a_connection_whose_wait_is_cancelled_elsewhere_is_made_again(
    feed: Switchboard, clock: MovableClock
) -> None:
    async with opened(feed, clock) as hints, hints.watch("a") as waiter:
        assert feed._broken is not None
        feed._broken.cancel()
        await eventually(lambda: feed._heard is None, "the connection has ended")
        await clock.advance(FIRST_PAUSE)
        await eventually(lambda: waiter.pushes, "there is another one")
        feed.deliver("a")
        assert await asyncio.wait_for(waiter.wait(100.0), 5.0) is True


async def test_a_subscription_that_is_cancelled_elsewhere_is_made_by_the_next_waiter(
    feed: Switchboard, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled_elsewhere(topic: str) -> None:
        raise asyncio.CancelledError

    async with opened(feed, clock) as hints:
        with monkeypatch.context() as patch:
            patch.setattr(feed, "follow", cancelled_elsewhere)
            async with hints.watch("a") as waiter:
                assert not waiter.pushes
        async with hints.watch("a") as waiter:
            assert waiter.pushes
