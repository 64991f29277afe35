"""Who holds a lease: names that nobody else can have, and the task or thread that a lease was taken for."""

import itertools
import os
import threading
import weakref
from asyncio import current_task
from secrets import token_hex
from typing import Protocol
from uuid import UUID

from grelmicro.errors import OutOfContextError

_process = token_hex(8)
_count = itertools.count()


def mint() -> str:
    """A name that no other process, and nothing else in this one, ever has.

    It is made of 64 random bits of the process and a count, so that making one costs no system call.
    """
    return f"{_process}{next(_count)}"


def _start_anew() -> None:
    global _process
    _process = token_hex(8)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def worker_name(worker: str | UUID | None) -> str:
    """The readable prefix of an instance's holders: as given, else 16 random hex characters."""
    return token_hex(8) if worker is None else str(worker)


class Owner(Protocol):
    """The task or thread that holds something."""

    def done(self) -> bool:
        """Whether it has ended."""


class ThreadOwner:
    """A thread, which may be any: its end is seen by the end of its local storage, never by a recycled ident."""

    def __init__(self, beacon: "_Beacon") -> None:
        self._beacon = weakref.ref(beacon)

    def done(self) -> bool:
        """Whether the thread has ended."""
        return self._beacon() is None


class _Beacon:
    """Lives in a thread's local storage, and ends with it."""

    def __init__(self) -> None:
        self.owner = ThreadOwner(self)


_local = threading.local()


def this_task() -> Owner:
    """The running task."""
    task = current_task()
    if task is None:
        raise OutOfContextError("a lease is taken for a task: await this in a coroutine that runs in a task")
    return task


def this_thread() -> Owner:
    """The running thread."""
    beacon: _Beacon | None = getattr(_local, "beacon", None)
    if beacon is None:
        beacon = _local.beacon = _Beacon()
    return beacon.owner
