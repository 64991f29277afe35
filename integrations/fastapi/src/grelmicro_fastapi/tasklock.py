"""`TaskFamily`: the task locks that one template names, and how a request holds one."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from fastapi.requests import HTTPConnection

from grelmicro.coordination import CoordinationBackendError, LockHandle, TaskLock, TaskLockConfig
from grelmicro.errors import GrelmicroError
from grelmicro.names import NameTemplate
from grelmicro.straying import InThread
from grelmicro_fastapi.entry import was_entered
from grelmicro_fastapi.values import route_of
from grelmicro_starlette import lock_backend

logger = logging.getLogger("grelmicro.fastapi")


@dataclass(frozen=True, slots=True)
class TaskFamily:
    """What handlers hold while they run, and for a while afterwards: one for each set of values of the fields."""

    template: NameTemplate
    config: TaskLockConfig

    @classmethod
    def of(cls, name: str, **settings: Any) -> Self:
        """The family of a template.

        Args:
            name: the template.
            settings: keywords of `TaskLock`; those that are None come from the environment.

        Raises:
            SettingsValidationError: the template or a setting breaks a rule.
        """
        template = NameTemplate(name)
        return cls(template, TaskLock(name, **settings).config.renewing())

    def hold(
        self, name: str, connection: HTTPConnection, *, in_thread: Callable[..., object] | None
    ) -> AbstractAsyncContextManager[LockHandle]:
        """Hold the task lock `name` while a request is served; see `TaskHold`."""
        lock = TaskLock.from_config(name, self.config, backend=lock_backend(connection))
        return TaskHold(lock, connection, in_thread)


class TaskHold:
    """Holds a task lock while a request is served, without waiting for it.

    A request that ends before its handler begins has done no work: then it is free at once. It is no generator, which
    the garbage collector might end before that of a dependency which a request left unfinished.

    Args:
        lock: what to hold.
        connection: the request.
        in_thread: the function that does the work, if it runs in a thread, which cannot be cancelled: a loss then shows
            at the end, and if the request is cancelled the lock is held on until the thread has ended.

    Raises:
        WouldBlockError: another holder has it, or its minimum hold is not over.
        LockLostError: it was lost before the request was served.
        CoordinationBackendError: the store failed before it was taken.
    """

    __slots__ = ("_connection", "_handle", "_in_thread", "_lock", "_thread")

    def __init__(self, lock: TaskLock, connection: HTTPConnection, in_thread: Callable[..., object] | None) -> None:
        self._lock = lock
        self._connection = connection
        self._in_thread = in_thread

    async def __aenter__(self) -> LockHandle:
        self._handle = handle = await self._lock.__aenter__()
        self._thread = self._in_thread and InThread(self._in_thread)
        if self._thread is not None:
            handle.stop_interrupting(None)  # a thread cannot be cancelled: a loss shows at the end
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.leave()
        if error is not None:
            if not was_entered(route_of(self._connection).endpoint, error):
                with suppress(GrelmicroError):
                    await _free(self._handle)
            elif self._thread is not None and isinstance(error, asyncio.CancelledError):  # it may run on
                self._thread.then(partial(self._lock.__aexit__, None, None, None))
                return
        try:
            await self._lock.__aexit__(kind, error, traceback)
        except CoordinationBackendError as failure:
            if error is not None:
                raise
            logger.warning("task lock '%s' runs out later than it should: %s", self._lock.name, failure)


async def _free(handle: LockHandle) -> None:
    try:
        await handle.release()
    except CoordinationBackendError:
        handle.give_back()  # in the background, and the failing store is asked no more for now
