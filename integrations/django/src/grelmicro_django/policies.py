"""How a singleton acquires its lease, and what happens when it is busy, lost or held for too long."""

from dataclasses import dataclass, replace
from typing import Any, Self

from grelmicro.config import check_name, check_seconds
from grelmicro.errors import SettingsValidationError

ON_BUSY = ("skip", "wait", "fail")
ON_LOST = ("stop", "finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings of a singleton; times are in seconds.

    Raises:
        SettingsValidationError: one of them breaks a rule.
    """

    name: str
    """The name of its lock."""
    on_busy: str = ""
    """`skip`, `wait` or `fail`; empty: `wait` where `wait` is set, else `skip`."""
    wait: float | None = None
    """For how long it is waited for; None: no limit."""
    lease_duration: float = 60.0
    """After which the lock frees itself if its process is gone; it is renewed while the work runs."""
    max_hold: float | None = None
    """After which the work is stopped; None: no limit."""
    min_hold: float = 0.0
    """For which the lock stays held at least, counted from the begin."""
    on_lost: str = "stop"
    """`stop`: interrupt the work when its lease is lost. `finish`: let it run to its end, which then is a failure."""
    grace: float = 5.0
    """After which the process of work that was interrupted, and goes on, is ended."""

    def __post_init__(self) -> None:
        title = f"singleton {self.name!r}" if isinstance(self.name, str) else "singleton"
        check_name("singleton", self.name)
        if not self.on_busy:
            object.__setattr__(self, "on_busy", "skip" if self.wait is None else "wait")
        _check_choice(f"{title}: on_busy", self.on_busy, ON_BUSY)
        _check_choice(f"{title}: on_lost", self.on_lost, ON_LOST)
        if self.wait is not None:
            check_seconds(f"{title}: wait", self.wait, zero=True)
            if self.on_busy != "wait":
                raise SettingsValidationError(f"{title}: wait is for on_busy 'wait', not for {self.on_busy!r}")
        check_seconds(f"{title}: lease", self.lease_duration)
        check_seconds(f"{title}: min_hold", self.min_hold, zero=True)
        check_seconds(f"{title}: grace", self.grace, zero=True)
        if self.max_hold is not None:
            check_seconds(f"{title}: max_hold", self.max_hold)
            if self.min_hold > self.max_hold:
                raise SettingsValidationError(f"{title}: min_hold should be at most max_hold")

    @property
    def timeout(self) -> float | None:
        """Seconds to wait for the lock; 0 asks once."""
        return self.wait if self.on_busy == "wait" else 0.0

    def overridden(self, **given: Any) -> Self:
        """The same with the settings that are given; None gives none."""
        changes = {name: value for name, value in given.items() if value is not None}
        if "wait" in changes or "on_busy" in changes:  # one of them may decide the other
            changes = {"on_busy": "", **changes}
            if changes["on_busy"] in ("skip", "fail"):
                changes.setdefault("wait", None)
        return replace(self, **changes)


def _check_choice(setting: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsValidationError(f"{setting} should be one of {', '.join(choices)}")
