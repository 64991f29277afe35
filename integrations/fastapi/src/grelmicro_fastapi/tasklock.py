"""`TaskFamily`: the task locks that one template names, and how a request holds one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
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

    @asynccontextmanager
    async def hold(
        self, name: str, connection: HTTPConnection, *, in_thread: Callable[..., object] | None
    ) -> AsyncIterator[LockHandle]:
        """Hold the task lock `name` while a request is served, without waiting for it.

        A request that ends before its handler begins has done no work: then it is free at once.

        Raises:
            WouldBlockError: another holder has it, or its minimum hold is not over.
            LockLostError: it was lost before the request was served.
            CoordinationBackendError: the store failed before it was taken.
        """
        served = False
        lock = TaskLock.from_config(name, self.config, backend=lock_backend(connection))
        try:
            async with AsyncExitStack() as stack:
                handle = await stack.enter_async_context(lock)
                thread = in_thread and InThread(in_thread)
                if thread is not None:
                    handle.stop_interrupting(None)  # a thread cannot be cancelled: a loss shows at the end
                try:
                    yield handle
                except BaseException as error:
                    with suppress(GrelmicroError):
                        if not was_entered(route_of(connection).endpoint, error):
                            await _free(handle)
                        elif thread is not None and isinstance(error, asyncio.CancelledError):  # it may run on
                            thread.then(stack.pop_all().aclose)
                    raise
                finally:
                    if thread is not None:
                        thread.leave()
                served = True
        except CoordinationBackendError as failure:
            if not served:
                raise
            logger.warning("task lock '%s' runs out later than it should: %s", name, failure)


async def _free(handle: LockHandle) -> None:
    try:
        await handle.release()
    except CoordinationBackendError:
        handle.give_back()  # in the background, and the failing store is asked no more for now
