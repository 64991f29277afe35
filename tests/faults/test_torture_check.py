"""The checker of the torture run: it accepts a run in which all went well, and sees each thing that must not be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torture.__main__ import cli
from torture.check import check
from torture.claims import History, history
from torture.log import Log, read
from torture.report import figures

LEASE, MARGIN = 1.0, 0.01


class Story:
    """A log that is made up: what happens at which second."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def tell(self, at: float, who: str, what: str, **facts: object) -> dict[str, Any]:
        """Add a line; it can be changed until the log is written."""
        line = {"at": at, "who": who, "what": what, **facts}
        self.lines.append(line)
        return line

    def grant(self, claim: str, fence: int, at: float, *, asked: float, guarded: bool = True) -> dict[str, Any]:
        facts = {"id": claim, "name": "hot", "fence": fence, "lease": LEASE, "margin": MARGIN}
        return self.tell(at, who(claim), "grant", asked=asked, guarded=guarded, **facts)

    def look(self, claim: str, fence: int, at: float, left: float) -> dict[str, Any]:
        return self.tell(
            at, who(claim), "look", id=claim, until=at + 1e-5, valid=left > 0, left=max(left, 0), fence=fence
        )

    def read(self, claim: str, fence: int, at: float, left: float) -> dict[str, Any]:
        return self.tell(at, who(claim), "read", id=claim, until=at + 1e-3, live=left > 0, fence=fence, left=left)

    def write(self, claim: str, fence: int, at: float, number: int, highest: int) -> dict[str, Any]:
        accepted = fence >= highest
        facts = {"id": claim, "name": "hot", "fence": fence, "highest": highest}
        return self.tell(at, who(claim), "write", accepted=accepted, number=number, **facts)

    def of(self, what: str, claim: str = "") -> list[dict[str, Any]]:
        """The lines about a claim, or all, that tell one thing."""
        return [line for line in self.lines if line["what"] == what and (not claim or line.get("id") == claim)]

    def remove(self, what: str, claim: str = "", **facts: object) -> None:
        """Take out lines."""
        gone = [line for line in self.of(what, claim) if facts.items() <= line.items()]
        assert gone
        self.lines = [line for line in self.lines if line not in gone]

    def judge(self, path: Path) -> History:
        """The log, as the checker reads it."""
        logs = {line["who"]: Log(path, line["who"]) for line in self.lines}
        for line in self.lines:
            logs[line["who"]].write(**{name: fact for name, fact in line.items() if name != "who"})
        for log in logs.values():
            log.close()
        return history(read(path))


def who(claim: str) -> str:
    return claim.rpartition(".")[0]


def clean() -> Story:
    """The first worker gives it back; the second loses it, since it cannot renew; the third one takes it over.

    The second writes once more after that. The first is killed at the end.
    """
    story = Story()
    story.tell(90.0, "controller", "run", store="sqlite", seconds=20.0, seed=1)
    for worker in ("0.1", "1.1", "2.1"):
        story.tell(91.0, "controller", "spawn", worker=worker)
    story.grant("0.1.a", 10, 100.0, asked=99.9)
    story.look("0.1.a", 10, 100.001, 0.98)
    story.write("0.1.a", 10, 100.1, 0, 0)
    story.read("0.1.a", 10, 100.2, 0.795)
    story.look("0.1.a", 10, 100.3, 0.681)
    story.tell(100.4, "0.1", "release", id="0.1.a")

    story.grant("1.1.a", 11, 100.41, asked=100.0)
    story.look("1.1.a", 11, 100.411, 0.98)
    story.write("1.1.a", 11, 100.5, 1, 10)
    story.read("1.1.a", 11, 100.6, 0.8005)
    story.tell(101.392, "1.1", "lost", id="1.1.a", via="signal")
    story.tell(101.3925, "1.1", "lost", id="1.1.a", via="cancelled")
    story.look("1.1.a", 11, 101.3926, 0.0)
    story.tell(101.393, "1.1", "beat", id="1.1.a", until=101.397)
    story.tell(101.42, "1.1", "beat", id="1.1.a", until=101.425)

    story.grant("2.1.a", 12, 101.5, asked=100.0)
    story.look("2.1.a", 12, 101.501, 0.98)
    story.write("2.1.a", 12, 101.6, 2, 11)
    story.write("1.1.a", 11, 101.65, 3, 12)
    story.read("2.1.a", 12, 101.7, 0.795)
    story.tell(101.8, "2.1", "release", id="2.1.a")

    story.tell(110.0, "controller", "kill", worker="0.1")
    story.tell(110.1, "controller", "exit", worker="0.1", code=-9, killed=True)
    for worker in ("1.1", "2.1"):
        story.tell(111.0, "controller", "exit", worker=worker, code=0, killed=False)
    story.tell(112.0, "controller", "over")
    return story


def test_a_run_in_which_all_went_well_is_accepted(tmp_path: Path) -> None:
    found = clean().judge(tmp_path / "log")
    assert check(found) == []
    counted = figures(found)
    assert counted["grants"] == 3
    assert counted["hand-overs to another process"] == 2
    assert counted["losses"] == counted["  in a process that ran in time"] == 1
    assert counted["stale writes refused"] == 1


