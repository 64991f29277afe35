"""Programs that run in processes of their own, and the diary that they write together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

PATIENCE = 30.0
"""Seconds after which what a process should do soon counts as never; the machine may be busy."""


class Line(NamedTuple):
    """What one process did, and when."""

    at: float
    pid: int
    what: str


class Diary:
    """A file to which several processes append."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str) -> None:
        """Write a line."""
        line = f"{time.monotonic():.6f} {os.getpid()} {what}\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)

    def lines(self, what: str = "") -> list[Line]:
        """The lines so far: all, or those that say `what`."""
        text = self.path.read_text() if self.path.exists() else ""
        fields = [line.split(" ", 2) for line in text.splitlines()]
        lines = [Line(float(at), int(pid), said) for at, pid, said in fields]
        return sorted(line for line in lines if not what or line.what == what)

    def wait(self, condition: Callable[[list[Line]], object], what: str = "", patience: float = PATIENCE) -> list[Line]:
        """Wait until the lines that say `what` fulfil the condition."""
        until = time.monotonic() + patience
        while not condition(lines := self.lines(what)):
            assert time.monotonic() < until, f"not within {patience:g} s; the diary: {self.lines()}"
            time.sleep(0.01)
        return lines


class Program:
    """A running program."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def send(self, number: int) -> float:
        """Send it a signal; the time at which that was."""
        at = time.monotonic()
        self.process.send_signal(number)
        return at

    def wait(self, patience: float = PATIENCE) -> int:
        """Wait for its end; its exit code, negative when a signal ended it."""
        return self.process.wait(patience)


@contextmanager
def program(module: str, *args: object, env: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Run `python -m module args`; whatever it started is gone at the end."""
    command: Sequence[str] = [sys.executable, "-m", module, *map(str, args)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Program(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
