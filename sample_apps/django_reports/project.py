"""The project in a temporary folder, and the processes that run in it."""

import asyncio
import os
import shlex
import signal
import sqlite3
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Any, Self, TypeVar

from sample_apps.workers import ROOT, free_port

T = TypeVar("T")

MANAGE = str(Path(__file__).with_name("manage.py"))
DATA = "reports.db"
LOG = "log"
PATIENCE = 60.0
"""Seconds after which something that should happen counts as missing."""


class ProjectError(Exception):
    """A process of the project did not do what the demonstration needs."""


class Project:
    """A fresh copy of the project's data, with processes that end with the block.

    Args:
        store: the setting `STORE`.
        settings: further environment variables of all processes.
        quiet: write what the processes say to a file, not to the terminal.
    """

    def __init__(self, store: str, settings: Mapping[str, str], *, quiet: bool = True) -> None:
        self._quiet = quiet
        self._environment = {**os.environ, **settings, "SECRET_KEY": token_hex(), "STORE": store, "REPORTS": DATA}
        self._environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._processes: list[Process] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(prefix="django_reports-", ignore_cleanup_errors=True)
        self._folder = Path(self._stack.enter_context(folder))
        self._stack.callback(self._end)
        self._log = self._stack.enter_context((self._folder / LOG).open("wb"))
        self._data = self._stack.enter_context(closing(sqlite3.connect(self._folder / DATA, timeout=30)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def command_line(self) -> str:
        """What runs a command of this project in a shell, before the words of the command."""
        settings = " ".join(f"{name}={shlex.quote(self._environment[name])}" for name in ("STORE", "REPORTS"))
        return f"cd {self._folder} && env {settings} {shlex.join([sys.executable, MANAGE])}"

    @property
    def log(self) -> str:
        """The last lines that the processes wrote."""
        return "\n".join((self._folder / LOG).read_text(errors="replace").splitlines()[-20:])

    async def start(self, *arguments: str) -> Process:
        """Start a Python program, in a session of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=self._folder,
            env=self._environment,
            stdin=DEVNULL,
            stdout=self._log if self._quiet else None,
            stderr=self._log if self._quiet else None,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    async def manage(self, *arguments: str) -> Process:
        """Start `manage.py` with these arguments."""
        return await self.start(MANAGE, *arguments)

    async def migrate(self) -> None:
        """Make the tables.

        Raises:
            ProjectError: they could not be made.
        """
        migrate = await self.manage("singleton", "--on-busy", "wait", "--", "migrate", "-v0")
        if code := await end_of(migrate, PATIENCE):
            raise ProjectError(f"migrate ended with {code}")

    async def serve(self, workers: int, port: int = 0) -> tuple[Process, str]:
        """Start the web server on a port, or on a free one; its process and its URL."""
        address = f"127.0.0.1:{port or free_port()}"
        options = ["--workers", str(workers), "--bind", address, "--log-level", "error"]
        return await self.start("-m", "gunicorn", *options, "sample_apps.django_reports.wsgi"), f"http://{address}"

    def add_invoices(self, count: int) -> None:
        """Add invoices that are to be sent."""
        for number in range(count):
            self.change("INSERT INTO django_reports_invoice (cents, sent) VALUES (?, 0)", 1000 + 100 * number)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query of the data finds."""
        return self._data.execute(query, values).fetchall()

    def change(self, statement: str, *values: Any) -> None:
        """Change the data."""
        with self._data:
            self._data.execute(statement, values)

    def _end(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def until(look: Callable[[], T | None], patience: float, what: str) -> T:
    """Look again and again until there is something to see.

    Raises:
        ProjectError: there was nothing for `patience` seconds.
    """
    ends_at = time.monotonic() + patience
    while (seen := look()) is None:
        if time.monotonic() > ends_at:
            raise ProjectError(f"not within {patience:g} s: {what}")
        await asyncio.sleep(0.01)
    return seen


async def end_of(process: Process, patience: float) -> int:
    """The exit code of a process, which ends within `patience` seconds.

    Raises:
        ProjectError: it runs on.
    """
    try:
        return await asyncio.wait_for(process.wait(), patience)
    except TimeoutError:
        raise ProjectError(f"process {process.pid} still runs after {patience:g} s") from None
