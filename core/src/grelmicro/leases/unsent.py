"""Requests that were cut off before a store sent them: they changed nothing."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grelmicro.errors import BackendUnavailableError, GrelmicroError, OutcomeUnknownError


@contextmanager
def nothing_sent(why: Callable[[], BackendUnavailableError]) -> Iterator[None]:
    """A block in which a store waits before it sends anything: a cancellation in it gets the error of `why` as cause.

    So a caller whose time runs out meanwhile learns what it waited for, and that there is nothing to undo.
    """
    try:
        yield
    except asyncio.CancelledError as cancelled:
        cancelled.__cause__ = why()
        raise


def why_unsent(error: BaseException) -> BackendUnavailableError | None:
    """What a request that was cancelled, or cut off by a time limit, had waited for; None if it may have been sent."""
    cancelled = error.__cause__ if isinstance(error, TimeoutError) else error
    if isinstance(cancelled, asyncio.CancelledError) and isinstance(cancelled.__cause__, BackendUnavailableError):
        return cancelled.__cause__
    return None


def changed_nothing(error: BaseException) -> bool:
    """Whether the store said that the request did not happen, or had not sent it when it was cancelled."""
    if isinstance(error, GrelmicroError):
        return not isinstance(error, OutcomeUnknownError)
    return why_unsent(error) is not None
