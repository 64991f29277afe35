"""Opening a store that may not be there yet, as where all parts of a system start at the same time."""

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import Protocol, runtime_checkable

from grelmicro.config import Duration, check_seconds
from grelmicro.coordination.protocols import Backend
from grelmicro.errors import GrelmicroError, SettingsValidationError
from grelmicro.leases import Lease

logger = logging.getLogger("grelmicro.coordination")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0
"""Seconds between two tries: doubled from the first to the longest."""

PROBE = "lock:grelmicro-check"
"""The name that is read, or taken by a health probe, as a proof that the store is there."""


@runtime_checkable
class Readable(Protocol):
    """What a store, or a backend on one, can be asked."""

    async def read(self, name: str) -> Lease | None:
        """See `LeaseStore.read`."""


def store_wait(given: Duration | None) -> float:
    """For how many seconds to wait for a store that is not there: as given, or as GREL_STORE_WAIT says, or 0.

    Raises:
        SettingsValidationError: it is not a number of seconds.
    """
    if given is not None:
        return check_seconds("wait", given, zero=True)
    text = os.environ.get("GREL_STORE_WAIT")
    if not text:
        return 0.0
    try:
        return check_seconds("GREL_STORE_WAIT", float(text), zero=True)
    except ValueError:
        raise SettingsValidationError(
            "GREL_STORE_WAIT should be a number of seconds, 0 or more and at most ten years, such as 30"
        ) from None


class Opening:
    """Opens backends one after the other, and together waits at most `seconds` for those that are not there yet.

    Args:
        stack: what closes them.
        seconds: how long to wait; with 0 each is tried once, and none is asked for more than opening it asks.
    """

    def __init__(self, stack: AsyncExitStack, seconds: float) -> None:
        self._stack = stack
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + seconds

    async def open(self, backend: Backend, title: str) -> None:
        """Open one, and try again while its store is not there.

        Raises:
            GrelmicroError: it was not there in time, or trying again does not help.
        """
        begun = self._loop.time()
        pause = FIRST_PAUSE_S
        missing = False
        while True:
            try:
                await self._try(backend)
            except Exception as error:
                left = self._until - self._loop.time()
                if left <= 0 and missing:
                    error.add_note(f"It was waited for, {self._seconds:g} s in all (wait=, GREL_STORE_WAIT).")
                if left <= 0 or _is_lasting(error):
                    raise
                if not missing:
                    logger.warning("%s is not there yet, and is waited for up to %.0f s: %s", title, left, error)
                missing = True
                await asyncio.sleep(min(pause, left))
                pause = min(pause * 2, MAX_PAUSE_S)
            else:
                if missing:
                    logger.warning("%s is there after %.1f s", title, self._loop.time() - begun)
                return

    async def _try(self, backend: Backend) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(backend)
            if self._seconds > 0 and isinstance(backend, Readable):
                await backend.read(PROBE)
            self._stack.push_async_exit(stack.pop_all())


def _is_lasting(error: Exception) -> bool:
    """Whether trying again does not help."""
    if isinstance(error, GrelmicroError):
        return error.lasting
    return isinstance(error, PermissionError) or not isinstance(error, OSError)
