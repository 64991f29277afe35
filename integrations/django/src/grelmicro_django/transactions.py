"""Transactions of Django: which are open, and leases that are kept until they have ended.

A lock must outlive the commit that it guards: one that is released before lets the next holder read what is not
committed yet, and overwrite it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from grelmicro.coordination import ThreadLockHandle
from grelmicro.errors import GrelmicroError, OutOfContextError

logger = logging.getLogger("grelmicro.django")

DUMMY = "django.db.backends.dummy"
"""The engine that Django gives a project without databases."""


ATTRIBUTE = "_non_atomic_requests"
"""Where Django looks for the databases that a view excludes from `ATOMIC_REQUESTS`."""


class Held(Protocol):
    """A lease that is held."""

    def raise_if_lost(self) -> None: ...


def open_transactions() -> list[BaseDatabaseWrapper]:
    """The connections of this thread with an open transaction, but for those that `TestCase` opens around a test.

    A connection whose autocommit is off counts. None is opened for this.
    """
    return [connection for connection in connections.all(initialized_only=True) if _is_open(connection)]


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    if connection.in_atomic_block:
        return len(connection.atomic_blocks) > _around_tests(connection)
    return connection.connection is not None and not connection.autocommit


def _around_tests(connection: BaseDatabaseWrapper) -> int:
    """How many of the open blocks are those of `TestCase`, which are the outermost ones."""
    blocks: list[Any] = connection.atomic_blocks
    return next((index for index, block in enumerate(blocks) if not block._from_testcase), len(blocks))


def refuse_open_transactions(title: str, remedy: str) -> None:
    """Raise `OutOfContextError` if a transaction is open in this thread.

    Args:
        title: what would be acquired, for the error's text, such as `lock 'order:7'`.
        remedy: what to do instead, after a colon.
    """
    if opened := open_transactions():
        aliases = ", ".join(repr(connection.alias) for connection in opened)
        how = "an open transaction" if any(each.in_atomic_block for each in opened) else "a thread with autocommit off"
        raise OutOfContextError(
            f"{title} was asked for in {how} (database {aliases}), which would be committed after its release: {remedy}"
        )


async def arefuse_open_transactions(title: str, remedy: str, limit: float | None) -> None:
    """`refuse_open_transactions` for a coroutine, about the thread in which `sync_to_async` runs its queries.

    Args:
        title: what would be acquired, for the error's text.
        remedy: what to do instead, after a colon.
        limit: seconds to wait for that thread; None: no limit.

    Raises:
        OutOfContextError: a transaction is open there, or that thread was busy for all that time.
    """
    if all(settings["ENGINE"] == DUMMY for settings in connections.settings.values()):
        return
    try:
        async with asyncio.timeout(limit):
            await sync_to_async(refuse_open_transactions)(title, remedy)
    except TimeoutError as busy:
        raise OutOfContextError(
            f"{title}: the thread that runs this coroutine's queries was busy for {limit:g} s, so it is not known "
            "whether a transaction is open there: call coroutines by async_to_sync there, not by asyncio.run"
        ) from busy


class TakenOver(set[str]):
    """The databases that a view excludes from `ATOMIC_REQUESTS` itself. Django's handler finds every database in it."""

    def __contains__(self, alias: object) -> bool:
        return True

    def excludes(self, alias: str) -> bool:
        """Whether the view itself excludes this database."""
        return set.__contains__(self, alias)


def take_over_atomic_requests(view: Callable[..., Any], guarded: Callable[..., Any]) -> None:
    """Let `guarded`, which Django calls for `view`, open the transactions of `ATOMIC_REQUESTS` by `atomic_requests`.

    Where something inside `view` does so already, that does it.
    """
    own: Collection[str] = getattr(view, ATTRIBUTE, ())
    if not isinstance(own, TakenOver):
        vars(guarded)[ATTRIBUTE] = TakenOver(own)


def atomic_aliases(called: object) -> list[str]:
    """The databases whose transactions Django left to what it called for a request, in the order of their beginning."""
    taken = getattr(called, ATTRIBUTE, None)
    if not isinstance(taken, TakenOver):
        return []
    settings = connections.settings
    return [alias for alias in reversed(settings) if settings[alias]["ATOMIC_REQUESTS"] and not taken.excludes(alias)]


@contextmanager
def atomic_requests(aliases: Sequence[str], held: Held) -> Iterator[None]:
    """Open the transactions of these databases around a view that was taken over.

    Raises:
        LockLostError: the lease was lost, and the transactions are rolled back.
    """
    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(transaction.atomic(using=alias))
        yield
        held.raise_if_lost()


