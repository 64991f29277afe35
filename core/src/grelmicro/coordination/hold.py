"""A held lease as its holder knows it without asking the store: until when it lasts, and how it ended."""

import asyncio
import logging
from collections.abc import Mapping

from grelmicro import lifecycle
from grelmicro.clock import DRIFT, Signal
from grelmicro.coordination.interruption import Interruption
from grelmicro.coordination.losses import BROKEN, CLOSED
from grelmicro.coordination.protocols import LockBackend
from grelmicro.errors import LockLostError, LockNotOwnedError
from grelmicro.events import emit
from grelmicro.leases import Lease

logger = logging.getLogger("grelmicro.coordination")

LONG_HOLD_LEASES = 5
"""How many times its duration a lease is held before a warning."""


class Hold:
    """A lease and its local deadline. It keeps the backend that granted it, whose renewer may keep it alive."""

    # Most leases are held once, without contention: what they rarely need is set when they need it.
    interruption: Interruption | None = None
    renewed_automatically = False
    max_hold: float | None = None
    late = 0.0
    """Seconds from when its work was due until it was acquired, of which `held_for` does not know."""
    note: Mapping[str, str] | None = None
    """What replaces the data of the record when it is given back; None keeps it."""
    _reason = ""
    _released = False
    _release_sent: bool | None = None
    """None before a release was begun; then whether it was still held at that moment."""
    _signal: Signal | None = None
    _warned = False
    """Whether the warning about a long hold was logged."""

    def __init__(self, name: str, lease: Lease, backend: LockBackend, sent_at: float, duration: float) -> None:
        self._name = name
        self._backend = backend
        self._generation = lifecycle.generation
        self._acquired_at = sent_at
        self.lease = lease
        self.duration = duration
        # The promise starts before the question was sent: the answer may be late, the store's clock may run faster.
        self.deadline = sent_at + duration * (1 - DRIFT)
        self.renew_at = sent_at + duration / 3

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._name

    @property
    def fencing_token(self) -> int:
        """The fence: give it to the resource with every write, and let it refuse lower ones."""
        return self.lease.fence

    @property
    def token(self) -> str:
        """What the store keeps as the holder. It proves ownership: do not log it."""
        return self.lease.holder

    @property
    def expires_in(self) -> float:
        """Seconds for which it is surely held; 0.0 when it is lost, or its release was begun."""
        if self._release_sent is not None or self._released or self._reason:
            return 0.0
        if self._generation is not lifecycle.generation:
            return 0.0
        return max(self.deadline - self._backend.clock.now(), 0.0)

    @property
    def valid(self) -> bool:
        """Whether it is surely still held."""
        return self.expires_in > 0

    @property
    def held_for(self) -> float:
        """Seconds since it was asked for."""
        return self._backend.clock.now() - self._acquired_at

    def backdate(self, seconds: float) -> None:
        """Count `held_for`, and with it a minimum hold, from `seconds` earlier."""
        self._acquired_at -= seconds

    def count_from_due(self, late: float, tolerance: float) -> None:
        """It was acquired `late` seconds after its work was due: count its minimum hold from then.

        For other workers that counts only up to a tolerance, in seconds: they would run too soon after this one.
        """
        if late < tolerance:
            self.backdate(late)
        else:
            self.late = late

    @property
    def released(self) -> bool:
        """Whether it was given back, and the store confirmed that."""
        return self._released

    @property
    def lost(self) -> bool:
        """Whether it ended without a release."""
        if self._released or (self._release_sent and not self._reason):
            return False
        return not self.valid

    def raise_if_lost(self) -> None:
        """Raise `LockLostError` if it is no longer held."""
        if self.lost:
            raise self.lost_error("used", LockLostError)

    async def wait_lost(self) -> None:
        """Wait until it is no longer held: lost, or its release was begun."""
        if self._signal is None:
            self._signal = Signal()
        while (left := self.expires_in) > 0:
            await self._signal.wait(self._backend.clock, left)

    def interrupt_current_task(self) -> None:
        """If it is renewed, cancel the running task when it is lost, until `stop_interrupting`."""
        if self.renewed_automatically and (task := asyncio.current_task()) is not None:
            self.interruption = Interruption(task)

    def stop_interrupting(self, error: BaseException | None) -> bool:
        """End what `interrupt_current_task` began; whether `error` is that interruption and nothing else."""
        interruption, self.interruption = self.interruption, None
        return interruption is not None and interruption.absorb(error)

    def ttl(self, now: float) -> float:
        """Seconds to renew for at `now`; 0.0 when its `max_hold` is reached."""
        if self.max_hold is None:
            return self.duration
        return max(min(self.duration, self._acquired_at + self.max_hold - now), 0.0)

    def ask(self, sent_at: float, ttl: float) -> None:
        """A renewal for `ttl` seconds is sent at `sent_at`: if it shortens the lease, its answer may be lost."""
        self.deadline = min(self.deadline, sent_at + ttl * (1 - DRIFT))

    def confirm(self, lease: Lease, sent_at: float, ttl: float) -> None:
        """A renewal sent at `sent_at` for `ttl` seconds was granted."""
        self.lease = lease
        self.deadline = sent_at + ttl * (1 - DRIFT)
        self.renew_at = sent_at + self.duration / 3
        emit("renewed", lease.name)
        if not self._warned and sent_at - self._acquired_at > LONG_HOLD_LEASES * self.duration:
            self._warned = True
            self._warn_of_long_hold(sent_at)

    def _warn_of_long_hold(self, now: float) -> None:
        logger.warning(
            "%s is held by worker '%s' for %.1f s now, more than %d times its lease: "
            "find out whether the work that it guards hangs, or bound it with max_hold",
            self.lease.name,
            self.lease.worker,
            now - self._acquired_at,
            LONG_HOLD_LEASES,
        )

    def postpone(self, now: float) -> None:
        """A renewal failed or is under way: the next try comes soon."""
        self.renew_at = now + self.duration / 10

    def abandon(self) -> None:
        """It is no longer held; those who would be told are gone with their event loop or process."""
        self._reason = self._reason or "its event loop or process is gone"
        self._signal = self.interruption = None

    def lost_error(self, action: str, kind: type[LockNotOwnedError] = LockNotOwnedError) -> LockNotOwnedError:
        """Why it cannot be `action`, such as `extended`, when it is lost."""
        why = f"{self.why_lost()}; stop the guarded work, and {self._remedy()}"
        return kind(f"lock '{self._name}' cannot be {action}: {why}", name=self._name)

    def reached_max_hold(self) -> bool:
        """Whether its lease ran out, and could not have lasted any longer."""
        if self._generation is not lifecycle.generation or self._backend.clock.now() < self.deadline:
            return False
        return self.ttl(self.deadline) <= 2 * self.duration * DRIFT  # the promise ends a little before the lease

    def why_lost(self) -> str:
        """The reason of the loss, for texts."""
        if self._generation is not lifecycle.generation:
            return "it was inherited through a fork and belongs to the parent process"
        return self._reason or "its lease ran out"

    def _remedy(self) -> str:
        """What to do so that it does not end like this again."""
        if self._generation is not lifecycle.generation:
            return "acquire it in the process that needs it"
        if self._reason.startswith(BROKEN):
            return "find out what made it necessary before you acquire it again"
        if self._reason.startswith(CLOSED):
            return "keep the app open until it has ended"
        if self.reached_max_hold():
            return "make it shorter or use a longer max_hold"
        if self.renewed_automatically:
            return "look in the log for what kept it from being renewed: a blocked event loop, or the store"
        return "use a longer lease_duration or auto_renew=True if it needs more time"

    def _tell_loss(self, reason: str) -> None:
        """It is no longer held, for `reason`; tell whoever waits for that."""
        self._reason = reason
        logger.warning("lost %s: %s", self.lease.name, reason)
        emit("lost", self.lease.name, self.held_for, reason)
        if self._signal is not None:
            self._signal.send()
        if self.interruption is not None:
            self.interruption.fire()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} fence={self.fencing_token} expires_in={self.expires_in:.3f}>"
