"""Waiting for a lease: in order within a process, where only the first in line asks the store."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from random import random
from typing import Generic, Protocol, TypeVar

from grelmicro.clock import Clock, TimeLimit, sleep
from grelmicro.coordination.passing import Offer
from grelmicro.coordination.queues import Grant, Line, Queues
from grelmicro.coordination.subscription import Subscription
from grelmicro.errors import BackendUnavailableError, CoordinationBackendError, LockTimeoutError, OutcomeUnknownError
from grelmicro.leases import Lease, Waiter
from grelmicro.leases.unsent import why_unsent


class Polling(Protocol):
    """How a waiter asks where the store gives no hints."""

    @property
    def retry_interval(self) -> float:
        """Seconds between two tries."""

    @property
    def retry_jitter(self) -> float:
        """The share by which that varies."""


class Waitable(Protocol):
    """What waiting needs of a backend."""

    @property
    def clock(self) -> Clock:
        """The time of those who wait."""

    @property
    def queues(self) -> Queues:
        """The lines of those who wait in this process."""

    @property
    def notice(self) -> float:
        """Seconds until another process learns of a release."""

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """Subscribe to hints about `name`."""


T = TypeVar("T", bound=Grant)

SAFETY_POLL = 10.0
"""Seconds after which a waiter asks again although its store promised a hint: hints are never relied on."""

SUBSCRIBING = 1.0
"""Seconds within which a store must begin, and end, a subscription to hints."""

PATIENCE = 0.5
"""Seconds that a store has to answer: one that is silent for no longer counts as busy, not as failing."""


class Wait(ABC, Generic[T]):
    """One caller's wait for one key. What is waited for, and how it is asked for, is up to the subclass.

    Args:
        backend: where it is waited for.
        key: the name that is waited for.
        polling: how to ask where the store gives no hints.
    """

    waited = False
    """Whether it was not there at once."""
    _answered = False  # whether the store ever answered this caller
    _cut_off: float | None = None  # seconds for which the request was under way that the deadline cut off
    _unsent: BackendUnavailableError | None = None  # what that request still waited for, if it was not sent by then

    def __init__(self, backend: Waitable, key: str, polling: Polling) -> None:
        self._backend = backend
        self._clock = backend.clock
        self._key = key
        self._polling = polling

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the lock that is waited for."""

    @property
    def title(self) -> str:
        """What is waited for, for texts."""
        return f"lock '{self.name}'"

    @abstractmethod
    async def ask(self, waiting: bool) -> tuple[Lease, T | None]:
        """Ask the store once, with a mark that the caller waits; the answer, and the grant if it is one."""

    @abstractmethod
    def offer(self, waiter: Waiter) -> Offer:
        """The offer to take what another of this process gives back, while the caller waits on `waiter`."""

    @abstractmethod
    def accept(self, offer: Offer, lease: Lease) -> T | None:
        """The grant that such an offer brought, None if it came too late."""

    @abstractmethod
    def undo(self, grant: T) -> None:
        """Give back a grant that can no longer be delivered."""

    @abstractmethod
    def check(self) -> None:
        """See that waiting can end. It is called once, when the lease was not there at once."""

    async def run(self, timeout: float | None) -> T:
        """Wait until the store grants it.

        Raises:
            LockTimeoutError: it was not granted within `timeout` seconds.
            OutcomeUnknownError: the deadline passed while a request was under way that had the time to be answered.
            BackendUnavailableError: the deadline passed while the store answered no request of this line.
        """
        queues = self._backend.queues
        line, place = queues.join(self._key)
        try:
            if timeout is None:
                return await self._in_line(queues, line, place)
            async with TimeLimit(self._clock, timeout) as scope:
                return await self._in_line(queues, line, place)
        except TimeoutError:
            if timeout is None or not scope.expired():  # the store's own
                raise
            cause = line.failure
            raise self._at_the_deadline(line, timeout) from cause
        finally:
            queues.leave(self._key, line, place)

    async def _in_line(self, queues: Queues, line: Line, place: asyncio.Future[None]) -> T:
        if place.done():
            # Nobody waits in this process: it may well be free, and then a subscription would be for nothing.
            await self._let_others_go_first(queues)
            lease, at_once = await self._ask_store(line, False)
            if at_once is not None:
                queues.turns.granted(lease)
                line.was_granted(at_once)
                return at_once
            self.check()
        else:
            self.check()
            await place
        return await self._ask_until_granted(queues, line)

    async def _ask_until_granted(self, queues: Queues, line: Line) -> T:
        self.waited = True
        grant: T | None = None
        try:
            async with Subscription(self._backend.watch(self._key), self._clock, SUBSCRIBING, self.title) as waiter:
                # While whoever was before in this line has it, there is nothing to ask: its release is a hint.
                held_for = line.held_for()
                while True:
                    passed = await self._until_hint(line, waiter, held_for) if held_for > 0 else None
                    if passed is not None:
                        lease, grant = passed
                    else:
                        await self._let_others_go_first(queues)
                        lease, grant = await self._ask_store(line, True)
                    if grant is not None:
                        queues.turns.granted(lease)
                        line.was_granted(grant)
                        return grant
                    # A lease is live at the very instant of its expiry, so look a moment after it.
                    held_for = lease.remaining + 0.001
        except BaseException:
            if grant is not None:  # cut off while the subscription ended
                self.undo(grant)
            raise

    async def _until_hint(self, line: Line, waiter: Waiter, held_for: float) -> tuple[Lease, T | None] | None:
        """Wait until it may be free; the lease and the grant, if another of this process passed it on meanwhile."""
        offer = line.offer = self.offer(waiter)
        try:
            await waiter.wait(min(held_for, SAFETY_POLL if waiter.pushes else self._jittered()))
            lease = await offer.settle()
        except BaseException:
            offer.withdraw()
            if offer.lease is not None and (grant := self.accept(offer, offer.lease)) is not None:
                self.undo(grant)
            raise
        finally:
            line.offer = None
        return None if lease is None else (lease, self.accept(offer, lease))

    async def _let_others_go_first(self, queues: Queues) -> None:
        if seconds := queues.turns.begin_pause(self._key, self._backend.notice):
            await sleep(self._clock, seconds)

    async def _ask_store(self, line: Line, waiting: bool) -> tuple[Lease, T | None]:
        asked_at = line.asked_at = self._clock.now()
        try:
            answer = await self.ask(waiting)
        except BaseException as error:
            now = self._clock.now()
            self._backend.queues.silence.note(asked_at, now)
            if isinstance(error, CoordinationBackendError):
                line.failure = error
            else:
                self._cut_off = now - asked_at
                self._unsent = why_unsent(error)
            raise
        finally:
            line.asked_at = None
        line.failure = None
        self._backend.queues.silence.seconds = 0.0
        self._answered = True
        return answer

    def _jittered(self) -> float:
        return self._polling.retry_interval * (1 + self._polling.retry_jitter * (2 * random() - 1))

    def _at_the_deadline(self, line: Line, timeout: float) -> Exception:
        if self._cut_off is not None:
            if line.failure is not None or max(self._cut_off, self._backend.queues.silence.seconds) > PATIENCE:
                line.failure = self._unanswered(timeout)
                return line.failure
        elif self._is_silent(line):
            return BackendUnavailableError(
                f"{self.title}: the store answered nobody who waits for it within {timeout:g} s: check the store",
                name=self.name,
            )
        return self._busy(timeout)

    def _unanswered(self, timeout: float) -> CoordinationBackendError:
        if self._unsent is not None:
            return BackendUnavailableError(f"{self.title}: {self._unsent}", name=self.name)
        return OutcomeUnknownError(
            f"{self.title}: the store did not answer within {timeout:g} s; if it granted the lease after all, "
            "that is undone in the background: check the store, or give a longer timeout",
            name=self.name,
        )

    def _is_silent(self, line: Line) -> bool:
        """Whether the first in line gets no answers."""
        if line.asked_at is None:
            return line.failure is not None
        return self._backend.queues.silence.lasts(line.asked_at, self._clock.now()) > PATIENCE

    def _busy(self, timeout: float) -> LockTimeoutError:
        if self._answered or self._cut_off is None:
            why = f"is held by another holder and was not released within {timeout:g} s"
        else:
            why = f"was not granted within {timeout:g} s, in which the store had too little time to answer"
        busy = LockTimeoutError(f"{self.title} {why}: try again later, or give a longer timeout", name=self.name)
        busy.timeout = timeout
        return busy
