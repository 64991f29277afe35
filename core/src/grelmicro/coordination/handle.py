"""What an acquisition returns: a lease in the caller's hand, usable from any task or thread."""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType

from grelmicro import lifecycle
from grelmicro.clock import DRIFT, Signal
from grelmicro.coordination.identity import Owner
from grelmicro.coordination.interruption import Interruption
from grelmicro.coordination.protocols import LockBackend
from grelmicro.coordination.threads import call
from grelmicro.errors import GrelmicroError, LockLostError, LockNotOwnedError
from grelmicro.events import emit, listeners
from grelmicro.leases import Lease

logger = logging.getLogger("grelmicro.coordination")


class Holdings(dict[Owner, "LockHandle"]):
    """What the tasks and threads of one lock hold. Handles refer to it weakly, so a dropped one ends at once."""

    __slots__ = ("__weakref__",)


class LockHandle:
    """A held lease. Every acquisition has a handle of its own; it keeps the backend that granted it."""

    # Most handles live for one uncontended hold: what they rarely need is set when they need it.
    interruption: Interruption | None = None
    renewed_automatically = False
    max_hold: float | None = None
    _reason = ""
    guards_block = False
    """Whether a block will end it; then its owner keeps it until the block's end, also when it is released before."""
    _released = False
    _release_sent: bool | None = None
    """None before a release was begun; then whether it was still held at that moment."""
    _signal: Signal | None = None

    def __init__(
        self,
        name: str,
        lease: Lease,
        backend: LockBackend,
        sent_at: float,
        duration: float,
        owner: Owner,
        holdings: weakref.ref[Holdings],
    ) -> None:
        self._name = name
        self._backend = backend
        self._generation = lifecycle.generation
        self._acquired_at = sent_at
        self._holdings = holdings
        self.lease = lease
        self.owner = owner
        self.duration = duration
        # The promise starts before the question was sent: the answer may be late, the store's clock may run faster.
        self.deadline = sent_at + duration * (1 - DRIFT)
        self.renew_at = sent_at + duration / 3

    def renew_automatically(self) -> None:
        """Have it renewed until it is released, lost, left by its owner or held for `max_hold` seconds."""
        self.renewed_automatically = True
        self._backend.renewer.add(self)

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
        """Seconds for which it is surely held; 0.0 when it is lost or released."""
        if self._released or self._reason or self._generation is not lifecycle.generation:
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

    @property
    def released(self) -> bool:
        """Whether it was given back, and the store confirmed that."""
        return self._released

    @property
    def held(self) -> bool:
        """Whether it is valid and no release was begun."""
        return self._release_sent is None and self.valid

    @property
    def lost(self) -> bool:
        """Whether it ended without a release."""
        return not self._released and not self.valid

    async def extend(self) -> "LockHandle":
        """Let the lease last its whole duration from now; the same handle, with the same fencing token.

        Raises:
            LockNotOwnedError: it expired, was taken over or was released. It is never taken again.
            CoordinationBackendError: the store failed; the lease lasts as long as before.
        """
        self._check_held("extended")
        sent_at = self._backend.clock.now()
        ttl = self.ttl(sent_at)
        if ttl <= 0:
            raise LockNotOwnedError(f"lock '{self._name}' reached its max_hold: release it, or allow a longer one")
        # A reply may be lost: if this shortens the lease, believe so before it is sent.
        self.deadline = min(self.deadline, sent_at + ttl * (1 - DRIFT))
        lease = await self._backend.renew(self.lease, ttl)
        if lease is None:
            self.lose("it expired or was taken over")
            self._check_held("extended")
        else:
            self.confirm(lease, sent_at, ttl)
        return self

    async def release(self) -> None:
        """Give it back.

        Raises:
            LockNotOwnedError: it was no longer held, or is released already.
            CoordinationBackendError: the store failed. The release is repeated in the background until the lease ends,
                and this may be called again.
        """
        if self._released:
            raise LockNotOwnedError(f"lock '{self._name}' is released already: acquire it again")
        if self.renewed_automatically:
            self._backend.renewer.discard(self)
        if self._reason or self._generation is not lifecycle.generation:
            self._leave_owner()
            raise self.lost_error("released")
        repeated = self._release_sent
        instant = self._backend.instant()
        if instant is not None:
            owned = instant.release_now(self.lease)
        else:
            if repeated is None:
                self._release_sent = self._backend.clock.now() < self.deadline
            owned = await self._backend.release(self.lease)
        # The first of two requests may have done it: then the second one's "no" is no loss.
        if not owned and not (repeated and self._release_sent):
            self.lose("it expired or was taken over")
            self._leave_owner()
            raise self.lost_error("released")
        self._finish()

    def raise_if_lost(self) -> None:
        """Raise `LockLostError` if it is no longer held."""
        if self.lost:
            raise self.lost_error("used", LockLostError)

    async def wait_lost(self) -> None:
        """Wait until it is no longer held: lost or released."""
        if self._signal is None:
            self._signal = Signal()
        while (left := self.expires_in) > 0:
            await self._signal.wait(self._backend.clock, left)

    @property
    def from_thread(self) -> "ThreadLockHandle":
        """The same handle for a thread other than the event loop's."""
        return ThreadLockHandle(self)

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

    def confirm(self, lease: Lease, sent_at: float, ttl: float) -> None:
        """A renewal sent at `sent_at` for `ttl` seconds was granted."""
        self.lease = lease
        self.deadline = sent_at + ttl * (1 - DRIFT)
        self.renew_at = sent_at + self.duration / 3
        emit("renewed", lease.name)

    def postpone(self, now: float) -> None:
        """A renewal failed or is under way: the next try comes soon."""
        self.renew_at = now + self.duration / 10

    def lose(self, reason: str) -> None:
        """It is no longer held; tell whoever waits for that."""
        if self._reason or self._released:
            return
        self._reason = reason
        self._backend.renewer.discard(self)
        logger.warning("lost %s: %s", self.lease.name, reason)
        emit("lost", self.lease.name, self.held_for, reason)
        if self._signal is not None:
            self._signal.send()
        if self.interruption is not None:
            self.interruption.fire()

    def abandon(self) -> None:
        """It is no longer held; those who would be told are gone with their event loop or process."""
        self._reason = self._reason or "its event loop or process is gone"
        self._signal = self.interruption = None

    async def leave(self, error: BaseException | None, end: Callable[["LockHandle"], Awaitable[None]]) -> None:
        """End a block under this lease with `end`. What its body raised, `error`, stays the one that is raised."""
        if self.stop_interrupting(error):
            raise self.lost_error("kept until its block ended", LockLostError) from error
        try:
            await end(self)
        except GrelmicroError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    async def end(self) -> None:
        """Give it back at the end of a block, unless the block did.

        Raises:
            LockLostError: it was lost meanwhile.
        """
        if self.lost:
            self.lose("its lease ran out")
            raise self.lost_error("kept until its block ended", LockLostError)
        if not self._released:
            await self.release()

    async def __aenter__(self) -> "LockHandle":
        """Hold it for a block: `async with await lock.acquire(timeout=2) as held`."""
        self.interrupt_current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.leave(error, LockHandle.end)

    def give_back(self) -> None:
        """Release it in the background: whoever asked for it is gone."""
        self._backend.renewer.discard(self)
        self._backend.settle(self.lease)
        self._finish()

    async def shorten(self, seconds: float) -> bool:
        """Leave it held for `seconds` more and give it up; whether it was still held."""
        self._backend.renewer.discard(self)
        self._release_sent = self.valid
        try:
            owned = await self._backend.renew(self.lease, seconds) is not None
        except BaseException:
            self._backend.settle(self.lease, seconds)
            raise
        finally:
            self._finish()
        return owned

    def _finish(self) -> None:
        self._released = True
        self._leave_owner()
        if listeners:
            emit("held", self.lease.name, self.held_for)
        if self._signal is not None:
            self._signal.send()

    def _leave_owner(self) -> None:
        held = self._holdings()
        if held is not None and not self.guards_block and held.get(self.owner) is self:
            del held[self.owner]

    def _check_held(self, action: str) -> None:
        if self._released:
            raise LockNotOwnedError(f"lock '{self._name}' cannot be {action}: it is released; acquire it again")
        if not self.valid:
            raise self.lost_error(action)

    def lost_error(self, action: str, kind: type[LockNotOwnedError] = LockNotOwnedError) -> LockNotOwnedError:
        reason = self._reason or "its lease ran out"
        if self._generation is not lifecycle.generation:
            reason = "it was inherited through a fork and belongs to the parent process"
        return kind(
            f"lock '{self._name}' cannot be {action}: {reason}; stop the guarded work, "
            "and use a longer lease_duration or auto_renew=True if it needs more time"
        )

    def __repr__(self) -> str:
        return f"<LockHandle {self._name!r} fence={self.fencing_token} expires_in={self.expires_in:.3f}>"


