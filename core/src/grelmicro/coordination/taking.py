"""Taking several locks one after the other, all or none."""

from collections.abc import Sequence
from contextlib import suppress

from grelmicro.clock import Clock, TimeLimit
from grelmicro.coordination.handle import LockHandle
from grelmicro.coordination.identity import Owner, this_task
from grelmicro.coordination.interruption import Interruption
from grelmicro.coordination.lock import Lock
from grelmicro.coordination.multihandle import MultiLockHandle
from grelmicro.coordination.protocols import LockBackend
from grelmicro.coordination.wait import PATIENCE
from grelmicro.errors import (
    CoordinationError,
    GrelmicroError,
    LockLostError,
    LockNotOwnedError,
    LockTimeoutError,
    OutcomeUnknownError,
    WouldBlockError,
)


class Taking:
    """One attempt. The locks that it has are kept alive while it waits for the next one.

    Args:
        owner: the task or thread that they are taken for.
        context: says in their tokens whether that is a task or a thread.
        clock: whose time.
        timeout: seconds for all of them; None: no limit, 0: each is tried once.
    """

    def __init__(self, owner: Owner, context: str, clock: Clock, timeout: float | None) -> None:
        self._owner = owner
        self._context = context
        self._clock = clock
        self._timeout = timeout
        self._until = clock.now() + (timeout or 0.0)
        self._interruption = Interruption(this_task())
        self._taken: list[LockHandle] = []
        self._kept: list[LockHandle] = []  # those that are renewed only for as long as this takes

    async def run(self, locks: Sequence[tuple[Lock, LockBackend]]) -> list[LockHandle]:
        """Take `locks` in this order; their handles.

        Raises:
            LockLostError: one was lost while a later one was waited for.
            OutcomeUnknownError: a lease that had become short was not renewed in time.
            LockTimeoutError: there was no time left to renew it.
            GrelmicroError: what acquiring one of them raised.
        """
        try:
            for lock, backend in locks:
                self._keep_alive()
                self._taken.append(await lock._acquire(backend, self._owner, self._context, self._left()))
            await self._lengthen()
        except BaseException as error:
            lost = self._loss() if self._stop_keeping_alive(error) else None
            await self._give_back(wait=isinstance(error, WouldBlockError))
            if lost is not None:
                raise lost from error
            raise
        self._stop_keeping_alive(None)
        return self._taken

    def _left(self) -> float | None:
        """Seconds that are left of the timeout; in error texts, so not to the last digit."""
        return self._timeout and max(round(self._until - self._clock.now(), 3), 0.0)

    def _keep_alive(self) -> None:
        """Have what was taken last renewed, and be interrupted when it is lost."""
        for handle in self._taken[-1:]:
            handle.interruption = self._interruption
            if not handle.renewed_automatically:
                handle.renew_automatically()
                self._kept.append(handle)

    async def _lengthen(self) -> None:
        """See that each lease is held, for a good part of its duration also where its renewals failed meanwhile."""
        for handle in self._taken:
            if handle.expires_in < handle.ttl(self._clock.now()) / 2:
                sent_at = self._clock.now()
                try:
                    async with TimeLimit(self._clock, self._left() if self._timeout else None):
                        with suppress(LockNotOwnedError):  # told below, for all of them
                            await handle.extend()
                except TimeoutError as cut_off:
                    raise self._not_lengthened(handle, self._clock.now() - sent_at) from cut_off
        if any(handle.lost for handle in self._taken):
            raise self._loss()

    def _not_lengthened(self, handle: LockHandle, cut_off: float) -> CoordinationError:
        """The deadline cut a renewal off that was under way for `cut_off` seconds."""
        if cut_off > PATIENCE:
            return OutcomeUnknownError(
                f"lock '{handle.name}': the store did not renew it in time while others were taken, and all "
                "are given back: check the store, or give a longer timeout",
                name=handle.name,
            )
        busy = LockTimeoutError(
            f"lock '{handle.name}': others were taken just before the end of {self._timeout:g} s, which left no time "
            "to renew it, and all are given back: try again later, or give a longer timeout",
            name=handle.name,
        )
        busy.timeout = self._timeout
        return busy

    def _stop_keeping_alive(self, error: BaseException | None) -> bool:
        """End what keeps the leases alive; whether `error` is the interruption by a loss, and nothing else."""
        for handle in self._taken:
            handle.interruption = None
        for handle in self._kept:
            handle.stop_renewing()
        return self._interruption.absorb(error)

    def _loss(self) -> LockLostError:
        lost = next(handle for handle in self._taken if handle.lost)
        lost.lose("its lease ran out")
        longer = "max_hold" if lost.reached_max_hold() else "lease_duration"
        return LockLostError(
            f"lock '{lost.name}' was lost while others were taken with it, and all are given back: {lost.why_lost()}; "
            f"try again, and use a longer {longer} if this happens often",
            name=lost.name,
        )

    async def _give_back(self, *, wait: bool) -> None:
        """Give back what was taken; in the background unless `wait`, which asks for a store that answers."""
        held = MultiLockHandle(self._taken)
        held.leave_owner()
        if wait:
            with suppress(GrelmicroError):
                await held.release()
        else:
            held.give_back()
