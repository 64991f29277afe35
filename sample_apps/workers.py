"""A sample application on several uvicorn workers, in a temporary folder, that never outlives its user."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]

PATIENCE = 5.0
"""Seconds that the server has to stop when it is asked to."""


class Workers:
    """The running server.

    Args:
        app: which of the sample applications: the name of its folder.
        count: how many worker processes.
        store: the URL of the leases.
        settings: further environment variables of the workers. Relative paths are in the temporary folder.
        options: further options of uvicorn.
        port: where to listen; 0 takes a free one.
        quiet: write what the server says to a file, not to the terminal.
    """

    def __init__(
        self,
        app: str,
        count: int,
        store: str,
        settings: Mapping[str, str],
        *,
        options: Sequence[str] = (),
        port: int = 0,
        quiet: bool = True,
    ) -> None:
        self.app = app
        self.count = count
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._store = store
        self._settings = settings
        self._options = options
        self._quiet = quiet
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """Where the files of the server are."""
        assert self._folder is not None, "the server was not started"
        return Path(self._folder.name)

    @property
    def log(self) -> str:
        """The last lines that the server wrote, if it is quiet."""
        path = self.folder / "server.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-20:]) if path.exists() else ""

    def alive(self) -> bool:
        """Whether the server runs."""
        return self._server is not None and self._server.poll() is None

    def wait(self) -> int:
        """Wait for the end of the server; its exit code."""
        assert self._server is not None, "the server was not started"
        return self._server.wait()

    def interrupt(self) -> None:
        """Send SIGINT to all processes, as Ctrl-C in a terminal does."""
        assert self._server is not None, "the server was not started"
        _signal_group(self._server.pid, signal.SIGINT)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix=f"{self.app}-", ignore_cleanup_errors=True)
        command = [sys.executable, "-m", "uvicorn", f"sample_apps.{self.app}.app:app"]
        command += ["--workers", str(self.count), "--port", str(self.port), "--no-access-log"]
        command += ["--timeout-keep-alive", "60", "--timeout-graceful-shutdown", "3", *self._options]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {"STORE": self._store, "PYTHONPATH": os.pathsep.join(paths)}
        with (self.folder / "server.log").open("wb") as log:
            # A session of its own: signals to this program do not reach the workers behind its back, and one signal
            # to the group reaches all of them, also those of a supervisor that is gone.
            self._server = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **self._settings, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log if self._quiet else None,
                stderr=subprocess.STDOUT if self._quiet else None,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            _end(self._server)
        if self._folder is not None:
            self._folder.cleanup()


def _end(server: subprocess.Popen[bytes]) -> None:
    """Stop the whole group: politely, and after `PATIENCE` for good."""
    try:
        _signal_group(server.pid, signal.SIGCONT)
        if server.poll() is None:
            server.terminate()
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        until = time.monotonic() + PATIENCE
        while _signal_group(server.pid, signal.SIGKILL) and time.monotonic() < until:
            server.poll()
            time.sleep(0.02)


def _signal_group(group: int, number: signal.Signals) -> bool:
    """Send a signal to all processes of a group; whether there were any."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run `work`; Ctrl-C, and SIGTERM as well, let it clean up first."""

    async def run() -> int:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 130

    return asyncio.run(run())
