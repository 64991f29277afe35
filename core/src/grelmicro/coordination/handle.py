"""What an acquisition returns: a lease in the caller's hand, usable from any task or thread."""

import weakref
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NoReturn

from grelmicro import lifecycle
from grelmicro.coordination.hold import Hold
from grelmicro.coordination.identity import NOBODY, Owner
from grelmicro.coordination.losses import CLOSED, TAKEN, why_lost
from grelmicro.coordination.protocols import LockBackend
from grelmicro.coordination.threads import call
from grelmicro.errors import (
    GrelmicroError,
    LockLostError,
    LockNotOwnedError,
    LockReentrantError,
    OutOfContextError,
)
from grelmicro.events import emit, listeners
from grelmicro.leases import Lease

_around: ContextVar[tuple[weakref.ref["LockHandle"], ...]] = ContextVar("grelmicro_held_around", default=())


def held_around(backend: LockBackend, name: str) -> "LockHandle | None":
    """The lease of `name` that is kept until this code, which runs in a thread, has ended."""
    for reference in _around.get():
        held = reference()
        if held is not None and held._backend is backend and held.lease.name == name and held.valid:
            return held
    return None


class Holdings(dict[Owner, "LockHandle"]):
    """What the tasks and threads of one lock hold. Handles refer to it weakly, so a dropped one ends at once."""

    __slots__ = ("__weakref__",)


class LockHandle(Hold):
    """A held lease. Every acquisition has a handle of its own; it keeps the backend that granted it."""

    _guards_block = False
    _ended = False
    home: AbstractEventLoop | None = None
    """The event loop of the task that holds it, if its backend is served by another one."""

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
        Hold.__init__(self, name, lease, backend, sent_at, duration)
        self.owner = owner
        self._holdings = holdings

    def guard_block(self) -> None:
        """A block began whose end gives it back."""
        self._guards_block = True

    def keep_around_threads(self) -> None:
        """Let functions in threads that begin in this context, and are waited for, not wait for this lock in turn."""
        _around.set((*_around.get(), weakref.ref(self)))

    @property
    def outlasts_its_owner(self) -> bool:
        """Whether it is held until its owner ends a block, however long that waits: a loss would cancel the wait."""
        endless = self.max_hold is None or self.interruption is not None
        return self._guards_block and self.renewed_automatically and endless

    def check_for_block(self) -> None:
        """See that a block can begin under it, and that no other one is open, whose end would give it back.

        Raises:
            LockNotOwnedError: it is lost or released.
            LockReentrantError: it guards a block already.
        """
        self._check_held("used to guard a block")
        if self._guards_block:
            raise LockReentrantError(
                f"lock '{self._name}' guards a block already, whose end gives it back: do not enter its handle again",
                name=self._name,
            )

    def __reduce__(self) -> NoReturn:
        """A copy, in another process or in this one, could not be told of a loss or a release."""
        raise TypeError(
            f"the handle of lock '{self._name}' cannot be copied or pickled: acquire the lock where it is needed, "
            "and hand on the fencing_token only"
        )

    def renew_automatically(self) -> None:
        """Have it renewed until it is released, lost, dropped by everybody or held for `max_hold` seconds."""
        self.renewed_automatically = True
        self._backend.renewer.add(self)

    def stop_renewing(self) -> None:
        """End what `renew_automatically` began."""
        self.renewed_automatically = False
        self._backend.renewer.discard(self)

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
            raise LockNotOwnedError(
                f"lock '{self._name}' reached its max_hold: release it, or allow a longer one", name=self._name
            )
        self.ask(sent_at, ttl)
        lease = await self._backend.renew(self.lease, ttl)
        if lease is None:
            await self._lose_taken()
        else:
            self.confirm(lease, sent_at, ttl)
        self._check_held("extended")
        return self

    def confirm(self, lease: Lease, sent_at: float, ttl: float) -> None:
        """A renewal sent at `sent_at` for `ttl` seconds was granted; it changes nothing if the lease is over here."""
        if self._released or self._release_sent:
            return
        if self.valid:
            Hold.confirm(self, lease, sent_at, ttl)
            return
        # Somebody may have seen it end already, and would not see it go on.
        self._backend.settle(lease)
        self.lose("the answer to its renewal came when it had run out")

    def release(self) -> Coroutine[Any, Any, None]:
        """Give it back. The handle is not valid from the moment at which this is awaited.

        A cancellation leaves the release to the background, and this may be called again.

        Raises:
            LockNotOwnedError: it was no longer held, or is released already.
            CoordinationBackendError: the store failed. The release is repeated in the background until the lease ends,
                and this may be called again.
        """
        return self._release(LockNotOwnedError)

    async def _release(self, loss: type[LockNotOwnedError]) -> None:
        """`release`, with the error to raise when it was no longer held."""
        if self._released:
            raise LockNotOwnedError(f"lock '{self._name}' is released already: acquire it again", name=self._name)
        if self.renewed_automatically:
            self._backend.renewer.discard(self)
        if self._reason or self._generation is not lifecycle.generation:
            self.leave_owner()
            raise self.lost_error("released", loss)
        repeated = self._release_sent
        instant = self._backend.instant(get_running_loop(), self.lease.name)
        if instant is not None and self.note is None:
            owned = instant.release_now(self.lease)
        else:
            if repeated is None:
                self._release_sent = self._backend.clock.now() < self.deadline
            try:
                owned = await self._backend.release(self.lease, data=self.note)
            except BaseException:  # the backend repeats it
                self._tell_end()
                raise
        # The first of two requests may have done it: then the second one's "no" is no loss.
        if not owned and not repeated:
            await self._lose_taken()
            self.leave_owner()
            raise self.lost_error("released", loss)
        self._finish()

    _release.__qualname__ = "LockHandle.release"

    @property
    def from_thread(self) -> "ThreadLockHandle":
        """The same handle for a thread other than the event loop's."""
        return ThreadLockHandle(self)

    def lose(self, reason: str) -> None:
        """It is no longer held, for `reason`."""
        if self._reason or self._released:
            return
        self._backend.renewer.discard(self)
        self._tell_loss(reason)

    async def _lose_taken(self) -> None:
        """The store does not know it any more."""
        deadline, self.deadline = self.deadline, min(self.deadline, self._backend.clock.now())
        reason = TAKEN
        try:
            reason = await why_lost(self._backend, self.lease, deadline)
        finally:  # also when the caller is cancelled
            self.lose(reason)

    def move_to(self, owner: Owner) -> None:
        """Let `owner` be who holds it, as far as the lock knows."""
        self.leave_owner()
        self.owner = owner
        if (held := self._holdings()) is not None:
            held[owner] = self

    def leave_owner(self) -> None:
        """Let its owner be free to acquire again."""
        held = self._holdings()
        if held is not None and held.get(self.owner) is self:
            del held[self.owner]

    @property
    def deserted(self) -> bool:
        """Whether the event loop of its holder is closed, where nothing can go on under it any more."""
        return self.home is not None and self.home.is_closed()

    def orphan(self) -> None:
        """Its owner has ended: it goes on for as long as somebody else has it in hand."""
        if self.deserted:
            self.give_back()
            return
        self.leave_owner()
        self.owner = NOBODY  # a task that ended may have this handle as its result

    def close(self) -> None:
        """See `Renewable.close`. A lease is never given back while work that it guards may go on."""
        if self._guards_block and not self.owner.done():
            if self.renewed_automatically:
                self.lose(CLOSED)
        elif self.valid:
            self._backend.settle(self.lease)
            self.lose(f"{CLOSED}, and gave it back")

    async def leave(self, error: BaseException | None, end: Callable[["LockHandle"], Awaitable[None]]) -> None:
        """End a block under this lease with `end`. What its body raised, `error`, stays the one that is raised."""
        self.leave_owner()
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
            await self._release(LockLostError)

    async def __aenter__(self) -> "LockHandle":
        """Hold it for a block: `async with lock.acquire(timeout=2) as held`.

        Raises:
            LockNotOwnedError: it is lost or released.
            LockReentrantError: it guards a block already.
        """
        self.check_for_block()
        self.guard_block()
        self.interrupt_current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.leave(error, LockHandle.end)

    def give_back(self, seconds: float = 0.0) -> None:
        """Release it in the background, or let it end in `seconds`: whoever asked for it is gone."""
        self._backend.renewer.discard(self)
        self._backend.settle(self.lease, seconds)
        self._finish()

    async def shorten(self, seconds: float) -> bool:
        """Leave it held for `seconds` more and give it up; whether it was still held."""
        self._backend.renewer.discard(self)
        self._release_sent = self.valid
        try:
            owned = await self._backend.renew(self.lease, seconds, data=self.note) is not None
        except BaseException:
            self._backend.settle(self.lease, seconds, data=self.note)
            self._finish()
            raise
        if owned:
            self._finish()
        else:
            await self._lose_taken()
        return owned

    def _finish(self) -> None:
        """It is given back."""
        self._released = True
        self.leave_owner()
        if listeners or self._signal is not None:
            self._tell_end()

    def _tell_end(self) -> None:
        """Tell once that it is held no more, since its release was begun."""
        if self._ended:
            return
        self._ended = True
        if listeners:
            emit("held", self.lease.name, self.held_for)
        if self._signal is not None:
            self._signal.send()

    def _check_held(self, action: str) -> None:
        if self._released or self._release_sent:
            raise LockNotOwnedError(
                f"lock '{self._name}' cannot be {action}: it is released; acquire it again", name=self._name
            )
        if not self.valid:
            raise self.lost_error(action)


