"""Keep a command running in a process of its own while this one leads."""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import uniform
from time import monotonic

from grelmicro.coordination import LeaderElection

logger = logging.getLogger("grelmicro.django")

WATCHDOG = str(Path(__file__).with_name("watchdog.py"))

FIRST_PAUSE_S = 1.0
"""Seconds before a command that has died is started again; each further pause is twice as long."""
MAX_PAUSE_S = 60.0
"""The longest pause, and for how long a command runs so that the next pause is the first one again."""

TIME_TO_END = 0.9
"""The share of the time between the renew deadline and the end of the lease in which a command may end by itself."""


class Watched:
    """A command under its watchdog.

    Args:
        command: its command line.
        grace: seconds that it has to end when this process dies.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, command: Sequence[str], grace: float) -> None:
        self._feed, theirs = socket.socketpair()
        self._feed.setblocking(False)
        with theirs:
            feed = theirs.fileno()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", WATCHDOG, str(feed), repr(grace), *command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[feed],
                    process_group=0,  # Ctrl+C in a terminal is for the leader, which ends its command
                )
            except BaseException:
                self._feed.close()
                raise
        self._ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._feed, self._end)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    def allow(self, ask_at: float, kill_at: float) -> None:
        """Let it run: it is asked to end at the one time, and killed at the other; seconds on the monotonic clock."""
        # A watchdog that does not read keeps the times that it has, which are earlier; one that is dead needs none.
        with suppress(OSError):
            self._feed.send(f"{ask_at!r} {kill_at!r}\n".encode())

    async def wait(self, limit: float) -> bool:
        """Wait for its end, for so many seconds at most; whether it has ended."""
        await asyncio.wait([self._ended], timeout=limit)
        return self.ended

    def close(self) -> int:
        """Its exit status, negative for a signal; it has ended, or is killed."""
        asyncio.get_running_loop().remove_reader(self._feed)
        self._feed.close()
        return self.process.wait()

    def _end(self) -> None:
        """The watchdog has closed its end of the socket."""
        asyncio.get_running_loop().remove_reader(self._feed)
        if not self._ended.done():
            self._ended.set_result(None)


class Supervisor:
    """Runs a command in each term of an election, and again whenever it ends.

    Args:
        election: the election.
        command: the command line.
        grace: seconds between asking the command to end and killing it.
        tell: told of each term.
    """

    def __init__(
        self, election: LeaderElection, command: Sequence[str], grace: float, tell: Callable[[str], object]
    ) -> None:
        self._election = election
        self._command = command
        self._grace = grace
        self._tell = tell
        self._ask_at = self._kill_at = 0.0

    async def work(self) -> None:
        """Keep the command running until the term ends, or this is cancelled; it has ended then."""
        name = self._election.name
        self._tell(f"leading '{name}'")
        pause = FIRST_PAUSE_S
        while True:
            began = monotonic()
            try:
                how = _ending(await self._run())
            except OSError as error:
                how = f"could not be started: {error}"
            ran = monotonic() - began
            pause = FIRST_PAUSE_S if ran >= MAX_PAUSE_S else pause
            rest = uniform(0.75, 1.25) * pause
            logger.warning("the command of '%s' %s after %.1f s, and is started again in %.1f s", name, how, ran, rest)
            await asyncio.sleep(rest)
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _run(self) -> int:
        """Run the command once; its exit status."""
        watched = Watched(self._command, self._grace)
        try:
            interval = self._election.config.retry_interval / 2
            self._look()
            while not watched.ended:
                watched.allow(self._ask_at, self._kill_at)
                await watched.wait(interval)
                self._look()
        except asyncio.CancelledError:
            await self._end(watched)
            raise
        finally:
            status = watched.close()
        return status

    def _look(self) -> None:
        """Learn until when the lease lasts, as long as it does."""
        now = monotonic()  # before the age is computed: the times are rather too early
        age = self._election.last_confirmation_age()
        if self._election.is_leader():
            config = self._election.config
            to_end = config.lease_duration - config.renew_deadline
            self._ask_at = now - age + config.renew_deadline
            self._kill_at = self._ask_at + TIME_TO_END * to_end

    async def _end(self, watched: Watched) -> None:
        """Ask the command to end, and see that it ends before the lease does; a further cancellation kills it."""
        now = monotonic()
        lost_early = not self._election.is_leader() and now < self._ask_at
        limit = now if lost_early else now + self._grace
        interval = self._election.config.retry_interval / 2
        while not watched.ended:
            self._look()
            watched.allow(0.0, min(limit, self._kill_at))
            try:
                await watched.wait(interval)
            except asyncio.CancelledError:
                limit = 0.0


def _ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
