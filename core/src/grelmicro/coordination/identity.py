"""The worker's name that holders begin with, and the task or thread that a lease was taken for."""

import threading
import weakref
from asyncio import AbstractEventLoop, Task, current_task, get_running_loop
from contextvars import ContextVar
from secrets import token_hex
from typing import Any, Protocol
from uuid import UUID

from grelmicro.errors import OutOfContextError


class WorkerName:
    """The readable name with which an instance's holders begin.

    It is the given one, else that of the app whose backend the instance uses, else 16 random hex characters.
    """

    __slots__ = ("_given", "_own", "named_by", "text")

    def __init__(self, worker: str | UUID | None) -> None:
        self._given = worker is not None
        self._own = token_hex(8) if worker is None else str(worker)
        self.text = self._own
        self.named_by = ""
        """The app's name that `text` regards."""

    def use(self, backend: object) -> None:
        """Let `backend` grant the next lease."""
        self.named_by = getattr(backend, "worker", "")
        self.text = self._own if self._given else self.named_by or self._own


class Owner(Protocol):
    """The task or thread that holds something."""

    def done(self) -> bool:
        """Whether it has ended."""


class _Nobody:
    """The owner of what its owner left held."""

    def done(self) -> bool:
        """Whether it has ended."""
        return True


NOBODY: Owner = _Nobody()


class ThreadOwner:
    """A thread, or one call in a thread of a pool, which serves one caller after another in contexts of their own.

    Its end is seen by the end of what lives in the thread's local storage and in the context, never by a recycled
    ident.
    """

    def __init__(self, thread: "_Beacon", call: "_Call") -> None:
        self.thread = weakref.ref(thread)
        self._call = weakref.ref(call)

    def done(self) -> bool:
        """Whether the thread or the call has ended."""
        return self.thread() is None or self._call() is None


class _Beacon:
    """Lives in a thread's local storage, and ends with it."""


class _Call:
    """Lives in a context, and ends with it."""

    def __init__(self, thread: _Beacon) -> None:
        self.owner = ThreadOwner(thread, self)


_local = threading.local()
_call: ContextVar[_Call | None] = ContextVar("grelmicro_call", default=None)


def this_task(loop: AbstractEventLoop | None = None) -> Task[Any]:
    """The running task; it is found sooner by whoever knows the running event loop."""
    task = current_task(loop)
    if task is None:
        raise OutOfContextError("a lease is taken for a task: await this in a coroutine that runs in a task")
    return task


def calling_task() -> "Task[Any] | None":
    """The running task, if this is called in one."""
    try:
        return current_task(get_running_loop())
    except RuntimeError:  # no event loop runs in this thread
        return None


def this_thread() -> Owner:
    """The running thread, or the call that it serves."""
    beacon: _Beacon | None = getattr(_local, "beacon", None)
    if beacon is None:
        beacon = _local.beacon = _Beacon()
    call = _call.get()
    if call is None or call.owner.thread() is not beacon:  # that of another thread, whose context this one began with
        call = _Call(beacon)
        _call.set(call)
    return call.owner


def forget_this_call() -> None:
    """Let what this thread asks for from now on be asked for by another owner than before."""
    _call.set(None)
