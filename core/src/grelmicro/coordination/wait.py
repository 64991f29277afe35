"""Waiting for a lease: in order within a process, where only the first in line asks the store."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from random import random
from typing import Generic, Protocol, TypeVar

from grelmicro.clock import Clock, TimeLimit, sleep
from grelmicro.coordination.passing import Offer
from grelmicro.coordination.subscription import Subscription
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, LockTimeoutError, OutcomeUnknownError
from grelmicro.leases import Lease, Waiter


class Grant(Protocol):
    """What is waited for."""

    @property
    def held(self) -> bool:
        """Whether it is valid and no release was begun."""

    @property
    def expires_in(self) -> float:
        """Seconds for which it is surely held."""


class Polling(Protocol):
    """How a waiter asks where the store gives no hints."""

    @property
    def retry_interval(self) -> float:
        """Seconds between two tries."""

    @property
    def retry_jitter(self) -> float:
        """The share by which that varies."""


T = TypeVar("T", bound=Grant)

SAFETY_POLL = 10.0
"""Seconds after which a waiter asks again although its store promised a hint: hints are never relied on."""

SUBSCRIBING = 1.0
"""Seconds within which a store must begin, and end, a subscription to hints."""

LOCAL_RUN = 4
"""Hand-overs in a row within one process before it lets another process, if one waits, go first."""

MOST_RUNS = 1000
"""Names for which such hand-overs are counted at most."""

PATIENCE = 0.5
"""Seconds for which a request in flight at the deadline counts as slow, if the store answered before."""


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
        return grant.expires_in if grant is not None and grant.held else 0.0


class Queues:
    """The lines of one backend. A line exists while somebody waits, so keys made per request leave nothing."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.runs: dict[str, int] = {}  # grants in a row to this process, where another one waits

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

    def granted(self, key: str, waited: bool) -> None:
        """Count a grant to this process, while another one waits."""
        if waited:
            if len(self.runs) >= MOST_RUNS:
                self.runs.clear()  # of names that nobody may ask for again
            self.runs[key] = self.runs.get(key, 0) + 1
        else:
            self.runs.pop(key, None)

    def must_yield(self, key: str) -> bool:
        """Whether this process had it so often in a row that another one, which waits, is to go first."""
        return self.runs.get(key, 0) >= LOCAL_RUN

    def take_offer(self, key: str) -> Offer | None:
        """The offer of the first in line to take what is given back now, if it may go first."""
        line = self.lines.get(key)
        if line is None or self.must_yield(key):
            return None
        offer, line.offer = line.offer, None
        return offer

    def clear(self) -> None:
        """Forget the lines of an event loop that is gone."""
        self.lines.clear()
        self.runs.clear()