def overlapping_a_release(story: Story) -> None:
    """The second was granted it a moment before the first began to give it back."""
    story.of("release", "0.1.a")[0]["at"] = 100.5


def overlapping_a_pause(story: Story) -> None:
    """The second was stopped, and would still have believed in it when the third had it."""
    story.remove("lost", "1.1.a")
    story.remove("beat", "1.1.a")
    story.remove("look", "1.1.a", valid=False)
    story.look("1.1.a", 11, 101.0, 0.6)


def valid_beyond_its_deadline(story: Story) -> None:
    """The handle told no time left, and said that it is valid all the same."""
    story.remove("lost", "1.1.a")
    story.remove("beat", "1.1.a")
    story.remove("look", "1.1.a", valid=False)
    story.look("1.1.a", 11, 101.55, 0.0)["valid"] = True


def unknown_to_the_store(story: Story) -> None:
    """The store says that it is free while it is held."""
    story.of("read", "0.1.a")[0]["live"] = False


def anothers_in_the_store(story: Story) -> None:
    """The store says that another one has it."""
    story.of("read", "0.1.a")[0]["fence"] = 11


def without_drift(story: Story) -> None:
    """The deadline leaves nothing for clocks of different rates."""
    story.of("look", "0.1.a")[0]["left"] = 0.998


def repeated_fence(story: Story) -> None:
    """Two grants have one fence."""
    give_fence(story, "2.1.a", 11)


def falling_fence(story: Story) -> None:
    """The one that was held later has a lower fence, although both waited at the same time."""
    give_fence(story, "2.1.a", 9)
    story.remove("write")


def fence_below_an_earlier_grant(story: Story) -> None:
    """A grant whose answer came too late to be used has a lower fence than one before it was asked for."""
    give_fence(story, "2.1.a", 9)
    story.remove("write")
    for kind in ("look", "read", "release"):
        story.remove(kind, "2.1.a")
    story.of("grant", "2.1.a")[0]["asked"] = 101.45


def changed_fence(story: Story) -> None:
    """A handle got another fence: it was taken again."""
    story.of("look", "0.1.a")[1]["fence"] = 11


def stale_write(story: Story) -> None:
    """The resource accepted the write of one that had lost it."""
    story.of("write", "1.1.a")[1]["accepted"] = True


def refused_holder(story: Story) -> None:
    """The resource refused one that has it."""
    story.of("write", "0.1.a")[0].update(accepted=False, highest=99)


def two_writes_at_once(story: Story) -> None:
    """The resource decided about two writes at the same time."""
    story.of("write", "2.1.a")[0]["number"] = 1


def late_signal(story: Story) -> None:
    """`wait_lost` came after the store might have given it away, though the process ran."""
    story.of("lost", "1.1.a")[0]["at"] = 101.45


def no_signal(story: Story) -> None:
    """The work was cancelled, but nobody who waited for the loss was told."""
    story.remove("lost", "1.1.a", via="signal")


def no_cancellation(story: Story) -> None:
    """The loss was told, but the work was not cancelled."""
    story.remove("lost", "1.1.a", via="cancelled")


def no_signal_after_a_pause(story: Story) -> None:
    """The process was stopped over the end, and when it went on it was not told."""
    for beat, at in zip(story.of("beat", "1.1.a"), (104.0, 104.1), strict=True):
        beat.update(at=at, until=at + 0.005)
    story.remove("lost", "1.1.a", via="signal")


def held_again(story: Story) -> None:
    """What was seen lost was valid again."""
    story.look("1.1.a", 11, 101.43, 0.0)["valid"] = True


def failed_worker(story: Story) -> None:
    """An error that is not announced."""
    story.tell(105.0, "1.1", "crash", error="Traceback ...\nValueError: no")


def ended_by_itself(story: Story) -> None:
    """A worker ended and was not told to."""
    story.of("exit")[1]["code"] = 1


def broken_off(story: Story) -> None:
    """The end is missing."""
    story.remove("over")


def nothing_done(story: Story) -> None:
    """Nothing was granted at all."""
    story.lines = [line for line in story.lines if line["who"] == "controller"]


PLANTED: list[tuple[str, Callable[[Story], None]]] = [
    ("two holders", overlapping_a_release),
    ("two holders", overlapping_a_pause),
    ("two holders", valid_beyond_its_deadline),
    ("store", unknown_to_the_store),
    ("store", anothers_in_the_store),
    ("store", without_drift),
    ("fence", repeated_fence),
    ("fence", falling_fence),
    ("fence", fence_below_an_earlier_grant),
    ("fence", changed_fence),
    ("write", stale_write),
    ("write", refused_holder),
    ("write", two_writes_at_once),
    ("loss", late_signal),
    ("loss", no_signal),
    ("loss", no_cancellation),
    ("loss", no_signal_after_a_pause),
    ("loss", held_again),
    ("order", failed_worker),
    ("order", ended_by_itself),
    ("order", broken_off),
    ("order", nothing_done),
]


