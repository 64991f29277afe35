"""`TaskFamily`: the task locks that one template names, and how a request holds one."""

import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from fastapi.requests import HTTPConnection

from grelmicro.coordination import CoordinationBackendError, LockHandle, TaskLock, TaskLockConfig
from grelmicro.names import NameTemplate
from grelmicro_fastapi.entry import was_entered
from grelmicro_fastapi.values import route_of
from grelmicro_starlette import Hold, lock_backend

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
        self, name: str, connection: HTTPConnection, *, in_thread: bool
    ) -> AbstractAsyncContextManager[LockHandle]:
        """Hold the task lock `name` while a request is served, without waiting for it; see `Hold`.

        Raises:
            WouldBlockError: another holder has it, or its minimum hold is not over.
            LockLostError: it was lost before the request was served.
            CoordinationBackendError: the store failed before it was taken.
        """
        lock = TaskLock.from_config(name, self.config, backend=lock_backend(connection))
        return Hold(lock.__aenter__, partial(_ending, lock, route_of(connection).endpoint), in_thread=in_thread)


def _ending(
    lock: TaskLock, endpoint: Callable[..., Any], handle: LockHandle, error: BaseException | None
) -> Callable[[], Coroutine[Any, Any, None]]:
    """How it ends. A request that ends before its handler begins has done no work: then it is free at once."""
    if error is None or was_entered(endpoint, error):
        return partial(_end, lock)
    return partial(_free, handle)


async def _end(lock: TaskLock) -> None:
    try:
        await lock.__aexit__(None, None, None)
    except CoordinationBackendError as failure:
        logger.warning("task lock '%s' runs out later than it should: %s", lock.name, failure)


async def _free(handle: LockHandle) -> None:
    try:
        await handle.release()
    except CoordinationBackendError:
        handle.give_back()  # in the background, and the failing store is asked no more for now
