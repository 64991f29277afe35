"""Run work under the lease of a singleton."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from socket import gethostname
from typing import TypeVar

from django.db import close_old_connections

from grelmicro import Grelmicro
from grelmicro.coordination import LeaseHolder, Lock, LockHandle, LockLostError, ThreadLockHandle, WouldBlockError
from grelmicro.errors import CoordinationBackendError, GrelmicroError
from grelmicro_django.calls import drop_connections
from grelmicro_django.guarding import Endings, Guard, Interrupted, Terminated
from grelmicro_django.policies import Policy
from grelmicro_django.serving import aserved, served, serving
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
        with Endings(policy.grace) as endings, ExitStack() as stack:
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
    return make_lock(policy, micro).from_thread.acquire(timeout=policy.timeout)


def worker_of(micro: Grelmicro) -> str:
    """The name of the worker that holds the lease of a command."""
    return micro.worker or f"{gethostname()}-{os.getpid()}"


def make_lock(policy: Policy, micro: Grelmicro) -> Lock:
    """The lock of a singleton."""
    return micro.coordination.lock(
        policy.name,
        worker=worker_of(micro),
        lease_duration=policy.lease_duration,
        auto_renew=True,
        # The work is stopped at its maximum, and the lease lasts until it has stopped.
        max_hold=None if policy.max_hold is None else policy.max_hold + policy.grace + policy.lease_duration,
    )


def skip(policy: Policy, micro: Grelmicro) -> str:
    """Log that another process holds the lease, and since when; the text."""
    reading = read_holder(policy, micro)
    try:
        holder = reading.result(READ_SECONDS)
    except (GrelmicroError, TimeoutError):
        reading.cancel()
        holder = None
    return log_skip(policy, holder)


async def askip(policy: Policy, micro: Grelmicro) -> None:
    """The same in a coroutine."""
    try:
        holder = await asyncio.wait_for(asyncio.wrap_future(read_holder(policy, micro)), READ_SECONDS)
    except (GrelmicroError, TimeoutError):
        holder = None
    log_skip(policy, holder)


def read_holder(policy: Policy, micro: Grelmicro) -> "Future[LeaseHolder | None]":
    """The holder of the lease, as its record says."""
    coordination = micro.coordination
    return asyncio.run_coroutine_threadsafe(coordination.holder_of(policy.name), coordination.lock_backend.get_loop())


def log_skip(policy: Policy, holder: LeaseHolder | None) -> str:
    """Log a skip; the text."""
    if holder is None:
        why = "another worker held it until now"
    else:
        why = f"held since {holder.since.isoformat(timespec='seconds')} by worker '{holder.worker}'"
    logger.info("singleton '%s' was skipped: %s", policy.name, why)
    return f"singleton '{policy.name}' was skipped: {why}"


def log_unreleased(policy: Policy, error: CoordinationBackendError) -> None:
    """Log that the lease lasted as long as the work, and the store failed at its release."""
    logger.warning("singleton '%s' ended, and its lease ends by itself: %s", policy.name, error)


def ending(policy: Policy) -> Callable[[LockHandle], Awaitable[None]]:
    """What ends a lease: it is released, or kept for what is left of its minimum."""

    async def end(handle: LockHandle) -> None:
        left = policy.min_hold - handle.held_for
        if left <= 0 or not handle.valid or not await handle.shorten(left):
            await handle.end()

    return end


@contextmanager
def releasing(policy: Policy, held: ThreadLockHandle, failure: Callable[[GrelmicroError], Exception]) -> Iterator[None]:
    """End the lease with a block."""
    end = ending(policy)
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
        log_unreleased(policy, unreachable)


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


async def arun(policy: Policy, work: Callable[[], Awaitable[T]]) -> T | Skipped:
    """Await `work` under the lease of a singleton, on any event loop; raises what `run` raises.

    A loss cancels the running task, unless `on_lost` is `finish`.
    """
    async with aserved() as micro:
        try:
            held = await make_lock(policy, micro).from_loop.acquire(timeout=policy.timeout)
        except WouldBlockError:
            if policy.on_busy != "skip":
                raise
            await askip(policy, micro)
            return SKIPPED
        end = ending(policy)
        if policy.on_lost == "stop":
            held.begin_block()
        try:
            result = await limited(policy, work)
        except BaseException as error:
            await held.leave(error, end)
            raise
        try:
            await held.leave(None, end)
        except CoordinationBackendError as unreachable:
            log_unreleased(policy, unreachable)
        return result


async def limited(policy: Policy, work: Callable[[], Awaitable[T]]) -> T:
    """Await `work` for as long as the policy lets it run."""
    try:
        async with asyncio.timeout(policy.max_hold) as limit:
            return await work()
    except TimeoutError as late:
        if not limit.expired():
            raise
        text = f"singleton '{policy.name}': it reached its max_hold of {policy.max_hold:g} s"
        raise LockLostError(text, name=policy.name) from late
