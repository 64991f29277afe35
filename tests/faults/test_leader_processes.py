"""Leaders in processes of their own: signals, servers, forks and kills."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.programs import program
from tests.helpers.sites import Site

APP = "tests.helpers.leader_program:app"

SOON = 3.0
"""Seconds within which a successor leads after a hand-over; far less than the lease, which lasts 15 s by default."""

AT_ONCE = 1.0
"""Seconds within which it leads when nothing else goes on: less than the 2 s after which a candidate asks by itself."""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)], ids=["SIGTERM", "SIGINT"]
)
def test_a_program_hands_over_at_the_first_signal(any_site: Site, number: int, code: int) -> None:
    with any_site.worker() as first:
        any_site.wait_led(len)
        with any_site.worker() as second:
            at = first.send(number)
            _, successor = any_site.wait_led(lambda led: len(led) == 2)
            assert (successor.pid, first.wait()) == (second.pid, code)
            (stopped,) = any_site.diary.lines("stops")
            assert stopped.at <= successor.at <= at + AT_ONCE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_a_program_at_once(site: Site, number: int) -> None:
    """Its lease then ends by itself; but a second SIGINT lets asyncio end the work, and so the lease is given back."""
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
            stopped = site.diary.lines("stops")
            assert successor.at > (stopped[0].at if stopped else led.at + 4.0)
            assert bool(stopped) == (number == signal.SIGINT)


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
    assert site.most_at_once() == 1


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
    assert site.most_at_once() == 1


def test_a_killed_leader_is_replaced_when_its_lease_ends(any_site: Site) -> None:
    with any_site.worker(4.0) as first:
        any_site.wait_led(len)
        with any_site.worker(4.0) as second:
            time.sleep(1.0)
            at = first.send(signal.SIGKILL)
            _, successor = any_site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            assert at + 2.0 < successor.at < at + 4.0 + AT_ONCE


def test_a_paused_leader_knows_that_it_leads_no_more(any_site: Site) -> None:
    """When it goes on, its work is cancelled before it does anything else."""
    with any_site.worker(3.0) as first:
        any_site.wait_led(len)
        with any_site.worker(3.0) as second:
            first.send(signal.SIGSTOP)
            _, successor = any_site.wait_led(lambda led: len(led) == 2)
            assert successor.pid == second.pid
            at = first.send(signal.SIGCONT)
            (stopped,) = any_site.diary.wait(len, "stops")
            assert (stopped.pid, stopped.at < at + SOON) == (first.pid, True)
            time.sleep(0.5)
            assert len(any_site.led()) == 2


def test_a_fork_of_a_leader_does_not_lead(any_site: Site) -> None:
    with program("tests.helpers.forked_leader", any_site.url, any_site.diary.path) as parent:
        assert parent.wait() == 0
    said = {line.what for line in any_site.diary.lines()}
    assert said == {
        "child: leads no, runs no, own name yes",
        "child: its own candidate leads no",
        "parent: leads yes, same term yes",
        "child: its own candidate leads after the parent yes",
    }
