"""Singletons on the servers that a fleet shares."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from sqlite3 import connect
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.django.commands import FENCED, HOLD, ROUNDS, UNTIL, WORK
from tests.django.helpers import SECONDS, Project, ended, make_project

TEN = 10


@pytest.fixture(params=["redis_url", "postgres_url"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    made = make_project(tmp_path, request.getfixturevalue(request.param))
    for name, source in {"work": WORK, "hold": HOLD, "until": UNTIL, "rounds": ROUNDS, "fenced": FENCED}.items():
        made.add_command(name, source)
    return made


def wait_until(condition: Any) -> None:
    limit = monotonic() + SECONDS
    while not condition():
        assert monotonic() < limit
        sleep(0.02)


def test_of_ten_one_runs(project: Project) -> None:
    codes = {"skip": 0, "fail": 75}
    with ExitStack() as stack:
        ten = [
            (policy, stack.enter_context(project.running("singleton", "--on-busy", policy, "--", "until")))
            for policy in [*codes] * (TEN // 2)
        ]
        wait_until(lambda: sum(process.poll() is not None for _, process in ten) == TEN - 1)
        (project.folder / "stop").touch()
        ends = {process.pid: (policy, ended(process)) for policy, process in ten}
    (ran,) = project.lines()
    _, one = ends.pop(int(ran.split()[0]))
    assert (one.code, one.out, one.err) == (0, "", "")
    for policy, other in ends.values():
        assert other.code == codes[policy]
        assert len(other.err.splitlines()) == (policy == "fail")


def test_fifty_rounds_of_ten_never_overlap(project: Project) -> None:
    (project.folder / "count").write_text("0")
    with ExitStack() as stack:
        ten = [stack.enter_context(project.running("rounds")) for _ in range(TEN)]
        wait_until(lambda: len(list(project.folder.glob("ready-*"))) == TEN)
        (project.folder / "go").touch()
        assert [ended(each).code for each in ten] == [0] * TEN
    assert (project.folder / "count").read_text() == "50"


def test_a_waiter_follows_a_holder_that_was_killed(project: Project) -> None:
    with project.running("singleton", "--lease", "2", "--", "work", "50") as killed:
        project.wait_for("at work")
        with project.running("singleton", "--on-busy", "wait", "--", "work", "0") as waiter:
            killed.send_signal(signal.SIGKILL)
            assert ended(waiter).code == 0
    assert project.lines()[-1].endswith("end")


def test_a_frozen_holder_is_fenced_and_ends_when_it_is_thawed(project: Project) -> None:
    assert project.manage("migrate", "-v0").code == 0
    with connect(project.folder / "db.sqlite3") as database:
        database.execute("CREATE TABLE fenced AS SELECT 0 AS fence")
    database.close()
    with project.running("fenced", "50") as frozen:
        project.wait_for("written")
        os.kill(frozen.pid, signal.SIGSTOP)
        with project.running("singleton", "--on-busy", "wait", "--", "fenced", "0.3") as other:
            assert ended(other).code == 0
            project.wait_for(f"{other.pid} written")
        until = len(project.lines())
        os.kill(frozen.pid, signal.SIGCONT)
        stopped = ended(frozen)
    assert stopped.code == 70
    after = [line for line in project.lines()[until:] if line.startswith(f"{frozen.pid} ")]
    assert f"{frozen.pid} refused" in after
    assert f"{frozen.pid} goes on after Interrupted" in after
    assert f"{frozen.pid} written" not in after


SLOW = """
from django.core.management.base import BaseCommand
from django.db import connections
from grelmicro_django import lock


class Command(BaseCommand):
    requires_system_checks = []  # which look at every database

    def handle(self, *args, **options):
        with connections["shop"].cursor() as cursor:
            open("log", "a").write("begin\\n")
            cursor.execute("SELECT pg_sleep(100)")
"""


def database_of(url: str) -> dict[str, dict[str, object]]:
    """The settings of Django for a PostgreSQL server."""
    parts = urlsplit(url)
    database: dict[str, object] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
    }
    return {"default": database, "shop": database}


@pytest.fixture(params=["psycopg", "psycopg2"])
def on_postgres(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str) -> Project:
    made = make_project(tmp_path, postgres_url, database_of(postgres_url))
    made.add_command("slow", SLOW)
    if request.param == "psycopg2":  # which Django takes where there is no psycopg
        (tmp_path / "psycopg.py").write_text("raise ImportError")
    return made


def test_a_call_of_postgresql_is_cancelled(on_postgres: Project) -> None:
    stopped = on_postgres.manage("singleton", "--max-hold", "1", "--grace", "30", "--", "slow")
    assert stopped.code == 70, stopped
    assert stopped.err == "CommandError: singleton 'slow': it reached its max_hold of 1 s; see the log for the cause\n"
    with on_postgres.running("singleton", "--grace", "30", "--", "slow") as process:
        on_postgres.wait_for("begin", times=2)
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == -signal.SIGTERM
    skipped = on_postgres.manage("singleton", "--name", "slow", "--on-busy", "fail", "--", "migrate", "-v0")
    assert skipped.code == 0, skipped
