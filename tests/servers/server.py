"""What the servers have in common: they are started, stopped, killed, paused and started again."""

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

from tests.servers.found import Binary
from tests.servers.home import SELF, Home, Identity, free_port
from tests.servers.watch import end, inhabitants

PATIENCE = 30.0
"""Seconds after which what a server should do soon counts as never; the machine may be busy."""


class Server(ABC):
    """A server on 127.0.0.1. Its methods block: in a coroutine whose tasks must go on, use `asyncio.to_thread`."""

    stop_signal = signal.SIGTERM

    poll = 0.005
    """Seconds between two looks whether it is ready."""

    def __init__(self, home: Home, binary: Binary, identity: Identity = SELF) -> None:
        self.binary = binary
        self.identity = identity
        self.folder = home.folder(str(binary), identity)
        self.log = self.folder / "log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients find it."""

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """What starts it in the foreground."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the process that was started last serves clients."""

    @property
    def pid(self) -> int:
        """The main process."""
        assert self._process is not None, f"{self.binary} was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started, and not ended since."""
        return self._process is not None

    def start(self) -> None:
        """Start it, on the same port and folder as before, and wait until it serves."""
        assert self._process is None, f"{self.binary} runs already"
        with self.log.open("ab") as log:
            self._process = launch(self.command(), self.folder, log.fileno(), self.identity)
        until = monotonic() + PATIENCE
        while not self.ready():
            if self._process.poll() is not None or monotonic() > until:
                self.kill()
                raise RuntimeError(f"{self.binary} did not start: {self.log.read_text(errors='replace')[-2000:]}")
            sleep(self.poll)

    def stop(self) -> None:
        """End it in order; connections are closed. It does nothing when it does not run."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(self.stop_signal)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._process is None:
            return
        self._process.kill()
        end(self.folder)
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        """SIGSTOP to all of its processes: connections stay open and nobody answers."""
        assert self._process is not None, f"{self.binary} does not run"
        self._process.send_signal(signal.SIGSTOP)  # first, so that it starts no other meanwhile
        until = monotonic() + PATIENCE
        while running := [process for process in inhabitants(self.folder) if not has_stopped(process)]:
            assert monotonic() < until, f"{self.binary} does not stop"
            for process in running:
                with suppress(psutil.Error):
                    process.suspend()
            sleep(0.001)

    def resume(self) -> None:
        """SIGCONT to all of its processes."""
        for process in inhabitants(self.folder):
            with suppress(psutil.Error):
                process.resume()

    def restart(self) -> None:
        """Start it again, after a stop in order if it still runs."""
        self.stop()
        self.start()


def has_stopped(process: psutil.Process) -> bool:
    """Whether a process is stopped, or gone."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def launch(command: Sequence[str | Path], folder: Path, log: int, identity: Identity) -> "subprocess.Popen[bytes]":
    """Start a program in a session of its own, so that Ctrl-C does not reach it."""
    return subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        **identity,
    )
