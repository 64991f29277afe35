"""Leases as this process saw them: by its own clock, since no two machines' clocks agree."""

import math
from dataclasses import dataclass

from grelmicro.backends.kubernetes.record import OBSERVED, Record
from grelmicro.clock import DRIFT, Clock
from grelmicro.leases.lease import Lease

CAPACITY = 1000
"""Names that are remembered; more where this process holds more."""

FORGOTTEN = 20_000
"""Names of which only the time is remembered since which they were held as they are."""

SKEW = 7.0
"""Seconds by which two times that API servers told may be wrong: 1 for each, since they tell whole seconds, and 5 for
servers whose clocks differ."""

OVERTAKEN = 4
"""How many others go before somebody who waits until it is told to them."""

WAITING_MEMORY = 15.0
"""Seconds after which who has not asked again waits no more."""

LOOKS = 8
"""Names that are looked at to find one that can be forgotten."""


@dataclass(slots=True, eq=False)
class Sight:
    """What this process saw of one object."""

    record: Record | None
    """As it was seen last; None: it does not exist."""
    seen_at: float
    """When it was first seen to say this, on the clock of this process."""
    date: float | None
    """The server's time of the first read that showed it to say this."""
    fence: int = 0
    """The highest fence that was seen."""
    own: bool = False
    """Whether it was written for a holder in this process."""
    refused: bool = False
    """Whether somebody in this process did not get it."""
    waits_since: int = 0
    """The fence at which somebody in this process began to wait."""
    waited_at: float = -math.inf
    """When somebody in this process did not get it who waits, last."""

    def lease(self, name: str, now: float) -> Lease | None:
        """What it says, at `now`."""
        return None if self.record is None else self.record.as_lease(name, self.seen_at, now)

    def is_live(self, now: float) -> bool:
        """Whether it is held, and not seen to have expired."""
        return self.record is not None and self.record.holder != "" and self.seen_at + self.record.duration >= now

    def waits(self, now: float) -> None:
        """Somebody in this process did not get it, and waits."""
        if self.record is not None and now - self.waited_at > WAITING_MEMORY:
            self.waits_since = self.record.fence
        self.waited_at = now

    def is_overtaken(self, now: float) -> bool:
        """Whether others went before somebody who waits in this process, again and again, and nobody told them."""
        record = self.record
        if record is None or record.waiter or now - self.waited_at > WAITING_MEMORY:
            return False
        return record.fence - self.waits_since >= OVERTAKEN

    @property
    def mark(self) -> str | None:
        """What tells others since when it has been as it is; None where that is not known, or told already."""
        record = self.record
        if record is None or self.date is None or _marked_at(record) is not None:
            return None
        return f"{record.digest} {self.date:.0f}"


class Observations:
    """What this process saw of the objects it cares about; of the others it forgets what it saw longest ago.

    Args:
        clock: the time of this process.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sights: dict[str, Sight] = {}  # by the names of the objects, what was used last at the end
        # The digest of each that was held, and since when: whoever tries more names in turn sees them expire, too.
        self._forgotten: dict[str, tuple[str, float]] = {}

    def get(self, name: str) -> Sight | None:
        """What was seen of an object."""
        sight = self._sights.pop(name, None)
        if sight is not None:
            self._sights[name] = sight
        return sight

    def items(self) -> list[tuple[str, Sight]]:
        """The names of all objects, with what was seen of them."""
        return list(self._sights.items())

    def see(self, name: str, record: Record | None, date: float | None = None, *, keep: bool = True) -> Sight:
        """An object was seen just now.

        Args:
            name: of the object.
            record: what it says; None: it does not exist.
            date: the server's time when it was read.
            keep: whether to forget another one rather than this one.
        """
        now = self._clock.now()
        sight = self.get(name)
        if sight is None:
            sight = Sight(record, self._seen_before(name, record, now), date)
            if keep or len(self._sights) < CAPACITY:
                self._sights[name] = sight
                self._forget(now)
        elif sight.record is None or record is None or sight.record.identity != record.identity:
            sight.seen_at, sight.date = now, date
            sight.own = sight.refused = False
        sight.record = record
        if record is None:
            return sight
        sight.fence = max(sight.fence, record.fence)
        if date is not None:
            sight.date = date if sight.date is None else sight.date
            sight.seen_at = min(sight.seen_at, now - _surely_passed(record, date))
        return sight

    def _forget(self, now: float) -> None:
        """Make room, but keep what this process holds."""
        for _ in range(LOOKS):
            if len(self._sights) <= CAPACITY:
                return
            name = next(iter(self._sights))
            sight = self._sights.pop(name)
            if sight.own and sight.is_live(now):
                self._sights[name] = sight
            elif sight.record is not None and sight.record.holder:
                self._forgotten[name] = (sight.record.digest, sight.seen_at)
                if len(self._forgotten) > FORGOTTEN:
                    del self._forgotten[next(iter(self._forgotten))]

    def _seen_before(self, name: str, record: Record | None, now: float) -> float:
        """Since when an object is as it is, which is not remembered otherwise."""
        digest, seen_at = self._forgotten.get(name, ("", now))  # it stays: this look may not be kept either
        return seen_at if record is not None and record.digest == digest else now


def is_newer(record: Record, other: Record) -> bool:
    """Whether `record` was written after `other`; False where the versions do not tell it."""
    versions = (record.version, other.version)
    if not all(version.isascii() and version.isdigit() for version in versions):
        return False
    return int(record.version) > int(other.version)


def _marked_at(record: Record) -> float | None:
    """The server's time when somebody saw the record as it is; None if nobody told."""
    digest, _, date = record.annotations.get(OBSERVED, "").partition(" ")
    if digest != record.digest or not (date.isascii() and date.isdigit() and len(date) <= 12):
        return None
    return float(date)


def _surely_passed(record: Record, date: float) -> float:
    """Seconds for which the record has surely been as it is, when it was read at `date` by the server's time."""
    marked_at = _marked_at(record)
    if marked_at is None:
        return -math.inf
    return (date - marked_at - SKEW) / (1 + DRIFT)
