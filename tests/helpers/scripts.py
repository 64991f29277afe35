"""Small programs in processes of their own, which are told things line by line and answer in the same way."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from textwrap import dedent
from typing import NamedTuple

from tests.helpers.programs import PATIENCE, ROOT


class Ending(NamedTuple):
    """How a program ended."""

    code: int
    said: str
    errors: str


class Script:
    """A running program."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: Queue[str] = Queue()
        self._complaints: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def tell(self, line: str = "go") -> None:
        """Write it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, patience: float = PATIENCE) -> str:
        """Its next line."""
        try:
            line = self._lines.get(timeout=patience)
        except Empty:
            raise AssertionError(f"it said nothing for {patience:g} s") from None
        assert line, f"it ended: {self._errors()}"
        return line.rstrip("\n")

    def said(self) -> bool:
        """Whether it said something that was not heard yet."""
        return not self._lines.empty()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self, patience: float = PATIENCE) -> Ending:
        """Wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(patience)
        for reader in self._readers:
            reader.join()
        rest = []
        while line := self._lines.get():
            rest.append(line)
        return Ending(code, "".join(rest), self._errors())

    def _errors(self) -> str:
        return "".join(self._complaints)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        # In development mode asyncio tells of each step of a task that took long: here, of a machine that is busy.
        self._complaints.extend(line for line in self._process.stderr if not line.startswith("Executing <"))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def script(code: str, *args: object, strict: bool = True) -> Iterator[Script]:
    """Run a program; it is gone at the end. With `strict`, in development mode and with warnings as errors."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = ["-X", "dev", "-W", "error"] if strict else []
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", dedent(code), *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Script(process)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()
