"""Web servers as they are deployed: started by their own command on a free port, asked over HTTP, and always ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.helpers.programs import PATIENCE, ROOT, Program

SOON = 5.0
"""Seconds within which a busy machine does what a quiet one does at once; far below a lease of 15 seconds."""

WORKERS = 2
"""Processes that serve, where there are several, and the options name no other number; each takes long to start."""

UVICORN = ("uvicorn", "--no-access-log", "--port", "{port}")

GUNICORN = ("gunicorn", "--no-control-socket", "--bind", "127.0.0.1:{port}", "-w", str(WORKERS), "-k")

COMMANDS: dict[str, Sequence[str]] = {
    "uvicorn": UVICORN,
    # By default a worker that a busy machine needs more than 5 seconds to start counts as hung.
    "uvicorn workers": (*UVICORN, "--workers", str(WORKERS), "--timeout-worker-healthcheck", "30"),
    "gunicorn": (*GUNICORN, "uvicorn_worker.UvicornWorker"),
    "gunicorn preload": (*GUNICORN, "uvicorn_worker.UvicornWorker", "--preload"),
    "gunicorn asgi": (*GUNICORN, "asgi"),
    "granian": ("granian", "--interface", "asgi", "--port", "{port}", "--workers", str(WORKERS)),
    # By default it cuts requests off after 3 seconds, and then closes in order.
    "hypercorn": ("hypercorn", "--bind", "127.0.0.1:{port}", "--workers", str(WORKERS), "--graceful-timeout", "60"),
}
"""How a server is started, by what a test calls it; the application follows."""


class Deployment(Program):
    """A server that runs."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, log: Path) -> None:
        super().__init__(process)
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        """What the server and its workers have written."""
        return self._log.read_text(errors="replace")

    def ask(self, path: str = "/", method: str = "GET", timeout: float = PATIENCE) -> httpx2.Response:
        """Send one request over a connection of its own, which any worker may take."""
        # The addresses are of plain HTTP; certificates that nothing is checked against take 30 ms to load.
        return httpx2.request(method, self.url + path, timeout=timeout, trust_env=False, verify=False)

    def ask_many(self, path: str, number: int = 12) -> list[Any]:
        """Send requests at once, so that several workers get some; what they answer, in JSON."""
        with ThreadPoolExecutor(number) as pool:
            return [answer.json() for answer in pool.map(self.ask, [path] * number)]

    def ask_at_once(self, path: str, method: str, number: int = 8) -> list[httpx2.Response]:
        """Send requests at once; their answers."""
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(lambda _: self.ask(path, method), range(number)))

    def ask_worker(self, pid: int, path: str) -> Any:
        """Send requests until the worker of this process has answered one, in JSON with its `pid`."""
        until = time.monotonic() + PATIENCE
        while True:
            for answer in self.ask_many(path):
                if answer["pid"] == pid:
                    return answer
            assert time.monotonic() < until, f"{pid} does not answer"

    def wait_said(self, text: str, times: int = 1) -> None:
        """Wait until the server and its workers have written a text, so many times."""
        until = time.monotonic() + PATIENCE
        while self.log.count(text) < times:
            assert time.monotonic() < until, f"not said: {text}"
            time.sleep(0.02)

    def send_all(self, number: int) -> float:
        """Send a signal to each process of the server, as a terminal does; the time at which that was."""
        at = time.monotonic()
        os.killpg(self.pid, number)
        return at

    def wait_until_it_answers(self, path: str) -> None:
        """Wait for the first answer."""
        until = time.monotonic() + PATIENCE
        while True:
            with suppress(httpx2.TransportError):
                self.ask(path)
                return
            assert self.process.poll() is None, f"the server has ended:\n{self.log}"
            assert time.monotonic() < until, f"the server does not answer:\n{self.log}"
            time.sleep(0.05)


@contextmanager
def deployed(
    server: str, app: str, *options: object, folder: Path, answers: str | None = "/who", **env: str
) -> Iterator[Deployment]:
    """Run a server of `COMMANDS`; no process of it is left at the end.

    Args:
        server: which one.
        app: the application, as the command names it.
        options: more for the command; the last of two that contradict each other counts.
        folder: where the server writes its log.
        answers: the path that is asked until it answers; None does not wait.
        env: variables of its environment.
    """
    port = free_port()
    command = [part.format(port=port) for part in COMMANDS[server]]
    with started([*command, app, *map(str, options)], port, folder / "server.log", env) as deployment:
        if answers is not None:
            deployment.wait_until_it_answers(answers)
        yield deployment


@contextmanager
def started(
    command: Sequence[str], port: int, log: Path, env: Mapping[str, str], *, cwd: Path = ROOT
) -> Iterator[Deployment]:
    """Run `python -m command` in a process group of its own, which is gone at the end."""
    paths = [str(cwd), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield Deployment(process, port, log)
    finally:
        end_group(process)
        sys.stdout.write(log.read_text(errors="replace"))  # pytest shows it when the test has failed


def end_group(process: "subprocess.Popen[str]") -> None:
    """Kill every process of the group, whoever started it, and wait until none is left."""
    until = time.monotonic() + PATIENCE
    while True:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
        if not alive_in(process.pid):
            break
        assert time.monotonic() < until, f"the process group {process.pid} does not end"
        time.sleep(0.02)
    process.wait()


def alive_in(group: int) -> list[int]:
    """The processes of a group that run."""
    found = []
    for each in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(each.pid) == group and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each.pid)
    return found


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
