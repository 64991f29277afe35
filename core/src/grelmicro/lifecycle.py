"""Things that several users open and that are really opened once, in one process and on one event loop."""

import asyncio
import logging
import os
import sys
from asyncio import get_running_loop
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, cast

from grelmicro.errors import OutOfContextError

logger = logging.getLogger("grelmicro")

T = TypeVar("T")

END_LIMIT = 1.0
"""Seconds that a task which was cancelled has to end."""


class Generation:
    """The present process: a fork starts a new one, in which nothing inherited may be used."""


generation = Generation()


def _forked() -> None:
    global generation
    generation = Generation()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class AwaitedCancelledError(Exception):
    """Something that a task awaited was cancelled, and the task itself was not."""

    def __init__(self) -> None:
        super().__init__(
            "it awaited something that was cancelled elsewhere, for instance a task shared with other code"
        )


@contextmanager
def distinguish_cancellation() -> Iterator[None]:
    """Raise `AwaitedCancelledError` from a block in which something awaited was cancelled, and the running task not.

    Both arrive as `CancelledError`. Only a cancellation of the task itself may end a loop.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    except asyncio.CancelledError as cancelled:
        if task is None or task.cancelling() > before:
            raise
        raise AwaitedCancelledError from cancelled


def raise_if_cancelled() -> None:
    """Raise `CancelledError` if the running task was cancelled and something that it awaited kept that to itself."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def outlast(work: "asyncio.Future[T]", *, hurry: Callable[[], object] | None = None) -> T:
    """Await `work` to its end, however often the caller is cancelled meanwhile; that is raised at the end.

    Args:
        work: what has to end; it is not cancelled.
        hurry: called at the first cancellation.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError as cancelled:
        if work.cancelled():
            raise
        if hurry is not None:
            hurry()
        with shielded():
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({work})
        raise cancelled


async def carry_out(work: Coroutine[Any, Any, object], limit: float, title: str) -> None:
    """Await `work` in a task of its own, to its end, however often the caller is cancelled meanwhile.

    Args:
        work: what has to end.
        limit: seconds after which it is cancelled; see `end_or_leave`.
        title: what it is, for the log.
    """
    task = asyncio.get_running_loop().create_task(work, name=title)
    await outlast(asyncio.ensure_future(_end_within(limit, task)))


async def _end_within(limit: float, task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task}, timeout=limit)
    if task.done():
        task.result()
        return
    logger.warning("%s took longer than %g s, and is cancelled", task.get_name(), limit)
    await end_or_leave({task})


async def end_or_leave(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and wait for their end. Those that ignore that are left behind, and named in the log."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    _, left = await asyncio.wait(tasks, timeout=END_LIMIT)
    for task in left:
        task.add_done_callback(_look_at_its_error)
        logger.error("%s ignores its cancellation, and is left behind: the event loop waits for it", task.get_name())


def _look_at_its_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def shielded() -> AbstractContextManager[object]:
    """A block in which no scope of anyio cancels the task, if that library is used; `Task.cancel` still does.

    A cancelled scope cancels each await of its tasks at once, again and again, and keeps the event loop from sleeping
    for as long as they wait. Whoever has to wait all the same after a cancellation waits in here.
    """
    anyio = sys.modules.get("anyio")  # no scope exists where nobody imported it
    return nullcontext() if anyio is None else cast(AbstractContextManager[object], anyio.CancelScope(shield=True))


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs here.

    Raises:
        OutOfContextError: asyncio does not run here.
    """
    try:
        return get_running_loop()
    except RuntimeError as error:
        raise OutOfContextError(
            "no event loop of asyncio runs here, and no other kind is supported: start it with asyncio.run(); a "
            "program on trio opens the app with `with`, and uses `from_thread` in a thread"
        ) from error


def check_threads() -> None:
    """Raise `OutOfContextError` where threads are not those of Python, on which event loops rely."""
    for library, patched in (("gevent", _gevent_patched), ("eventlet", _eventlet_patched)):
        if patched():
            raise OutOfContextError(
                f"{library} has replaced threads and sockets of this process, and is not supported: run it without "
                f"monkey-patching, as with a worker of gunicorn that is none of {library}, such as gthread or uvicorn's"
            )