class HandleElsewhere:
    """What a `LockHandle` tells without its event loop."""

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

    def raise_if_lost(self) -> None:
        """See `LockHandle.raise_if_lost`."""
        self._handle.raise_if_lost()

    def __repr__(self) -> str:
        return repr(self._handle)


class ThreadLockHandle(HandleElsewhere):
    """A `LockHandle` for a thread: the same names, as plain calls that the handle's event loop carries out."""

    __slots__ = ()

    def extend(self) -> "ThreadLockHandle":
        """See `LockHandle.extend`."""
        call(self._handle._backend.get_loop(), self._handle.extend())
        return self

    def release(self) -> None:
        """See `LockHandle.release`."""
        call(self._handle._backend.get_loop(), self._handle.release(), finish=True)

    def wait_lost(self) -> None:
        """See `LockHandle.wait_lost`."""
        call(self._handle._backend.get_loop(), self._handle.wait_lost())

    def leave(self, error: BaseException | None, end: Callable[[LockHandle], Awaitable[None]]) -> None:
        """See `LockHandle.leave`."""
        try:
            loop = self._handle._backend.get_loop()
        except OutOfContextError as failure:
            self._handle.leave_owner()
            if error is None:
                raise
            error.add_note(str(failure))
        else:
            call(loop, self._handle.leave(error, end), finish=True)

    def __enter__(self) -> "ThreadLockHandle":
        """Hold it for a block: `with lock.from_thread.acquire(timeout=2) as held`; raises what `LockHandle`'s does."""
        self._handle.check_for_block()
        self._handle.guard_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave(error, LockHandle.end)
