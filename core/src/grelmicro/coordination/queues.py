"""Lines: who waits in this process, first come first served; only the first in line asks the store."""

import asyncio
import weakref
from typing import Protocol

from grelmicro.coordination.passing import Offer
from grelmicro.coordination.turns import Turns
from grelmicro.errors import CoordinationBackendError


class Grant(Protocol):
    """What is waited for."""

    @property
    def expires_in(self) -> float:
        """Seconds for which it is surely held; 0.0 once its release was begun."""


class Line:
    """Those who wait for one key in this process, first come first served."""

    def __init__(self) -> None:
        self.places: dict[asyncio.Future[None], None] = {}
        # The last one that somebody in this line got. Weak, since a lease that its owner dropped must end.
        self._grant: weakref.ref[Grant] | None = None
        self.asked_at: float | None = None  # when the request in flight was sent
        self.failure: CoordinationBackendError | None = None  # of the last request, if it failed
        self.offer: Offer | None = None  # of the first, while it waits for a hint

    def was_granted(self, grant: Grant) -> None:
        """Somebody in this line got it."""
        self._grant = weakref.ref(grant)

    def held_for(self) -> float:
        """Seconds for which whoever in this line got it last still holds it; 0.0 when that is over."""
        grant = None if self._grant is None else self._grant()
        return 0.0 if grant is None else grant.expires_in


class Silence:
    """How long a store has answered nothing, while requests were under way."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Since the last answer, or since the store was opened."""
        self._counted_until = 0.0  # requests for several keys are silent together

    def lasts(self, asked_at: float, now: float) -> float:
        """Its seconds, with a request that is under way since `asked_at`."""
        return self.seconds + max(now - max(asked_at, self._counted_until), 0.0)

    def note(self, asked_at: float, now: float) -> None:
        """A request ended without an answer."""
        self.seconds, self._counted_until = self.lasts(asked_at, now), now


class Queues:
    """The lines of one backend. A line exists while somebody waits, so keys made per request leave nothing."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.turns = Turns()
        self.silence = Silence()

    def join(self, key: str) -> tuple[Line, asyncio.Future[None]]:
        """Join the line of `key`; the future is one's place, and completes when one is first."""
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = Line()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not line.places:
            place.set_result(None)
        line.places[place] = None
        return line, place

    def leave(self, key: str, line: Line, place: asyncio.Future[None]) -> None:
        """Give a place up, with or without a grant; whoever is first then goes on at once."""
        line.places.pop(place, None)
        if line.places:
            first = next(iter(line.places))
            if not first.done():
                first.set_result(None)
        elif self.lines.get(key) is line:
            del self.lines[key]

    def take_offer(self, key: str) -> Offer | None:
        """The offer of the first in line to take what is given back now, if it may go first."""
        line = self.lines.get(key)
        if line is None or self.turns.are_over(key):
            return None
        offer, line.offer = line.offer, None
        return offer

    def clear(self) -> None:
        """Forget the lines of an event loop that is gone."""
        self.lines.clear()
        self.turns.clear()
        self.silence = Silence()
