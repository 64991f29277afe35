"""`LockTemplate`: the locks that one template names, with settings that are read once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from grelmicro.config import Duration, check_seconds
from grelmicro.coordination.lock import Lock, LockConfig
from grelmicro.coordination.protocols import LockBackendSource
from grelmicro.names import NameTemplate


@dataclass(frozen=True, slots=True)
class LockTemplate:
    """What functions hold while they run: one lock for each set of values of a template's fields."""

    template: NameTemplate
    timeout: float | None
    config: LockConfig

    @classmethod
    def of(
        cls,
        name: str,
        *,
        timeout: Duration | None,
        auto_renew: bool | None,
        lease_duration: Duration | None,
        max_hold: Duration | None,
    ) -> Self:
        """The locks of a template; settings left None come from the environment, then from the defaults of handlers.

        Raises:
            SettingsValidationError: the template or a setting breaks a rule.
        """
        template = NameTemplate(name)
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, zero=True)
        lock = Lock(name, auto_renew=auto_renew, lease_duration=lease_duration, max_hold=max_hold)
        return cls(template, timeout, lock.config.renewing())

    def lock(self, name: str, backend: LockBackendSource | None) -> Lock:
        """The lock `name`, which is one of the template's; None: in the store of the app that serves its user."""
        return Lock.from_config(name, self.config, backend=backend)

    def name(self, values: Mapping[str, object]) -> str:
        """The lock's name for these values; raises `KeyError` when one is missing."""
        return self.template.name(values)
