"""`manage.py lead` in processes of its own."""

import os
import signal
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.django.commands import BEAT
from tests.django.helpers import SECONDS, Project, ended, make_project
from tests.servers.fixtures import StartRedis

LEASE = {"GREL_LEADERELECTION_LEASE_DURATION": "2", "GREL_LEADERELECTION_RETRY_INTERVAL": "0.3"}


def of_store(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name, value in LEASE.items():
        monkeypatch.setenv(name, value)
    made = make_project(folder, store)
    made.add_command("beat", BEAT)
    return made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return of_store(tmp_path, f"sqlite:///{tmp_path}/locks.db", monkeypatch)


@pytest.fixture(params=["sqlite", "redis_url", "postgres_url"])
def on_each_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    kind = request.param
    store = f"sqlite:///{tmp_path}/locks.db" if kind == "sqlite" else request.getfixturevalue(kind)
    return of_store(tmp_path, store, monkeypatch)


def begun(project: Project, count: int) -> list[str]:
    """The processes of the command in the order of their begin, once there are so many."""
    project.wait_for("begin", times=count)
    return [line.split()[0] for line in project.lines() if line.endswith("begin")]


def test_a_leader_that_is_stopped_hands_over_when_its_command_has_ended(on_each_store: Project) -> None:
    project = on_each_store
    with project.running("lead", "beat") as leader:
        (first,) = begun(project, 1)
        with project.running("lead", "beat") as standby:
            leader.send_signal(signal.SIGTERM)
            stopped = ended(leader)
            _, second = begun(project, 2)
            project.wait_for(f"{second} beat")
            assert standby.poll() is None
    assert (stopped.code, stopped.out, stopped.err) == (-signal.SIGTERM, "", "")
    lines = project.lines()
    assert lines.index(f"{first} end") < lines.index(f"{second} begin")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("stubborn", [False, True])
def test_the_command_of_a_dead_or_frozen_leader_ends_before_another_begins(
    project: Project, number: signal.Signals, stubborn: bool
) -> None:
    command = ["lead", "beat", *(["--stubborn"] if stubborn else [])]
    with project.running(*command) as leader:
        (first,) = begun(project, 1)
        with project.running(*command):
            os.kill(leader.pid, number)
            _, second = begun(project, 2)
            project.wait_for(f"{second} beat")
            os.kill(leader.pid, signal.SIGCONT)
            sleep(0.5)  # a command that had survived would write
            assert len(begun(project, 2)) == 2
    lines = project.lines()
    after = lines[lines.index(f"{second} begin") :]
    assert not [line for line in after if line.startswith(f"{first} ")]
    assert (f"{first} stays" if stubborn else f"{first} end") in lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_every_signal_that_ends_it_ends_its_command_first(project: Project, number: signal.Signals) -> None:
    with project.running("lead", "beat") as leader:
        begun(project, 1)
        leader.send_signal(number)
        assert ended(leader).code == -number
    assert project.lines()[-1].endswith(" end")


def test_a_command_that_stays_is_killed_after_the_grace_or_at_a_second_signal(project: Project) -> None:
    with project.running("lead", "--grace", "0.3", "beat", "--stubborn") as leader:
        begun(project, 1)
        leader.send_signal(signal.SIGTERM)
        assert ended(leader).code == -signal.SIGTERM
    with project.running("lead", "--grace", "3600", "beat", "--stubborn") as leader:
        begun(project, 2)
        leader.send_signal(signal.SIGTERM)
        project.wait_for("stays", times=2)
        sleep(3)  # for longer than a lease, which is renewed until the command has ended
        assert leader.poll() is None
        leader.send_signal(signal.SIGTERM)
        assert ended(leader).code == -signal.SIGTERM
    assert [line.split()[1] for line in project.lines()].count("stays") == 2


def test_a_standby_ends_at_once(project: Project) -> None:
    with project.running("lead", "beat"):
        begun(project, 1)
        with project.running("lead", "-v2", "beat") as standby:
            sleep(1.5)
            standby.send_signal(signal.SIGTERM)
            stopped = ended(standby)
        assert stopped.code == -signal.SIGTERM
        assert "standing by for 'beat'" in stopped.err
        assert len(begun(project, 1)) == 1


def test_a_command_that_ends_is_started_again(project: Project) -> None:
    with project.running("lead", "--", "beat", "--code", "3") as leader:
        begun(project, 3)
        leader.send_signal(signal.SIGTERM)
        said = ended(leader).err.splitlines()
    assert "the command of 'beat' exited with 3 after" in said[0]
    assert len(said) in (2, 3)
    pauses = [float(line.partition("again in ")[2].split()[0]) for line in said[:2]]
    assert 0.7 < pauses[0] < 1.3 < pauses[1] < 2.6


def test_what_the_command_has_started_ends_too(project: Project) -> None:
    with project.running("lead", "beat", "--spawn") as leader:
        begun(project, 1)
        spawned = project.folder / "spawned"
        limit = monotonic() + SECONDS
        while not spawned.exists() or spawned.stat().st_size < 5:
            assert monotonic() < limit
            sleep(0.02)
        leader.send_signal(signal.SIGTERM)
        ended(leader)
    size = spawned.stat().st_size
    sleep(0.3)
    assert spawned.stat().st_size == size


def test_while_the_store_is_away_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_redis: StartRedis
) -> None:
    server = start_redis()
    project = of_store(tmp_path, server.url, monkeypatch)
    with project.running("lead", "beat") as leader:
        (first,) = begun(project, 1)
        server.stop()
        project.wait_for(f"{first} end")
        server.start()
        assert first != begun(project, 2)[1]
        leader.send_signal(signal.SIGTERM)
        assert ended(leader).code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["lead"], 64, "manage.py lead: the command is missing: manage.py lead -- COMMAND"),
        (["lead", "baet"], 64, "CommandError: unknown command 'baet': did you mean 'beat'?"),
        (["lead", "runserver"], 64, "CommandError: runserver restarts its own command line, which lead cannot guard"),
        (["lead", "--", "beat", "--settings=x"], 64, "write manage.py lead --settings=x -- COMMAND"),
        (["lead", "--grace", "-1", "beat"], 78, "lead: grace"),
        (["lead", "--name", "", "beat", "--code", "0"], 78, "LeaderElection"),
    ],
)
def test_mistakes_are_one_line(project: Project, args: list[str], code: int, text: str) -> None:
    done = project.manage(*args)
    assert (done.code, text in done.err, len(done.err.splitlines())) == (code, True, 1), done


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = of_store(tmp_path, "redis://:hidden@127.0.0.1:1/0", monkeypatch)
    done = project.manage("lead", "beat")
    assert (done.code, len(done.err.splitlines())) == (69, 1)
    assert "hidden" not in done.err
