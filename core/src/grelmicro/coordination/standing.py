"""Where an instance stands in an election: its term, what it knows of others, and the work that runs in the term."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Protocol, TypeVar

from grelmicro import lifecycle
from grelmicro.clock import DRIFT, SYSTEM_CLOCK, Clock, Signal
from grelmicro.coordination.identity import WorkerName
from grelmicro.coordination.records import LeaderRecord
from grelmicro.errors import TaskError
from grelmicro.leases import Lease

logger = logging.getLogger("grelmicro.leader_election")

T = TypeVar("T")


class StrayCancellationError(TaskError):
    """The work of a leader was cancelled, but not by the end of its term and not by its caller."""


async def end(work: asyncio.Future[T]) -> None:
    """Cancel `work` and wait for its end, however often the caller is cancelled: each time is passed on to it."""
    with lifecycle.shielded():
        while not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work})


def check_work(user: str, func: object) -> None:
    """Raise `TaskError` when the work of a leader cannot be called, before anybody waits for leadership.

    Args:
        user: what it was given to, for the error's text.
        func: the work.
    """
    if not callable(func):
        raise TaskError(
            f"{user} takes a coroutine function, not {type(func).__name__}: pass it without calling it, and its "
            "arguments after it"
        )


def begin(func: Callable[..., Coroutine[object, object, T]], *args: object) -> Coroutine[object, object, T]:
    """The coroutine of a leader's work.

    Raises:
        TaskError: what `func` returned is none.
    """
    work = func(*args)
    if not asyncio.iscoroutine(work):
        name = getattr(func, "__qualname__", type(func).__name__)
        raise TaskError(
            f"the work of a leader is a coroutine function, and {name} returned {type(work).__name__}: write it with "
            "`async def`, and call what blocks with `await asyncio.to_thread(...)`"
        )
    return work


def _result(body: asyncio.Task[T]) -> T:
    """The result of work that ended by itself."""
    try:
        return body.result()
    except asyncio.CancelledError as error:
        raise StrayCancellationError(
            "the work of a leader was cancelled by something that it awaits, while its term went on: catch the "
            "CancelledError of that, or find the code that cancels it"
        ) from error


class Timing(Protocol):
    """The settings of an election, in seconds."""

    lease_duration: float
    renew_deadline: float
    retry_interval: float
    retry_jitter: float
    backend_timeout: float
    error_interval: float


class Term:
    """One uninterrupted period of leadership, known by its fence. Times are on the backend's local clock."""

    def __init__(self, lease: Lease, sent_at: float, timing: Timing) -> None:
        self.began_at = sent_at
        self.over = False
        self.loss = ""
        """Why it ended before its worker gave it up."""
        self.confirm(lease, sent_at, timing)

    def confirm(self, lease: Lease, sent_at: float, timing: Timing) -> None:
        """A request sent at `sent_at` was granted: everything counts from then, since the answer may be late."""
        self.lease = lease
        self.sent_at = sent_at
        self.held_until = sent_at + timing.lease_duration * (1 - DRIFT)
        self.lead_until = min(sent_at + timing.renew_deadline, self.held_until)
        self.failure = "this process stood still, or its event loop was blocked"
        """What keeps it from being confirmed, should it run out."""

    def ask(self, sent_at: float, timing: Timing) -> None:
        """A renewal is sent. Its answer may be lost, so if it shortens the lease, that counts from now on."""
        self.held_until = min(self.held_until, sent_at + timing.lease_duration * (1 - DRIFT))
        self.lead_until = min(self.lead_until, self.held_until)


class Standing:
    """Where an instance stands: its term if it leads, the record it saw last, and the work that runs in the term."""

    def __init__(self, worker: WorkerName) -> None:
        self.generation = lifecycle.generation
        self.worker = worker
        self.service: asyncio.Task[None] | None = None
        self.ending = False  # the service was cancelled, and is ending in order
        self.clock: Clock = SYSTEM_CLOCK
        self.term: Term | None = None
        self.record: LeaderRecord | None = None
        self.began_at = -math.inf  # when it began to take part
        self.heard_at = -math.inf  # when the last request was sent that the store answered
        self.failing = False  # whether the last request failed
        self.unattended_since: float | None = None  # when something waited for the leader, and the election did not run
        self.unattended_told = False
        self.changed = Signal()
        self._bodies: set[asyncio.Task[object]] = set()

    def leading_for(self, term: Term | None = None) -> float:
        """Seconds for which it surely leads (in `term`, if given); 0.0 when it does not."""
        current = self.term
        if current is None or current.over or (term is not None and term is not current):
            return 0.0
        return max(current.lead_until - self.clock.now(), 0.0)

    def begin(self, term: Term) -> None:
        """Lead."""
        self.term = term
        self.changed.send()

    def resign(self, loss: str = "") -> None:
        """Lead no more; the lease stays until the work has ended.

        Args:
            loss: why it was lost; empty: it is given up. One that has run out by now is lost anyway.
        """
        term = self.term
        if term is None or term.over:
            return
        if self.leading_for(term) <= 0:
            loss = loss or f"it was not confirmed in time: {term.failure}"
        term.loss = loss
        term.over = True
        self.changed.send()

    def is_cut_off(self, lease_duration: float) -> bool:
        """Whether the store fails, and has not answered for longer than a lease."""
        return self.failing and self.clock.now() - max(self.heard_at, self.began_at) > lease_duration

    async def wait_over(self, term: Term) -> None:
        """Wait until `term` is over."""
        while (left := self.leading_for(term)) > 0:
            await self.changed.wait(self.clock, left)

    async def run(self, term: Term, work: Coroutine[object, object, T]) -> tuple[bool, T | None]:
        """Run `work` until it ends or the term does: whether it was cut off by the end of the term, and its result.

        Raises:
            StrayCancellationError: something that the work awaits was cancelled.
        """
        loop = asyncio.get_running_loop()
        body = loop.create_task(work)
        over = loop.create_task(self.wait_over(term), context=Context())  # it is no part of the work
        self._bodies.add(body)
        body.add_done_callback(self._body_ended)
        try:
            await asyncio.wait({body, over}, return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                return False, _result(body)
            body.cancel("leadership was lost")
            await asyncio.wait({body})
            if not body.cancelled() and (error := body.exception()) is not None:
                raise error
            return True, None
        finally:
            over.cancel()
            if not body.done():
                await end(body)
                if not body.cancelled() and (error := body.exception()) is not None:
                    logger.error("work failed when it was cancelled", exc_info=error)

    def is_idle(self) -> bool:
        """Whether no work of the term runs."""
        return not self._bodies

    async def wait_idle(self, until: float) -> bool:
        """Wait until the term's work has ended, at most until then; whether it has."""
        while self._bodies and (left := until - self.clock.now()) > 0:
            await self.changed.wait(self.clock, left)
        return not self._bodies

    def _body_ended(self, body: asyncio.Task[object]) -> None:
        self._bodies.discard(body)
        self.changed.send()
