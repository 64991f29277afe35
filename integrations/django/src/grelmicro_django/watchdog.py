"""Run a command that ends with the lease of its parent: `python watchdog.py FEED GRACE COMMAND [ARGS...]`.

It is a program of its own, so that no code of the command can hold it up, and it imports the standard library alone, so
that it starts quickly. FEED is the file descriptor of a socket on which the parent writes lines of two times, in
seconds on the monotonic clock: when the command is asked to end, and when it is killed. Each line replaces the one
before. The end of the parent closes the socket: the command is asked to end at once, and killed GRACE seconds later at
the latest. The exit status is the command's.
"""

import os
import select
import signal
import subprocess
import sys
from time import monotonic

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]

LOOK_S = 0.05
"""Seconds between two looks at what the command has left behind."""

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel of Linux kill this process when its parent dies."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died before
            os._exit(1)


class Feed:
    """The times of the parent.

    Args:
        source: the file descriptor to read.
        grace: seconds that the command has when the parent is gone.
    """

    def __init__(self, source: int, grace: float) -> None:
        self.source = source
        self.ask_at = self.kill_at = monotonic() + grace
        self.open = True
        self._grace = grace
        self._rest = b""

    def read(self) -> None:
        """Read what the parent wrote."""
        data = os.read(self.source, 4096)
        if not data:
            self.open = False
            self.end()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.ask_at, self.kill_at = (float(each) for each in line.split())

    def end(self) -> None:
        """Ask the command to end now."""
        now = monotonic()
        self.ask_at = min(self.ask_at, now)
        self.kill_at = min(self.kill_at, now + self._grace)


def send(group: int, number: int) -> bool:
    """Send a signal to all processes of a group; whether there were any."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def watch(command: list[str], feed: Feed) -> int:
    """Run the command until it ends, and what it leaves behind; its exit status, negative for a signal."""
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup, which the command inherits
            signal.signal(number, lambda number, frame: feed.end())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent)
    asked = False
    while True:
        status = process.poll()
        if status is not None:
            feed.end()
            if not send(process.pid, 0):
                return status
        now = monotonic()
        if now >= feed.kill_at:
            send(process.pid, signal.SIGKILL)
            return process.wait()
        if now >= feed.ask_at and not asked:
            asked = send(process.pid, signal.SIGTERM)
        limit = (feed.kill_at if asked else feed.ask_at) - now
        sources = [waking, feed.source] if feed.open else [waking]
        ready, _, _ = select.select(sources, [], [], max(limit if status is None else min(limit, LOOK_S), 0))
        if waking in ready:
            os.read(waking, 4096)
        if feed.source in ready:
            feed.read()


def main() -> None:
    """The program."""
    source, grace, *command = sys.argv[1:]
    status = watch(command, Feed(int(source), float(grace)))
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
