"""Run work under the lease of a singleton."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from socket import gethostname
from typing import TypeVar

from django.db import close_old_connections

from grelmicro import Grelmicro
from grelmicro.coordination import LockHandle, LockLostError, ThreadLockHandle, WouldBlockError
from grelmicro.errors import CoordinationBackendError, GrelmicroError
from grelmicro_django.guarding import Endings, Guard, Interrupted, Terminated, drop_connections
from grelmicro_django.policies import Policy
from grelmicro_django.serving import served, serving
from grelmicro_django.transactions import refuse_open_transactions

logger = logging.getLogger("grelmicro.django")

READ_SECONDS = 5.0
"""Seconds for which the record of the holder is read, to log it."""

T = TypeVar("T")


class Skipped(dict[str, str]):
    """What a singleton returns that was skipped. It is JSON, so that it can be the result of a background task."""

    def __repr__(self) -> str:
        return "SKIPPED"

    def __reduce__(self) -> str:
        return "SKIPPED"


SKIPPED = Skipped(grelmicro="skipped")
"""What a singleton returns whose lock another process holds."""


def itself(error: GrelmicroError) -> Exception:
    """The error that is raised for `error` where no command translates it."""
    return error


def run(
    policy: Policy,
    work: Callable[[ThreadLockHandle], T],
    *,
    failure: Callable[[GrelmicroError], Exception] = itself,
    tell: Callable[[str], object] = lambda _: None,
) -> T | Skipped:
    """Run `work` in this thread under the lease of a singleton.

    Args:
        policy: the singleton.
        work: called with the lease. What it raises is raised, unless the lease was lost.
        failure: what to raise for an error by which the work did not begin, or for the loss of its lease.
        tell: told of a skip.

    Raises:
        LockTimeoutError: it is busy, and not to be skipped.
        LockLostError: the lease was lost while the work ran, or it reached its maximum.
        CoordinationBackendError: the store failed before the work began.
    """
    try:
        with Endings() as endings, ExitStack() as stack:
            try:
                refuse_open_transactions(f"singleton '{policy.name}'", "begin the transaction inside")
                micro = stack.enter_context(served())
                held = acquire(policy, micro)
            except WouldBlockError as busy:
                if policy.on_busy != "skip":
                    raise failure(busy) from None
                tell(skip(policy, micro))
                return SKIPPED
            except GrelmicroError as error:
                raise failure(error) from None
            with releasing(policy, held, failure):
                endings.release_at_end(held)
                return guarded(policy, held, work, failure)
    except Terminated as ended:
        serving.replace()  # what was asked for is undone before the process ends
        signal.raise_signal(ended.number)
        raise


def acquire(policy: Policy, micro: Grelmicro) -> ThreadLockHandle:
    """The lease of a singleton; raises what `ThreadLock.acquire` raises."""
    lock = micro.coordination.lock(
        policy.name,
        worker=micro.worker or f"{gethostname()}-{os.getpid()}",
        lease_duration=policy.lease_duration,
        auto_renew=True,
        # The work is stopped at its maximum, and the lease lasts until it has stopped.
        max_hold=None if policy.max_hold is None else policy.max_hold + policy.grace + policy.lease_duration,
    )
    return lock.from_thread.acquire(timeout=policy.timeout)


def skip(policy: Policy, micro: Grelmicro) -> str:
    """Log that another process holds the lease, and since when; the text."""
    holder = describe_holder(policy, micro)
    logger.info("singleton '%s' was skipped: %s", policy.name, holder)
    return f"singleton '{policy.name}' was skipped: {holder}"


def describe_holder(policy: Policy, micro: Grelmicro) -> str:
    """Who holds the lease, as its record says."""
    coordination = micro.coordination
    reading = asyncio.run_coroutine_threadsafe(
        coordination.holder_of(policy.name), coordination.lock_backend.get_loop()
    )
    try:
        holder = reading.result(READ_SECONDS)
    except (GrelmicroError, TimeoutError):
        reading.cancel()
        holder = None
    if holder is None:
        return "another worker held it until now"
    return f"held since {holder.since.isoformat(timespec='seconds')} by worker '{holder.worker}'"


@contextmanager
def releasing(policy: Policy, held: ThreadLockHandle, failure: Callable[[GrelmicroError], Exception]) -> Iterator[None]:
    """Release the lease at the end of a block, or keep it for what is left of its minimum."""

    async def end(handle: LockHandle) -> None:
        left = policy.min_hold - handle.held_for
        if left <= 0 or not handle.valid or not await handle.shorten(left):
            await handle.end()

    try:
        yield
    except BaseException as error:
        held.leave(error, end)
        raise
    try:
        held.leave(None, end)
    except LockLostError as lost:
        raise failure(lost) from None
    except CoordinationBackendError as unreachable:
        # The work is done, and its lease lasted as long.
        logger.warning("singleton '%s' ended, and its lease ends by itself: %s", policy.name, unreachable)


def guarded(
    policy: Policy,
    held: ThreadLockHandle,
    work: Callable[[ThreadLockHandle], T],
    failure: Callable[[GrelmicroError], Exception],
) -> T:
    """Run `work` until it ends, or until its lease does."""
    close_old_connections()
    guard = Guard(policy, held)
    results: list[T] = []
    raised: BaseException | None = None
    try:
        try:
            guard.begin()
            results.append(work(held))
        finally:
            guard.end()
    except Interrupted as interrupted:
        if interrupted.guard is not guard:
            raise
        guard.end()
        raised = interrupted
    except BaseException as error:
        raised = error
    if guard.stopping:
        drop_connections()
    close_old_connections()
    if (lost := guard.loss()) is not None and not isinstance(raised, KeyboardInterrupt):
        raise failure(lost) from raised
    if raised is not None:
        raise raised
    return results[0]
