"""Reports about changes of a SQLite file, believed only after one that this process caused has come."""

import asyncio
import errno
import logging
import math
from collections.abc import Callable

from grelmicro.backends.sqlite.lane import Lane
from grelmicro.backends.sqlite.notifier import Files, Notifier, notifier
from grelmicro.leases.outage import Outage

logger = logging.getLogger("grelmicro.coordination")

ANSWER_LIMIT_S = 3.0
"""Seconds within which a report that this process caused has to come."""

RETRY_INTERVAL_S = 60.0
"""Seconds until the operating system is asked again for reports that it did not give."""

_UNSUPPORTED = frozenset((errno.ENOSYS, errno.ENOTSUP))


class Reports:
    """What the operating system reports about a file while there is a waiter. It is used on the event loop.

    Args:
        path: the file.
        lane: its thread begins and ends the watch, which takes some milliseconds.
        came: called after each report.
        possible: whether the file system reports the changes of all processes.
    """

    def __init__(self, path: str, lane: Lane, came: Callable[[], None], *, possible: bool = True) -> None:
        self._path = path
        self._lane = lane
        self._came = came
        self._outage = Outage(f"{path}: waking waiters at once (they probe it meanwhile)", logger)
        self._notifier: Notifier | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry_at = -math.inf if possible else math.inf
        self._deaf: Files | None = None
        self._touched_at = 0.0
        self._unmute: asyncio.TimerHandle | None = None
        self.listening = False
        """Whether the next report wakes the event loop."""
        self.trusted = False
        """Whether a report that this process caused has come, so that reports of others come, too."""
        self.pending = False
        """Whether a report has come since `take`."""
        self.came_at = -math.inf
        """When the event loop has seen the last one, by its time."""

    def take(self) -> bool:
        """Whether a report has come since the last call."""
        taken, self.pending = self.pending, False
        return taken

    def drain(self) -> bool:
        """Take reports that the event loop has not seen; whether there are any. Any thread may call it."""
        watch = self._notifier
        return self.trusted and watch is not None and watch.drain()

    def listen(self) -> None:
        """Have `came` called at the next report. Until then the event loop is not woken by any."""
        if self._notifier is not None and self._loop is not None and not self.listening:
            self._loop.add_reader(self._notifier.fileno(), self._on_report)
            self.listening = True
        self._cancel_unmute()

    def mute(self, seconds: float) -> None:
        """Do not have the event loop woken for a while. What is reported meanwhile is seen then."""
        if self._loop is not None and self.listening:
            self._stop_listening()
            self._unmute = self._loop.call_later(seconds, self.listen)

    async def follow(self, files: Files) -> None:
        """Have the changes of `files` reported, which are at the path now."""
        now = asyncio.get_running_loop().time()
        if self._notifier is None:
            if now >= self._retry_at and files != self._deaf:
                await self._begin()
        elif self._notifier.files != files:
            self.end()
        elif not self.trusted and now - self._touched_at > ANSWER_LIMIT_S:
            self._fail(TimeoutError(f"a change by this process was not reported within {ANSWER_LIMIT_S:g} s"))

    def test(self) -> None:
        """Believe no report until one has come that this process causes now."""
        if self._notifier is not None:
            self.trusted = False
            self._touched_at = asyncio.get_running_loop().time()
            try:
                self._notifier.touch()
            except OSError:  # it was replaced just now
                self.end()

    def miss(self, files: Files) -> None:
        """A change of `files` was not reported: ask for no more reports about them."""
        if self._notifier is not None and self._notifier.files == files:
            self._deaf = files
            self._fail(OSError("a change by another process was not reported"))

    def end(self) -> None:
        """End the watch."""
        self._stop_listening()
        watch = self._notifier
        self.abandon()
        if watch is not None:
            self._lane.aside(watch.close)

    def abandon(self) -> None:
        """Forget a watch that a fork has closed, or whose event loop is gone."""
        self._notifier = self._loop = self._unmute = None
        self.listening = self.trusted = self.pending = False

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            watch = await self._lane.aside(lambda: notifier(self._lane.resolved))
            loop.add_reader(watch.fileno(), self._on_report)
            self.listening = True
        except FileNotFoundError:  # it was removed just now
            return
        except NotImplementedError:  # the loop cannot listen to it
            self._retry_at = math.inf
            return
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _UNSUPPORTED:
                self._retry_at = math.inf
            else:
                self._fail(error)
            return
        self._notifier, self._loop = watch, loop
        self.test()

    def _on_report(self) -> None:
        self._stop_listening()
        if self._notifier is None or not self._notifier.drain():
            return
        self.pending, self.came_at = True, asyncio.get_running_loop().time()
        if not self.trusted:
            self.trusted = True
            self._outage.over(self.came_at)
        self._came()

    def _stop_listening(self) -> None:
        if self._notifier is not None and self._loop is not None and self.listening:
            self._loop.remove_reader(self._notifier.fileno())
        self.listening = False
        self._cancel_unmute()

    def _cancel_unmute(self) -> None:
        if self._unmute is not None:
            self._unmute.cancel()
            self._unmute = None

    def _fail(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        self._outage.note(error, now, math.inf)
        self._retry_at = now + RETRY_INTERVAL_S
        self.end()