def give_fence(story: Story, claim: str, fence: int) -> None:
    """Change the fence of a claim wherever it is told."""
    for line in story.lines:
        if line.get("id") == claim and "fence" in line:
            line["fence"] = fence


@pytest.mark.parametrize(("rule", "plant"), PLANTED, ids=[plant.__name__ for _, plant in PLANTED])
def test_what_must_not_be_is_seen(tmp_path: Path, rule: str, plant: Callable[[Story], None]) -> None:
    story = clean()
    plant(story)
    assert {violation.rule for violation in check(story.judge(tmp_path / "log"))} == {rule}


def paused_after_the_grant(story: Story) -> None:
    """The process was stopped between the grant and its first look: it claims nothing."""
    story.remove("look", "0.1.a")
    story.look("0.1.a", 10, 105.0, 0.0)
    story.remove("read", "0.1.a")
    story.remove("write")


def paused_over_the_end(story: Story) -> None:
    """The process was stopped, and told of the loss as soon as it went on."""
    for line, at in zip(story.of("lost", "1.1.a"), (103.001, 103.0012), strict=True):
        line["at"] = at
    story.of("look", "1.1.a")[1].update(at=103.002, until=103.0021)
    for beat, at in zip(story.of("beat", "1.1.a"), (103.003, 103.1), strict=True):
        beat.update(at=at, until=at + 0.005)


def busy_over_the_end(story: Story) -> None:
    """The loop ran too late for a signal in time, and that came in the first rounds."""
    story.of("lost", "1.1.a")[0]["at"] = 101.41
    story.of("lost", "1.1.a")[1]["at"] = 101.41
    story.of("look", "1.1.a")[1].update(at=101.405, until=101.406)
    story.of("beat", "1.1.a")[0].update(at=101.406, until=101.412)


def killed_with_it(story: Story) -> None:
    """The process was killed while it held it."""
    story.remove("lost", "1.1.a")
    story.remove("beat", "1.1.a")
    story.remove("look", "1.1.a", valid=False)


def work_that_looked_first(story: Story) -> None:
    """The work saw the loss itself, and ended before it could be cancelled."""
    story.of("lost", "1.1.a")[1]["via"] = "looked"


def read_across_the_release(story: Story) -> None:
    """The holder began to give it back while the store was asked."""
    story.of("read", "0.1.a")[0].update(at=100.3, until=100.45, live=False, left=0.0)


@pytest.mark.parametrize(
    "twist",
    [
        paused_after_the_grant,
        paused_over_the_end,
        busy_over_the_end,
        killed_with_it,
        work_that_looked_first,
        read_across_the_release,
    ],
)
def test_what_may_be_is_accepted(tmp_path: Path, twist: Callable[[Story], None]) -> None:
    story = clean()
    twist(story)
    assert check(story.judge(tmp_path / "log")) == []


def forget(story: Story, at: float, *, forgets: bool) -> None:
    """The store is restarted."""
    story.tell(at, "controller", "restart", until=at + 0.2, forgets=forgets)


@pytest.mark.parametrize("plant", [overlapping_a_pause, unknown_to_the_store, refused_holder])
def test_a_store_that_forgets_may_have_two_holders_after_a_restart(
    tmp_path: Path, plant: Callable[[Story], None]
) -> None:
    at = 101.2 if plant is overlapping_a_pause else 100.05
    for forgets in (True, False):
        story = clean()
        plant(story)
        forget(story, at, forgets=forgets)
        assert (check(story.judge(tmp_path / str(forgets))) == []) is forgets


def test_a_store_that_forgets_must_not_repeat_a_fence(tmp_path: Path) -> None:
    story = clean()
    repeated_fence(story)
    forget(story, 101.45, forgets=True)
    assert {violation.rule for violation in check(story.judge(tmp_path / "log"))} == {"fence"}


def test_two_holders_after_the_restart_of_a_store_that_forgets_are_seen(tmp_path: Path) -> None:
    story = clean()
    overlapping_a_pause(story)
    forget(story, 95.0, forgets=True)
    assert {violation.rule for violation in check(story.judge(tmp_path / "log"))} == {"two holders"}


def test_each_kill_may_cut_one_line_short(tmp_path: Path) -> None:
    path = tmp_path / "log"
    story = clean()
    story.judge(path)
    with path.open("a") as log:
        log.write('\n{"at": 110.0, "who": "0.1", "wha')
    story.lines = []
    assert check(story.judge(path)) == []
    with path.open("a") as log:
        log.write('\n{"at": 110.1')
    assert {violation.rule for violation in check(story.judge(path))} == {"order"}


def test_a_log_is_judged_again_by_the_command(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    clean().judge(good)
    story = clean()
    stale_write(story)
    story.judge(bad)
    done = CliRunner().invoke(cli, ["check", str(good)])
    assert (done.exit_code, "stale writes refused" in done.output) == (0, True)
    done = CliRunner().invoke(cli, ["check", str(bad)])
    assert done.exit_code == 1
    assert "write: hot fence 11 (line" in done.output


def test_the_lines_are_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    clean().judge(path)
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert all({"at", "who", "what"} <= line.keys() for line in lines)
