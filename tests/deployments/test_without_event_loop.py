"""The recipes of the guide, as they stand there: WSGI servers and task queues, whose workers share locks with us."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from tests.deployments.server import Deployment, free_port, started
from tests.docs.examples import blocks, commands
from tests.docs.pages import PAGES
from tests.helpers.programs import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BLOCKS = blocks(PAGES["docs/guides/without-event-loop.md"])
COMMANDS = commands(BLOCKS)

WORKER = ("celery", "-A", "jobs", "worker", "-c", "2", "--without-mingle", "--without-gossip", "-l", "INFO")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the guide."""
    for block in BLOCKS:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    return tmp_path


@contextmanager
def on(url: str) -> Iterator[Grelmicro]:
    """Another process's view of the same store."""
    with Grelmicro(uses=[Coordination.from_url(url)]) as micro:
        yield micro


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("gunicorn")])
def test_flask(command: str, folder: Path) -> None:
    port = free_port()
    options = ["--bind", f"127.0.0.1:{port}", "--no-control-socket"]
    with (
        started([*shlex.split(command), *options], port, folder / "log", {}, cwd=folder) as server,
        on(f"sqlite:///{folder / 'locks.db'}"),
    ):
        server.wait_until_it_answers("/")
        with Lock("cart:7").from_thread:
            refused = server.ask("/carts/7/checkout", "POST")
            assert (refused.status_code, refused.headers["retry-after"]) == (409, "1")
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["type"] == "urn:grelmicro:busy"
            assert server.ask("/carts/8/checkout", "POST").text == "checked out 8"
        answers = server.ask_at_once("/carts/7/checkout", "POST")
        assert {answer.text for answer in answers} == {"checked out 7"}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert "Traceback" not in server.log
        assert not Lock("cart:7").from_thread.locked()


def test_flask_on_gevent_is_refused_in_words(folder: Path) -> None:
    port = free_port()
    command = f"gunicorn shop:app -k gevent --no-control-socket --bind 127.0.0.1:{port}"
    with started(shlex.split(command), port, folder / "log", {}, cwd=folder) as server:
        server.process.wait(PATIENCE)
        assert "gevent has replaced threads and sockets of this process, and is not supported" in server.log


def queue_program(command: list[str], folder: Path, url: str, name: str = "log") -> Any:
    return started(command, 0, folder / name, {"REDIS_URL": url}, cwd=folder)


def end(server: Deployment, number: signal.Signals) -> None:
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE) == 0
    assert "Traceback" not in server.log


@contextmanager
def sender(folder: Path, url: str) -> Iterator[Callable[..., None]]:
    """A program that sends Celery a task for each cart that it is given."""
    code = "import sys; from jobs import checkout; [checkout.delay(int(cart)) for cart in sys.stdin]"
    environment = {**os.environ, "REDIS_URL": url}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.PIPE, text=True) as process:
        given = process.stdin
        assert given is not None

        def send(*carts: int) -> None:
            given.writelines(f"{cart}\n" for cart in carts)
            given.flush()

        yield send
        given.close()
        assert process.wait(PATIENCE) == 0


def test_celery(folder: Path, redis_url: str) -> None:
    with (
        queue_program([*WORKER], folder, redis_url) as server,
        sender(folder, redis_url) as send,
        on(redis_url),
    ):
        send(7)
        server.wait_said("'checked out 7'")
        with Lock("cart:7").from_thread:
            send(7, 8)
            server.wait_said("'checked out 8'")
            server.wait_said("Retry in 1s")
            assert server.log.count("'checked out 7'") == 1
        server.wait_said("'checked out 7'", 2)
        send(*[9] * 20)
        server.wait_said("'checked out 9'", 20)
        end(server, signal.SIGTERM)
        assert not Lock("cart:9").from_thread.locked()


def test_two_beats_send_twice_and_one_runs(folder: Path, redis_url: str) -> None:
    with queue_program([*WORKER], folder, redis_url) as server:
        beats = [["celery", "-A", "jobs", "beat", "-s", f"schedule{number}", "--pidfile="] for number in range(2)]
        began = time.monotonic()
        with queue_program(beats[0], folder, redis_url, "a"), queue_program(beats[1], folder, redis_url, "b"):
            server.wait_said("'reported already'", 2)
            server.wait_said("'reported'", 2)
        server.send_all(signal.SIGTERM)
        server.process.wait(PATIENCE)
        took = time.monotonic() - began
        assert server.log.count("'reported'") <= took / 0.8 + 1


def test_rq(folder: Path, redis_url: str) -> None:
    connection = Redis.from_url(redis_url)
    queue = Queue(connection=connection)
    with queue_program(["rq.cli", "worker", "--url", redis_url], folder, redis_url) as server, on(redis_url):
        with Lock("user:ada").from_thread:
            waits = queue.enqueue("mails.send_mail", "ada")
            server.wait_said("mails.send_mail('ada')")
            time.sleep(0.3)
            assert not waits.is_finished
        done = queue.enqueue("mails.send_mail", "bob")
        until = time.monotonic() + PATIENCE
        while not (waits.is_finished and done.is_finished):
            assert time.monotonic() < until, server.log
            time.sleep(0.05)
        assert (waits.return_value(), done.return_value()) == ("wrote to ada", "wrote to bob")
        assert not Lock("user:ada").from_thread.locked()
        end(server, signal.SIGTERM)
    connection.close()


def test_the_test_finds_all_recipes() -> None:
    assert len([command for command in COMMANDS if command.startswith("gunicorn")]) == 3
    assert {"celery -A jobs worker", "celery -A jobs beat", "rq worker"} <= set(COMMANDS)