class ThreadLockHandle:
    """A `LockHandle` for a thread: the same names, as plain calls that the handle's event loop carries out."""

    __slots__ = ("_handle",)

    def __init__(self, handle: LockHandle) -> None:
        self._handle = handle

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._handle.name

    @property
    def fencing_token(self) -> int:
        """The fence: give it to the resource with every write, and let it refuse lower ones."""
        return self._handle.fencing_token

    @property
    def token(self) -> str:
        """What the store keeps as the holder. It proves ownership: do not log it."""
        return self._handle.token

    @property
    def expires_in(self) -> float:
        """Seconds for which it is surely held; 0.0 when it is lost or released."""
        return self._handle.expires_in

    @property
    def valid(self) -> bool:
        """Whether it is surely still held."""
        return self._handle.valid

    @property
    def lost(self) -> bool:
        """Whether it ended without a release."""
        return self._handle.lost

    def extend(self) -> "ThreadLockHandle":
        """See `LockHandle.extend`."""
        call(self._handle._backend.get_loop(), self._handle.extend())
        return self

    def release(self) -> None:
        """See `LockHandle.release`."""
        call(self._handle._backend.get_loop(), self._handle.release(), finish=True)

    def guard_block(self) -> None:
        """See `LockHandle.guards_block`."""
        self._handle.guards_block = True

    def raise_if_lost(self) -> None:
        """See `LockHandle.raise_if_lost`."""
        self._handle.raise_if_lost()

    def wait_lost(self) -> None:
        """See `LockHandle.wait_lost`."""
        call(self._handle._backend.get_loop(), self._handle.wait_lost())

    def __repr__(self) -> str:
        return repr(self._handle)