class Kept:
    """A lease whose block has ended, and which some transactions keep until all of them have ended."""

    def __init__(self, key: object, held: ThreadLockHandle, release: Callable[[BaseException | None], object]) -> None:
        self.key = key
        self.held = held
        self._release = release
        self._transactions: list[Ending] = []

    def until(self, opened: list[BaseDatabaseWrapper]) -> None:
        """Keep it until the transactions of these connections have ended."""
        for connection in opened:
            ending = Ending.of(connection)
            if ending not in self._transactions:
                self._transactions.append(ending)
                ending.kept.append(self)

    def leave(self, ending: "Ending", error: BaseException | None) -> None:
        """One of them has ended; the last one releases the lease. Raises what releasing raised."""
        self._transactions.remove(ending)
        if not self._transactions:
            self._release(error)


def find_kept(key: object) -> Kept | None:
    """The lease that an open transaction of this thread keeps."""
    for connection in open_transactions():
        for each in Ending.kept_by(connection):
            if each.key == key:
                return each
    return None


class Ending:
    """Sees the end of the outermost transaction of a connection.

    Django tells of a commit only, and its hooks must run under the lock. So the methods of this one connection by which
    a transaction ends are wrapped until it has.
    """

    WRAPPED = ("commit", "rollback", "set_autocommit", "close")
    ATTRIBUTE = "_grelmicro_ending"

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.kept: list[Kept] = []
        self._connection = connection
        self._committed = False
        # Where the code switched autocommit off, a block does not commit.
        self._by_hand = not connection.in_atomic_block or not connection.commit_on_exit
        if connection.in_atomic_block and (around := _around_tests(connection)):
            connection.atomic_blocks = _BlocksOfTest(connection.atomic_blocks, around, self)
        self._before = {name: vars(connection)[name] for name in self.WRAPPED if name in vars(connection)}
        self._wrapped = {name: self._wrap(name, getattr(connection, name)) for name in self.WRAPPED}
        vars(connection).update(self._wrapped)
        vars(connection)[self.ATTRIBUTE] = self

    @classmethod
    def of(cls, connection: BaseDatabaseWrapper) -> "Ending":
        """That of the transaction which is open now."""
        ending = vars(connection).get(cls.ATTRIBUTE)
        return ending if isinstance(ending, Ending) else cls(connection)

    @classmethod
    def kept_by(cls, connection: BaseDatabaseWrapper) -> list[Kept]:
        """What the transaction of a connection keeps."""
        ending = vars(connection).get(cls.ATTRIBUTE)
        return ending.kept if isinstance(ending, Ending) else []

    def end(self, error: BaseException | None = None) -> None:
        """The transaction has ended, and `error` is raised.

        Raises:
            GrelmicroError: it was committed, and a lease was lost meanwhile or could not be released.
        """
        attributes = vars(self._connection)
        if attributes.get(self.ATTRIBUTE) is not self:
            return
        del attributes[self.ATTRIBUTE]
        for name, wrapped in self._wrapped.items():
            if attributes.get(name) is wrapped:  # else it was wrapped again by other code
                del attributes[name]
                attributes.update({name: self._before[name]} if name in self._before else {})
        with ExitStack() as stack:
            for each in self.kept:
                stack.callback(self._release, each, error)

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if name == "commit" and not self._connection.in_atomic_block:
                self._check()
            try:
                result = method(*args, **options)
            except BaseException as error:
                self._called(name, error)
                raise
            self._called(name, None)
            return result

        return wrapped

    def _check(self) -> None:
        """Just before the commit: see that no lease is lost, or roll back.

        Raises:
            LockLostError: one is.
        """
        try:
            for each in self.kept:
                each.held.raise_if_lost()
        except GrelmicroError:
            try:
                self._connection.rollback()
            except DatabaseError:
                self._connection.close()
            raise

    def _called(self, name: str, error: BaseException | None) -> None:
        """A method has returned, or raised `error`: the transaction may have ended."""
        if name == "close":  # which rolls back
            self.end(error)
        elif not self._connection.in_atomic_block:
            if name == "commit":
                self._committed = error is None
            if name == "set_autocommit" or (self._by_hand and error is None):
                self.end(error)

    def _release(self, each: Kept, error: BaseException | None) -> None:
        try:
            each.leave(self, error)
        except GrelmicroError as failure:
            if self._committed:
                raise
            logger.warning("at the end of a transaction that was not committed: %s", failure)


class _BlocksOfTest(list[Any]):
    """The open blocks of a connection in a `TestCase`, whose transaction does not end with the outermost one inside."""

    def __init__(self, blocks: list[Any], around: int, ending: Ending) -> None:
        super().__init__(blocks)
        self._around = around
        self._ending = ending

    def pop(self, *args: Any) -> Any:
        """A block ends."""
        block = super().pop(*args)
        if len(self) == self._around:
            self._ending.end()
        return block
