"""`lock`: a lock for a block of code."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from functools import lru_cache
from types import TracebackType

from django.core.exceptions import SynchronousOnlyOperation
from django.db.backends.base.base import BaseDatabaseWrapper

from grelmicro.config import Duration
from grelmicro.coordination import LockTemplate, LoopLockHandle, ThreadLockHandle
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro_django.serving import aserved, served
from grelmicro_django.transactions import (
    Kept,
    arefuse_open_transactions,
    find_kept,
    open_transactions,
    refuse_open_transactions,
)

BEFORE = (
    "acquire it before, as in `with lock(...), transaction.atomic():`, or keep it until the transaction has ended with "
    "lock(..., inside_transaction=True)"
)

ABEFORE = "acquire it before the transaction begins, in the coroutine that calls the function with the transaction"

BUSY_LIMIT = 1.0
"""Seconds for which the thread that runs the queries may be busy at least."""


def lock(
    name: str,
    *,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    inside_transaction: bool = False,
    **values: object,
) -> "BlockLock":
    """A lock for a block: `with lock("order:{pk}", pk=order.pk) as held`, or `async with` on any event loop.

    It goes around a transaction, so that it outlives the commit: one that is released before would let the next holder
    read what is not committed yet.

    Args:
        name: the lock's name; `{field}` stands for a keyword argument. Different values never share a name.
        timeout: seconds to wait for it; None waits as long as it takes, 0 tries once.
        auto_renew: keep the lease alive while the block runs. None: the environment, else on.
        lease_duration: seconds after which the lock frees itself. None: the environment, else 30, or 60 where it is
            not renewed.
        max_hold: seconds after which it is not renewed any more. None: the environment, else no limit.
        inside_transaction: acquire it inside an open transaction, and keep it until the outermost commit or rollback
            of this thread's connections. What was read before it was acquired may be out of date.
        values: the fields of the name.

    Raises:
        SettingsValidationError: the name or a setting breaks a rule, or a field has no value.
    """
    template = template_of(name, timeout, auto_renew, lease_duration, max_hold)
    try:
        named = template.name(values)
    except KeyError as missing:
        raise SettingsValidationError(
            f"lock name {name!r} has the field {{{missing.args[0]}}}: give its value, as in "
            f"lock({name!r}, {missing.args[0]}=...)"
        ) from None
    if unknown := sorted(values.keys() - set(template.template.fields)):
        raise SettingsValidationError(f"lock name {name!r} has no field {{{unknown[0]}}}: write it in the name")
    return BlockLock(template, named, inside_transaction=inside_transaction)


@lru_cache(maxsize=1024)
def template_of(
    name: str,
    timeout: Duration | None,
    auto_renew: bool | None,
    lease_duration: Duration | None,
    max_hold: Duration | None,
) -> LockTemplate:
    """The locks of a name; the environment is read once for each."""
    return LockTemplate.of(
        name, timeout=timeout, auto_renew=auto_renew, lease_duration=lease_duration, max_hold=max_hold
    )


class BlockLock:
    """What `lock` returns: it guards one block.

    Args:
        template: the locks of which it is one.
        name: the lock's name.
        inside_transaction: whether the transactions that are open at its end keep it.
        before: what to do instead of acquiring it inside a transaction.
        abefore: the same in a coroutine.
    """

    def __init__(
        self,
        template: LockTemplate,
        name: str,
        *,
        inside_transaction: bool = False,
        before: str = BEFORE,
        abefore: str = ABEFORE,
    ) -> None:
        self.name = name
        """The lock's name."""
        self._template = template
        self._inside_transaction = inside_transaction
        self._before = before
        self._abefore = abefore
        self._entered: _Entered | None = None
        self._aentered: AsyncExitStack | None = None

    def __enter__(self) -> ThreadLockHandle:
        """Acquire the lock.

        Raises:
            SynchronousOnlyOperation: an event loop runs in this thread, which the wait would block.
            LockTimeoutError: another holder kept it for the whole timeout.
            CoordinationBackendError: the store failed.
            OutOfContextError: a transaction is open, or it guards a block already.
        """
        _refuse_event_loop()
        self._refuse_second_block()
        if not self._inside_transaction:
            refuse_open_transactions(f"lock {self.name!r}", self._before)
        with ExitStack() as stack:
            micro = stack.enter_context(served())
            key = micro, self.name
            if self._inside_transaction and (kept := find_kept(key)) is not None:
                kept.held.raise_if_lost()
                held = kept.held
            else:
                made = self._template.lock(self.name, micro.coordination)
                held = stack.enter_context(made.from_thread.acquire(timeout=self._template.timeout))
            self._entered = _Entered(key, held, stack.pop_all())
        return held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.leave(error, open_transactions() if self._inside_transaction else [])

    async def __aenter__(self) -> LoopLockHandle:
        """Acquire the lock, in a coroutine on any event loop.

        A loss cancels the block, which ends in `LockLostError`.

        Raises:
            LockTimeoutError: another holder kept it for the whole timeout.
            CoordinationBackendError: the store failed.
            OutOfContextError: a transaction is open in the thread that runs this coroutine's queries, it would be kept
                until one ends, or it guards a block already.
        """
        self._refuse_second_block()
        if self._inside_transaction:
            raise OutOfContextError(
                f"lock {self.name!r}: `async with` keeps none until a transaction ends, since a transaction is that of "
                "a thread: use `with lock(..., inside_transaction=True)` in the function that sync_to_async calls"
            )
        timeout = self._template.timeout
        limit = None if timeout is None else max(timeout, BUSY_LIMIT)
        await arefuse_open_transactions(f"lock {self.name!r}", self._abefore, limit)
        async with AsyncExitStack() as stack:
            micro = await stack.enter_async_context(aserved())
            made = self._template.lock(self.name, micro.coordination)
            held = await stack.enter_async_context(made.from_loop.acquire(timeout=timeout))
            self._aentered = stack.pop_all()
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._aentered = self._aentered, None
        if entered is not None:
            await entered.__aexit__(kind, error, traceback)

    def _refuse_second_block(self) -> None:
        if self._entered is not None or self._aentered is not None:
            raise OutOfContextError(f"lock {self.name!r} guards a block already: call lock() again for another one")


class _Entered:
    """A block that is entered, in a thread."""

    def __init__(self, key: object, held: ThreadLockHandle, stack: ExitStack) -> None:
        self._key = key
        self._held = held
        self._stack = stack

    def leave(self, error: BaseException | None, opened: list[BaseDatabaseWrapper]) -> None:
        """The block has ended with `error`, and these transactions keep the lease.

        Raises:
            LockLostError: the lease was lost.
        """
        if not opened:
            self._end(error)
            return
        Kept(self._key, self._held, self._end).until(opened)
        if error is None:
            self._held.raise_if_lost()

    def _end(self, error: BaseException | None) -> None:
        self._stack.__exit__(type(error) if error is not None else None, error, None)


def runs_event_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _refuse_event_loop() -> None:
    if not runs_event_loop():
        return
    raise SynchronousOnlyOperation("`with lock(...)` would block the event loop of this thread: use `async with`")
