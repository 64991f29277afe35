"""`LockFamily`: the locks that one template names, and how a request holds one."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from grelmicro.coordination import LockHandle, LockTemplate, MultiLock, MultiLockHandle
from grelmicro_starlette.holding import hold
from grelmicro_starlette.serving import lock_backend


@dataclass(frozen=True, slots=True)
class LockFamily(LockTemplate):
    """What handlers hold while they run: one lock for each set of values of a template's fields."""

    def hold(
        self, name: str, connection: HTTPConnection, *, in_thread: bool
    ) -> AbstractAsyncContextManager[LockHandle]:
        """Hold the lock `name` of this family while a request is served; see `hold`."""
        return hold(self.lock(name, lock_backend(connection)), self.timeout, connection, in_thread=in_thread)


def hold_all(
    families: Sequence[LockFamily], names: Sequence[str], connection: HTTPConnection, *, in_thread: bool
) -> AbstractAsyncContextManager[MultiLockHandle]:
    """Hold a lock of each of these families, all or none, for which the first one's `timeout` counts; see `hold`."""
    backend = lock_backend(connection)
    locks = [family.lock(name, backend) for family, name in zip(families, names, strict=True)]
    return hold(MultiLock(*locks), families[0].timeout, connection, in_thread=in_thread)
