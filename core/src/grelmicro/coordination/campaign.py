"""How an instance takes part in an election."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from random import random
from typing import Protocol

from grelmicro.clock import TimeLimit, sleep
from grelmicro.coordination.losses import TAKEN, why_lost
from grelmicro.coordination.protocols import LeaderElectionBackend
from grelmicro.coordination.records import LEASE_DURATION, LeaderRecord
from grelmicro.coordination.standing import Standing, Term, Timing
from grelmicro.coordination.subscription import Subscription
from grelmicro.coordination.wait import SAFETY_POLL
from grelmicro.events import emit
from grelmicro.leases import Lease, Waiter
from grelmicro.leases.identity import mint
from grelmicro.leases.outage import Outage, reason_of, shared_outage
from grelmicro.lifecycle import distinguish_cancellation, raise_if_cancelled

logger = logging.getLogger("grelmicro.leader_election")

GRACE = 1.0
"""Seconds that work has at least to end after it was cancelled, also when the lease was lost already."""


class Candidate(Protocol):
    """What a campaign needs to know of its election; settings are read anew at each step."""

    @property
    def name(self) -> str: ...

    @property
    def worker(self) -> str: ...

    @property
    def config(self) -> Timing: ...

    @property
    def metadata(self) -> Mapping[str, str]: ...


class Campaign:
    """Tries to lead, leads, and tries again, until it is cancelled; then it ends the term and frees the lease."""

    def __init__(
        self, candidate: Candidate, standing: Standing, backend: LeaderElectionBackend, outage: Outage
    ) -> None:
        self._candidate = candidate
        self._standing = standing
        self._backend = backend
        self._clock = backend.clock
        self._own_outage = outage
        self._outage = shared_outage(backend, outage)
        self._who = "" if self._outage is outage else f"election '{candidate.name}'"
        self._key = f"leader:{candidate.name}"
        self._holder = ""
        self._namesake = ("", 0.0)  # the holder that was seen under this worker's name, and until when it held
        self._twin_told = False

    async def run(self) -> None:
        """Take part until cancelled."""
        try:
            with distinguish_cancellation():
                while True:
                    raise_if_cancelled()
                    if self._standing.term is None:
                        await self._stand()
                    else:
                        await self._lead(self._standing.term)
        except asyncio.CancelledError:
            self._standing.ending = True
            raise
        finally:
            self._outage.leave(self._who)
            await self._end_term()

    async def _stand(self) -> None:
        """Try to lead until that succeeds, woken when the lease is free; after a failure of the store, rest."""
        timing = self._candidate.config
        try:
            watch = self._backend.watch(self._key)
            with distinguish_cancellation():
                async with Subscription(watch, self._clock, timing.backend_timeout, self._key) as waiter:
                    while not (lease := await self._try()).granted_to(self._holder):
                        await self._wait(waiter, lease)
        except Exception as error:
            # What a request of an unknown outcome took is then another's, and is never mistaken for one's own.
            self._holder = ""
            self._failed(error, timing)
            await sleep(self._clock, _jittered(timing))

    async def _try(self) -> Lease:
        """Ask for the lease once, and lead if that is granted."""
        timing = self._candidate.config
        self._holder = self._holder or f"{self._candidate.worker}:{mint()}"
        sent_at = self._clock.now()
        async with TimeLimit(self._clock, timing.backend_timeout):
            lease = await self._backend.acquire(
                self._key, self._holder, timing.lease_duration, data=self._data(timing), waiting=True
            )
        self._heard(sent_at)
        self._standing.record = LeaderRecord.of(lease)
        if lease.granted_to(self._holder):
            self._begin(lease, sent_at, timing)
        raise_if_cancelled()
        return lease

    def _heard(self, sent_at: float) -> None:
        """The store answered what was sent then."""
        self._standing.heard_at = sent_at
        self._standing.failing = False
        self._outage.over(self._clock.now(), self._who)
        self._own_outage.over(self._clock.now())

    def _failed(self, error: Exception, timing: Timing) -> None:
        """The store did not do what it was asked."""
        self._standing.failing = True
        self._outage.note(error, self._clock.now(), timing.error_interval, self._who)

    def _begin(self, lease: Lease, sent_at: float, timing: Timing) -> None:
        self._standing.begin(Term(lease, sent_at, timing))
        logger.info("leading %s, term %d", self._key, lease.fence)
        emit("acquired", self._key, self._clock.now() - sent_at)

    async def _wait(self, waiter: Waiter, lease: Lease) -> None:
        self._standing.changed.send()  # the record may be news
        self._look_for_a_twin(lease)
        # To ask a store of this process costs next to nothing, and keeps the record up to date.
        seldom = waiter.pushes and self._backend.scope != "process"
        poll = SAFETY_POLL if seldom else _jittered(self._candidate.config)
        await waiter.wait(min(lease.remaining + 0.001, poll))

    def _look_for_a_twin(self, lease: Lease) -> None:
        """Tell once that another instance has this one's worker name; not of one that has died, but not yet expired."""
        if self._twin_told or lease.worker != self._candidate.worker:
            return
        holder, until = self._namesake
        self._namesake = (lease.holder, lease.expires_at)
        if holder == lease.holder and lease.expires_at > until:
            self._twin_told = True
            logger.warning(
                "another instance stands for %s under the worker name %r: give each its own",
                self._key,
                self._candidate.worker,
            )

    async def _lead(self, term: Term) -> None:
        """Renew until the term is over."""
        while (left := self._standing.leading_for(term)) > 0:
            raise_if_cancelled()
            timing = self._candidate.config
            # However long the interval is and however slow a call was, there is time for another try.
            await self._pause(term, min(_jittered(timing), max(left / 2, timing.retry_interval / 10)))
            if self._standing.leading_for(term) > 0:
                await self._renew(term)
        await self._end_term()

    def _data(self, timing: Timing) -> Mapping[str, str]:
        return {**self._candidate.metadata, LEASE_DURATION: repr(timing.lease_duration)}

    async def _pause(self, term: Term, seconds: float) -> None:
        """Sleep while `term` goes on."""
        until = self._clock.now() + seconds
        while (left := min(until - self._clock.now(), self._standing.leading_for(term))) > 0:
            await self._standing.changed.wait(self._clock, left)

    async def _renew(self, term: Term) -> None:
        timing = self._candidate.config
        sent_at = self._clock.now()
        term.ask(sent_at, timing)
        try:
            with distinguish_cancellation():
                async with TimeLimit(self._clock, min(timing.backend_timeout, self._standing.leading_for(term))):
                    lease = await self._backend.renew(term.lease, timing.lease_duration, data=self._data(timing))
        except Exception as error:
            term.failure = reason_of(error)
            self._failed(error, timing)
            return
        self._heard(sent_at)
        if lease is None:
            deadline, term.held_until = term.held_until, self._clock.now()
            term.lead_until = min(term.lead_until, term.held_until)
            reason = TAKEN
            try:
                reason = await why_lost(self._backend, term.lease, deadline)
            finally:  # also when the election is stopped
                self._standing.resign(reason)
            return
        late = self._standing.leading_for(term) <= 0
        term.confirm(lease, sent_at, timing)
        if late:
            # Its end was observed already, and an observer does not look at the same term again.
            self._standing.resign("the answer to its renewal came too late")
        self._standing.record = LeaderRecord.of(lease)
        emit("renewed", self._key)

    async def _end_term(self) -> None:
        """End the term: first its work, then its lease, so that a successor never overlaps with either.

        A cancellation meanwhile, such as that of an event loop which ends, cuts it short and is raised at the end; the
        lease of work that has ended by then is released all the same.
        """
        term = self._standing.term
        if term is None:
            return
        self._standing.resign()
        led = self._clock.now() - term.began_at
        if term.loss:
            logger.warning("lost %s, term %d: %s", self._key, term.lease.fence, term.loss)
            emit("lost", self._key, led, term.loss)
        try:
            idle = await self._standing.wait_idle(max(term.held_until, self._clock.now() + GRACE))
            if not idle:
                logger.error("work of %s, term %d, runs on although its lease has ended", self._key, term.lease.fence)
            await self._release(term, self._candidate.config.backend_timeout)
        except asyncio.CancelledError:
            # The work was cancelled with the rest of the loop, and its end may be a step away.
            if await self._standing.wait_idle(self._clock.now() + GRACE):
                await self._release(term, min(self._candidate.config.backend_timeout, GRACE))
            raise
        finally:
            self._standing.term = None
            self._holder = ""
            led = self._clock.now() - term.began_at
            logger.info("led %s for %.1f s, term %d", self._key, led, term.lease.fence)
            emit("led", self._key, led)
            self._standing.changed.send()

    async def _release(self, term: Term, limit: float) -> None:
        """Give the lease back, within `limit` seconds; after a failure it ends by itself."""
        try:
            with distinguish_cancellation():
                async with TimeLimit(self._clock, limit):
                    if await self._backend.release(term.lease):
                        self._standing.record = replace(LeaderRecord.of(term.lease), holder="", worker="")
                        if not term.loss:
                            emit("handed_over", self._key)
        except Exception as error:
            logger.warning(
                "releasing %s failed, and it ends by itself: %s", self._key, str(error) or type(error).__name__
            )


def _jittered(timing: Timing) -> float:
    return timing.retry_interval * (1 + timing.retry_jitter * (2 * random() - 1))