def _gevent_patched() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _eventlet_patched() -> bool:
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("thread"))


class BoundToProcess:
    """Something that holds what belongs to one process, such as connections and leases."""

    def __reduce__(self) -> NoReturn:
        """A copy would know nothing of what the original holds, in another process or in this one."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since what it holds belongs to this process: build it "
            "where it is used, such as at the top of a module that each process imports, and pass names"
        )


class Shared(BoundToProcess):
    """Opened by each of its users with `async with`; the first opens it, the last closes it.

    Subclasses write `_begin_use`, which leaves nothing behind when it fails, and `_end_use`, which raises only for
    faults.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _generation: Generation | None = None
    _change: asyncio.Future[None] | None = None
    _users = 0

    async def _begin_use(self) -> None:
        """Open it; called on the event loop that it will serve."""

    async def _end_use(self) -> None:
        """Close it."""

    def abandon(self) -> None:
        """Drop what belongs to an event loop that is gone or to the parent process, without touching either."""

    @property
    def is_open(self) -> bool:
        """Whether it is open in this process."""
        return self._users > 0 and self._generation is generation

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it serves.

        Raises:
            OutOfContextError: it is not open in this process.
        """
        if self._loop is None or not self.is_open:
            raise OutOfContextError(self._why_closed())
        return self._loop

    def check_open(self, user: str = "") -> None:
        """Raise `OutOfContextError` unless it is open in this process and on the running event loop.

        Args:
            user: the stored name of what uses it, such as `lock:cart`, for the error's text.
        """
        if self._loop is not get_running_loop() or self._generation is not generation:
            kind, _, name = user.partition(":")
            used_by = f"{kind} '{name}': " if user else ""
            if self._loop is None or not self.is_open:
                raise OutOfContextError(used_by + self._why_closed())
            raise OutOfContextError(
                f"{used_by}{'its backend' if user else self._title()} serves another event loop than the running one: "
                "use it on the loop that opened it, through `from_thread` in a thread, or through a lock's `from_loop` "
                "in a coroutine"
            )

    async def __aenter__(self) -> Self:
        self._leave_the_dead()
        loop = running_loop()
        if self._loop is None:
            check_threads()
        while self._loop is loop and self._change is not None:  # another one opens or closes it now
            await asyncio.wait({self._change})
        if self._loop is None:
            self._loop, self._generation = loop, generation
            with self._changing(loop):
                try:
                    await self._begin_use()
                except BaseException:
                    self._loop = self._generation = None
                    raise
        elif self._loop is not loop:
            raise OutOfContextError(
                f"{self._title()} is open on another event loop: close it there first, or build one per event loop"
            )
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_open:  # closed by a fork: the parent closes its own
            return
        self._users -= 1
        if self._users:
            return
        with self._changing(asyncio.get_running_loop()):
            try:
                await self._end_use()
            finally:
                self._loop = self._generation = None

    @contextmanager
    def _changing(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Let those who come meanwhile wait until it is over."""
        change = self._change = loop.create_future()
        try:
            yield
        finally:
            change.set_result(None)
            if self._change is change:
                self._change = None

    def _leave_the_dead(self) -> None:
        """Start anew when the loop that opened it is closed, or is the one of the process that this was forked from."""
        gone = self._generation is not generation or (self._loop is not None and self._loop.is_closed())
        if self._generation is not None and gone:
            self.abandon()
            self._users = 0
            self._loop = self._generation = self._change = None

    def _title(self) -> str:
        return type(self).__name__

    def _why_closed(self) -> str:
        if self._users and self._generation is not generation:
            return f"{self._title()} was opened before this process was forked: open it again in this process"
        return f"{self._title()} is not open: use it inside `async with`, or let an open Grelmicro app own it"


class Resource(Shared):
    """What its users share, with public names for what subclasses write."""

    async def open(self) -> None:
        """Open it; called on the event loop that it will serve. It leaves nothing behind when it fails."""

    async def close(self) -> None:
        """Close it; raises only for faults."""

    async def _begin_use(self) -> None:
        await self.open()

    async def _end_use(self) -> None:
        await self.close()
