"""A process that has a lease again and again lets another one, which waits, go first."""

import itertools

from grelmicro.coordination.turns import (
    LOCAL_RUN,
    LONGEST_PAUSE,
    MOST_RUNS,
    SHORTEST_TURN_S,
    TURN_TO_PAUSE,
    Turns,
)
from grelmicro.leases import Lease

NOTICE = 0.005
"""Seconds until another process knows of a release."""


def grant(
    turns: Turns,
    fences: range,
    *,
    waited: bool = True,
    name: str = "lock:cart",
    every: float = SHORTEST_TURN_S,
) -> None:
    """Grants to this process, one after the other, each so many seconds after the last."""
    for fence in fences:
        turns.granted(Lease(name, "me", fence, now=fence * every, waited=waited))


def test_its_turns_are_over_after_a_few_in_a_row() -> None:
    turns = Turns()
    grant(turns, range(1, LOCAL_RUN))
    assert not turns.are_over("lock:cart")
    assert turns.begin_pause("lock:cart", NOTICE) == 0
    grant(turns, range(LOCAL_RUN, LOCAL_RUN + 1))
    assert turns.are_over("lock:cart")
    assert not turns.are_over("lock:other")
    assert turns.begin_pause("lock:cart", NOTICE) == NOTICE
    assert not turns.are_over("lock:cart"), "it waited once"
    assert turns.begin_pause("lock:cart", NOTICE) == 0


def test_a_turn_lasts_a_while_also_when_its_grants_are_short() -> None:
    turns = Turns()
    grants = 1 + next(n for n in itertools.count() if n * 0.001 >= SHORTEST_TURN_S)
    grant(turns, range(1, grants), every=0.001)
    assert not turns.are_over("lock:cart")
    grant(turns, range(grants, grants + 1), every=0.001)
    assert turns.are_over("lock:cart")


def test_where_nobody_waits_it_may_go_on() -> None:
    turns = Turns()
    grant(turns, range(1, 100), waited=False)
    assert not turns.are_over("lock:cart")
    grant(turns, range(100, 100 + LOCAL_RUN - 1))
    grant(turns, range(100 + LOCAL_RUN - 1, 100 + LOCAL_RUN), waited=False)
    grant(turns, range(100 + LOCAL_RUN, 100 + LOCAL_RUN + 1))
    assert not turns.are_over("lock:cart")


def test_who_did_not_come_in_time_gets_more_of_it_but_not_without_end() -> None:
    turns, pauses, fence = Turns(), [], 1
    for _ in range(6):
        while not turns.are_over("lock:cart"):
            grant(turns, range(fence, fence + 1))
            fence += 1
        pauses.append(turns.begin_pause("lock:cart", NOTICE) / NOTICE)
    assert pauses == [1, 2, 4, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]


def test_a_process_that_is_alone_does_not_rest_for_much_of_its_time() -> None:
    """The mark of a process that waits no more is there for a while, and of two marks nobody knows whose they are."""
    turns, paused, fence = Turns(), 0.0, 1
    while fence * 0.002 < 20.0:
        while not turns.are_over("lock:cart"):
            grant(turns, range(fence, fence + 1), every=0.002)
            fence += 1
        paused += turns.begin_pause("lock:cart", NOTICE)
    assert paused < 20.0 * 1.2 / TURN_TO_PAUSE


def test_a_grant_to_somebody_else_begins_a_new_run() -> None:
    turns = Turns()
    grant(turns, range(1, 1 + LOCAL_RUN))
    turns.begin_pause("lock:cart", NOTICE)
    grant(turns, range(LOCAL_RUN + 2, 2 * LOCAL_RUN + 1))  # one fence is somebody else's
    assert not turns.are_over("lock:cart")
    grant(turns, range(2 * LOCAL_RUN + 1, 2 * LOCAL_RUN + 2))
    assert turns.begin_pause("lock:cart", NOTICE) == NOTICE, "that one came in time"


def test_names_that_nobody_asks_for_again_are_forgotten() -> None:
    turns = Turns()
    for number in range(3 * MOST_RUNS):
        grant(turns, range(1, 2), name=f"lock:{number}")
        assert len(turns._runs) <= MOST_RUNS
