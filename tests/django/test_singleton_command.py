"""`manage.py singleton` in processes of its own."""

import os
import signal
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.django.commands import HOLD, NIGHTLY, WORK
from tests.django.helpers import Project, ended, make_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = make_project(tmp_path, f"sqlite:///{tmp_path}/locks.db")
    made.add_command("work", WORK)
    made.add_command("nightly_report", NIGHTLY)
    made.add_command("hold", HOLD)
    return made


def test_the_command_runs_and_its_exit_code_is_its_own(project: Project) -> None:
    done = project.manage("singleton", "--", "work", "0")
    assert (done.code, done.out, done.err) == (0, "", "")
    refused = project.manage("singleton", "work", "0", "--code", "9")
    assert (refused.code, refused.err) == (9, "CommandError: refused\n")
    killed = project.manage("singleton", "--", "work", "0", "--die", str(int(signal.SIGKILL)))
    assert killed.code == -signal.SIGKILL


def test_a_busy_command_follows_the_policy(project: Project) -> None:
    with project.running("hold", "work"):
        project.wait_for("held")
        skipped = project.manage("singleton", "--", "work", "0")
        assert (skipped.code, skipped.out, skipped.err) == (0, "", "")
        shown = project.manage("singleton", "-v2", "--", "work", "0")
        assert shown.code == 0
        assert "was skipped: held since 20" in shown.err
        failed = project.manage("singleton", "--on-busy", "fail", "--", "work", "0")
        assert failed.code == 75
        assert len(failed.err.splitlines()) == 1
        late = project.manage("singleton", "--wait", "0.2", "--", "work", "0")
        assert late.code == 75
        other = project.manage("singleton", "--name", "other", "--", "work", "0")
        assert other.code == 0
    assert sum("begin" in line for line in project.lines()) == 1


def test_one_lease_is_around_a_singleton_command(project: Project) -> None:
    done = project.manage("singleton", "--on-busy", "fail", "--", "nightly_report", "--full")
    assert (done.code, done.out) == (0, "nightly-report True True\n")
    alone = project.manage("nightly_report")
    assert (alone.code, alone.out) == (0, "nightly-report True False\n")
    with project.running("hold", "nightly-report"):
        project.wait_for("held")
        skipped = project.manage("nightly_report")
        assert (skipped.code, skipped.out, skipped.err) == (0, "", "")
        failed = project.manage("singleton", "--on-busy", "fail", "--", "nightly_report")
        assert failed.code == 75
        assert len(failed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--", "wrok"], 64, "did you mean 'work'?"),
        (["--"], 64, "the command is missing"),
        (["--on-busy", "maybe", "--", "work", "0"], 64, "--on-busy"),
        (["--", "work", "0", "--settings=other"], 64, "write manage.py singleton --settings=other"),
        (["--", "work", "0", "--pythonpath", "/nowhere"], 64, "--pythonpath=/nowhere"),
        (["--", "runserver"], 64, "add --noreload"),
        (["--name", "x" * 256, "--", "work", "0"], 78, "give 1 to 255 characters"),
        (["--lease", "-1", "--", "work", "0"], 78, "lease should be a number of seconds"),
        (["--on-busy", "fail", "--wait", "1", "--", "work", "0"], 78, "wait is for on_busy 'wait'"),
    ],
)
def test_a_wrong_command_line_is_one_line(project: Project, args: list[str], code: int, text: str) -> None:
    wrong = project.manage("singleton", *args)
    assert (wrong.code, len(wrong.err.splitlines())) == (code, 1), wrong
    assert text in wrong.err
    assert project.lines() == []


@pytest.mark.parametrize(
    ("store", "code"), [("redis://localhost:1/0", 69), ("postgresql://localhost:1/x", 69), ("reddis://x", 78)]
)
def test_a_store_that_is_away_is_one_line(tmp_path: Path, store: str, code: int) -> None:
    project = make_project(tmp_path, store)
    project.add_command("work", WORK)
    away = project.manage("singleton", "--", "work", "0")
    assert (away.code, len(away.err.splitlines())) == (code, 1), away
    assert project.lines() == []


