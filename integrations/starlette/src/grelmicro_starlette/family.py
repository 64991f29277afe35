"""`LockFamily`: the locks that one template names, with settings that are read once."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

from starlette.requests import HTTPConnection

from grelmicro.config import check_seconds
from grelmicro.coordination import Lock, LockConfig, LockHandle, MultiLock, MultiLockHandle
from grelmicro.names import NameTemplate
from grelmicro_starlette.holding import hold
from grelmicro_starlette.serving import lock_backend


@dataclass(frozen=True, slots=True)
class LockFamily:
    """What handlers hold while they run: one lock for each set of values of a template's fields."""

    template: NameTemplate
    timeout: float | None
    config: LockConfig

    @classmethod
    def of(
        cls,
        name: str,
        *,
        timeout: float | None,
        auto_renew: bool | None,
        lease_duration: float | None,
        max_hold: float | None,
    ) -> Self:
        """The family of a template; settings left None come from the environment.

        Raises:
            SettingsValidationError: the template or a setting breaks a rule.
        """
        template = NameTemplate(name)
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, zero=True)
        lock = Lock(name, auto_renew=auto_renew, lease_duration=lease_duration, max_hold=max_hold)
        return cls(template, timeout, lock.config.renewing())

    def hold(
        self, name: str, connection: HTTPConnection, *, in_thread: bool
    ) -> AbstractAsyncContextManager[LockHandle]:
        """Hold the lock `name` of this family while a request is served; see `hold`."""
        return hold(self.lock(name, connection), self.timeout, connection, in_thread=in_thread)

    def lock(self, name: str, connection: HTTPConnection) -> Lock:
        """The lock `name` of this family, in the store of the app that serves the request."""
        return Lock.from_config(name, self.config, backend=lock_backend(connection))

    def name(self, values: Mapping[str, object]) -> str:
        """The lock's name for these values; raises `KeyError` when one is missing."""
        return self.template.name(values)


def hold_all(
    families: Sequence[LockFamily], names: Sequence[str], connection: HTTPConnection, *, in_thread: bool
) -> AbstractAsyncContextManager[MultiLockHandle]:
    """Hold a lock of each of these families, all or none, for which the first one's `timeout` counts; see `hold`."""
    locks = [family.lock(name, connection) for family, name in zip(families, names, strict=True)]
    return hold(MultiLock(*locks), families[0].timeout, connection, in_thread=in_thread)