class Wait(Generic[T]):
    """One caller's wait for one key.

    Args:
        ask: asks the store once; its argument marks that the caller waits. The answer, and the grant if it is one.
        offer: offers to take what another of this process gives back, waiting on its argument.
        accept: the grant that such an offer brought, None if it came too late.
        undo: gives back a grant that can no longer be delivered.
        watch: subscribes to hints about the key.
        clock: the time of the caller.
        polling: how to ask where the store gives no hints.
        notice: seconds until another process learns of a release.
        title: what is waited for, for error texts.
    """

    _answered = False  # whether the store ever answered this caller
    _cut_off: float | None = None  # for how long the request was under way that the deadline cut off

    def __init__(
        self,
        ask: Callable[[bool], Awaitable[tuple[Lease, T | None]]],
        offer: Callable[[Waiter], Offer],
        accept: Callable[[Offer, Lease], T | None],
        undo: Callable[[T], object],
        watch: Callable[[], AbstractAsyncContextManager[Waiter]],
        clock: Clock,
        polling: Polling,
        notice: float,
        title: str,
    ) -> None:
        self._ask = ask
        self._offer = offer
        self._accept = accept
        self._undo = undo
        self._watch = watch
        self._clock = clock
        self._polling = polling
        self._notice = notice
        self._title = title

    async def run(self, queues: Queues, key: str, timeout: float | None) -> T:
        """Wait until the store grants it.

        Raises:
            LockTimeoutError: others held it for `timeout` seconds.
            OutcomeUnknownError: the deadline passed while the store answered nothing.
            BackendUnavailableError: the deadline passed while the store answered nobody in this line.
        """
        line, place = queues.join(key)
        joined_at = self._clock.now()
        try:
            if timeout is None:
                return await self._in_line(queues, key, line, place)
            async with TimeLimit(self._clock, timeout) as scope:
                return await self._in_line(queues, key, line, place)
        except TimeoutError:
            if timeout is None or not scope.expired():  # the store's own
                raise
            first = place.done() and not place.cancelled()
            raise self._at_the_deadline(line, first, joined_at, timeout) from line.failure
        finally:
            queues.leave(key, line, place)

    async def _in_line(self, queues: Queues, key: str, line: Line, place: asyncio.Future[None]) -> T:
        if place.done():
            # Nobody waits in this process: it may well be free, and then a subscription would be for nothing.
            if queues.runs:
                await self._let_others_go_first(queues, key)
            lease, at_once = await self._ask_store(line, False)
            if at_once is not None:
                queues.granted(key, lease.waited)
                line.was_granted(at_once)
                return at_once
        else:
            await place
        return await self._ask_until_granted(queues, key, line)

    async def _ask_until_granted(self, queues: Queues, key: str, line: Line) -> T:
        grant: T | None = None
        try:
            async with Subscription(self._watch(), self._clock, SUBSCRIBING, self._title) as waiter:
                # While whoever was before in this line has it, there is nothing to ask: its release is a hint.
                held_for = line.held_for()
                while True:
                    passed = await self._until_hint(line, waiter, held_for) if held_for > 0 else None
                    if passed is not None:
                        lease, grant = passed
                    else:
                        await self._let_others_go_first(queues, key)
                        lease, grant = await self._ask_store(line, True)
                    if grant is not None:
                        queues.granted(key, lease.waited)
                        line.was_granted(grant)
                        return grant
                    # A lease is live at the very instant of its expiry, so look a moment after it.
                    held_for = lease.remaining + 0.001
        except BaseException:
            if grant is not None:  # cut off while the subscription ended
                self._undo(grant)
            raise

    async def _until_hint(self, line: Line, waiter: Waiter, held_for: float) -> tuple[Lease, T | None] | None:
        """Wait until it may be free; the lease and the grant, if another of this process passed it on meanwhile."""
        offer = line.offer = self._offer(waiter)
        try:
            await waiter.wait(min(held_for, SAFETY_POLL if waiter.pushes else self._jittered()))
            lease = await offer.settle()
        except BaseException:
            offer.withdraw()
            if offer.lease is not None and (grant := self._accept(offer, offer.lease)) is not None:
                self._undo(grant)
            raise
        finally:
            line.offer = None
        return None if lease is None else (lease, self._accept(offer, lease))

    async def _let_others_go_first(self, queues: Queues, key: str) -> None:
        if queues.must_yield(key):
            del queues.runs[key]
            await sleep(self._clock, self._notice)

    async def _ask_store(self, line: Line, waiting: bool) -> tuple[Lease, T | None]:
        asked_at = line.asked_at = self._clock.now()
        try:
            answer = await self._ask(waiting)
        except CoordinationBackendError as error:
            line.failure = error
            raise
        except BaseException:
            self._cut_off = self._clock.now() - asked_at
            raise
        finally:
            line.asked_at = None
        line.failure = None
        self._answered = True
        return answer

    def _jittered(self) -> float:
        return self._polling.retry_interval * (1 + self._polling.retry_jitter * (2 * random() - 1))

    def _at_the_deadline(self, line: Line, first: bool, joined_at: float, timeout: float) -> Exception:
        if first and self._cut_off is not None and (not self._answered or self._cut_off > PATIENCE):
            return OutcomeUnknownError(
                f"{self._title}: the store did not answer within {timeout:g} s; if it granted the lease after all, "
                "that is undone in the background: check the store, or give a longer timeout"
            )
        if not first and self._is_silent(line, joined_at):
            return BackendUnavailableError(
                f"{self._title}: the store answered nobody who waits for it within {timeout:g} s: check the store"
            )
        return LockTimeoutError(
            f"{self._title} is held by another holder and was not released within {timeout:g} s: "
            "try again later, or give a longer timeout"
        )

    def _is_silent(self, line: Line, joined_at: float) -> bool:
        """Whether the first in line gets no answers, as far as one can tell who joined the line at `joined_at`."""
        if line.asked_at is None:
            return line.failure is not None
        return line.asked_at <= joined_at or self._clock.now() - line.asked_at > PATIENCE
