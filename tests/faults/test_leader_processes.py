"""Leaders in processes of their own: signals, servers, forks and kills."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.helpers.programs import Diary, Line, Program, program

APP = "tests.helpers.leader_program:app"

SOON = 3.0
"""Seconds within which a successor leads after a hand-over; far less than the lease, which lasts 15 s by default."""


class Site:
    """A file of leases and a diary, and the workers that use them."""

    def __init__(self, folder: Path) -> None:
        self.leases = folder / "leases.db"
        self.diary = Diary(folder / "diary")

    @contextmanager
    def worker(self, *numbers: float) -> Iterator[Program]:
        """A plain program that takes part in the election."""
        with program("tests.helpers.leader_program", self.leases, self.diary.path, *numbers) as started:
            self.diary.wait(lambda lines: any(line.pid == started.pid for line in lines), "stands")
            yield started

    def server(self, module: str, *args: object, **env: str) -> AbstractContextManager[Program]:
        """A web server whose workers take part."""
        return program(module, *args, env={"LEASES": str(self.leases), "DIARY": str(self.diary.path), **env})

    def led(self) -> list[Line]:
        """Who began to lead, and when."""
        return [line for line in self.diary.lines() if line.what.startswith("leads")]

    def wait_led(self, condition: Callable[[list[Line]], object], patience: float = 30.0) -> list[Line]:
        self.diary.wait(lambda _: condition(self.led()), patience=patience)
        return self.led()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)], ids=["SIGTERM", "SIGINT"]
)
def test_a_program_hands_over_at_the_first_signal(site: Site, number: int, code: int) -> None:
    with site.worker() as first:
        site.wait_led(len)
        with site.worker() as second:
            at = first.send(number)
            _, successor = site.wait_led(lambda led: len(led) == 2)
            assert (successor.pid, first.wait()) == (second.pid, code)
            (stopped,) = site.diary.lines("stops")
            assert stopped.at <= successor.at <= at + SOON


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_a_program_at_once(site: Site, number: int) -> None:
    """Its lease then ends by itself."""
    with site.worker(5.0, 60.0) as first:
        (led,) = site.wait_led(len)
        with site.worker(5.0) as second:
            first.send(number)
            time.sleep(0.5)
            assert first.process.poll() is None  # its work takes a minute to end
            at = first.send(number)
            assert first.wait(SOON) == -number
            assert time.monotonic() - at < SOON
            _, successor = site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            assert successor.at > led.at + 4.0


@contextmanager
def open_request(path: Path, seconds: int) -> Iterator[None]:
    """A request to the server at a socket, which is being answered for `seconds`."""
    until = time.monotonic() + 30
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(str(path)) != 0:
            assert time.monotonic() < until, "no server"
            time.sleep(0.01)
        connection.sendall(f"GET /{seconds} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
        assert connection.recv(1)
        yield


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_server_hands_over_at_the_signal_not_at_its_end(site: Site, tmp_path: Path, number: int) -> None:
    at_socket = tmp_path / "s"
    with site.server("uvicorn", APP, "--uds", at_socket, "--log-level", "error") as server:
        site.wait_led(len)
        with site.worker() as second, open_request(at_socket, 60):
            at = server.send(number)
            _, successor = site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            assert successor.at < at + SOON
            assert server.process.poll() is None  # it waits for the request
            server.send(signal.SIGINT)
        server.wait(SOON)  # the connection is closed, for which some servers wait in any case


@pytest.mark.parametrize("worker_class", ["uvicorn.workers.UvicornWorker", "asgi"])
def test_gunicorn_hands_over_at_the_first_signal(site: Site, tmp_path: Path, worker_class: str) -> None:
    at_socket = tmp_path / "s"
    arguments = [APP, "-k", worker_class, "-w", 2, "-b", f"unix:{at_socket}", "--log-level", "error"]
    with site.server("gunicorn", *arguments) as server:
        site.wait_led(len)
        site.diary.wait(lambda lines: len(lines) == 2, "stands")
        with site.worker() as plain:
            (leader,) = site.led()
            at = time.monotonic()
            os.kill(leader.pid, signal.SIGTERM)  # one worker: another one leads
            _, second = site.wait_led(lambda led: len(led) == 2)
            assert second.pid != leader.pid
            assert second.at < at + SOON
            at = server.send(signal.SIGTERM)  # the whole server
            assert server.wait() == 0
            last = site.wait_led(lambda led: led[-1].pid == plain.pid)[-1]
            assert last.at < at + SOON * 2
    assert most_at_once(site) == 1


def most_at_once(site: Site) -> int:
    """How many led at the same time at most."""
    running, most = 0, 0
    for line in site.diary.lines():
        running += {"leads": 1, "stops": -1}.get(line.what.split()[0], 0)
        most = max(most, running)
    return most


def test_of_workers_that_were_preloaded_one_leads(site: Site, tmp_path: Path) -> None:
    """They were forked from a process that had built the app and the election."""
    arguments = [APP, "-k", "uvicorn.workers.UvicornWorker", "-w", 4, "--preload", "-b", f"unix:{tmp_path / 's'}"]
    with site.server("gunicorn", *arguments, "--log-level", "error", PRELOAD="1") as server:
        site.diary.wait(lambda lines: len({line.pid for line in lines}) == 4, "stands")
        time.sleep(1.0)
        (leader,) = site.led()
        assert leader.pid != server.pid
        os.kill(leader.pid, signal.SIGTERM)
        second = site.wait_led(lambda led: len(led) == 2)[-1]
        assert second.pid != leader.pid
    assert most_at_once(site) == 1


def test_a_killed_leader_is_replaced_when_its_lease_ends(site: Site) -> None:
    with site.worker(4.0) as first:
        site.wait_led(len)
        with site.worker(4.0) as second:
            time.sleep(1.0)
            at = first.send(signal.SIGKILL)
            _, successor = site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            assert at + 2.0 < successor.at < at + 4.0 + SOON


def test_a_paused_leader_knows_that_it_leads_no_more(site: Site) -> None:
    """When it goes on, its work is cancelled before it does anything else."""
    with site.worker(3.0) as first:
        site.wait_led(len)
        with site.worker(3.0) as second:
            first.send(signal.SIGSTOP)
            _, successor = site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            at = first.send(signal.SIGCONT)
            (stopped,) = site.diary.wait(len, "stops")
            assert (stopped.pid, stopped.at < at + SOON) == (first.pid, True)
            time.sleep(0.5)
            assert len(site.led()) == 2


def test_a_fork_of_a_leader_does_not_lead(site: Site) -> None:
    with program("tests.helpers.forked_leader", site.leases, site.diary.path) as parent:
        assert parent.wait() == 0
    said = {line.what for line in site.diary.lines()}
    assert said == {
        "child: leads no, runs no, own name yes",
        "child: its own candidate leads no",
        "parent: leads yes, same term yes",
        "child: its own candidate leads after the parent yes",
    }