def test_max_hold_stops_the_command(project: Project) -> None:
    stopped = project.manage("singleton", "--max-hold", "0.5", "--", "work", "50")
    assert stopped.code == 70
    assert "reached its max_hold of 0.5 s" in stopped.err
    assert len(stopped.err.splitlines()) == 1
    assert project.manage("singleton", "--on-busy", "fail", "--", "work", "0").code == 0


def test_a_command_that_does_not_stop_is_ended_after_the_grace(project: Project) -> None:
    ended = project.manage("singleton", "--max-hold", "0.5", "--grace", "0.5", "--", "work", "50", "--stubborn")
    assert ended.code == 70
    assert "the process is ended" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_releases_the_lease_and_ends_the_process(project: Project, number: signal.Signals) -> None:
    with project.running("singleton", "--", "work", "50") as process:
        project.wait_for("at work")
        process.send_signal(number)
        assert ended(process).code == -number
    assert project.manage("singleton", "--on-busy", "fail", "--", "work", "0").code == 0


def test_a_signal_ends_a_command_that_waits(project: Project) -> None:
    with project.running("hold", "work"):
        project.wait_for("held")
        with project.running("singleton", "--on-busy", "wait", "--", "work", "0") as process:
            sleep(1.5)
            process.send_signal(signal.SIGTERM)
            assert ended(process).code == -signal.SIGTERM
    assert not any("begin" in line for line in project.lines())


def test_a_frozen_command_stops_when_it_is_thawed(project: Project) -> None:
    with project.running("singleton", "--lease", "1", "--", "work", "50") as frozen:
        project.wait_for("at work")
        os.kill(frozen.pid, signal.SIGSTOP)
        other = project.manage("singleton", "--on-busy", "wait", "--wait", "30", "--", "work", "0")
        assert other.code == 0
        thawed = monotonic()
        os.kill(frozen.pid, signal.SIGCONT)
        stopped = ended(frozen)
        assert stopped.code == 70
        assert monotonic() - thawed < 20
        project.wait_for("end")


def test_a_command_that_outlasts_its_lease_stays_single(project: Project) -> None:
    with project.running("singleton", "--lease", "0.5", "--", "work", "50"):
        project.wait_for("at work", times=40)
        assert project.manage("singleton", "--on-busy", "fail", "--", "work", "0").code == 75


def test_migrate_runs_as_a_singleton_on_an_empty_database(project: Project) -> None:
    done = project.manage("singleton", "--on-busy", "wait", "--", "migrate", "-v0")
    assert (done.code, done.err) == (0, "")
    assert project.manage("migrate", "--check").code == 0


SLOW = """
from django.core.management.base import BaseCommand
from django.db import connection


class Command(BaseCommand):
    def handle(self, *args, **options):
        with connection.cursor() as cursor:
            open("log", "a").write("begin\\n")
            cursor.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n")
"""


def test_a_call_of_sqlite_is_interrupted(project: Project) -> None:
    project.add_command("slow", SLOW)
    stopped = project.manage("singleton", "--max-hold", "1", "--grace", "30", "--", "slow")
    assert stopped.code == 70, stopped
    assert stopped.err == "CommandError: singleton 'slow': it reached its max_hold of 1 s; see the log for the cause\n"
    with project.running("singleton", "--grace", "30", "--", "slow") as process:
        project.wait_for("begin", times=2)
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == -signal.SIGTERM
    assert project.manage("singleton", "--name", "slow", "--on-busy", "fail", "--", "work", "0").code == 0


def test_a_database_that_the_command_never_uses_is_not_looked_at(tmp_path: Path) -> None:
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db.sqlite3")}
    archive = {"ENGINE": "no.such.engine", "NAME": "archive"}
    project = make_project(tmp_path, f"sqlite:///{tmp_path}/locks.db", {"default": database, "archive": archive})
    # System checks look at every database.
    unchecked = "class Command(BaseCommand):\n    requires_system_checks = []\n"
    project.add_command("work", WORK.replace("class Command(BaseCommand):\n", unchecked))
    done = project.manage("singleton", "--", "work", "0")
    assert (done.code, done.err) == (0, "")
