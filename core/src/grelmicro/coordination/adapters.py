"""The backend protocols, each written once over any `LeaseStore`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

from grelmicro import lifecycle
from grelmicro.clock import Clock, sleep
from grelmicro.coordination.losses import why_lost
from grelmicro.coordination.passing import Offer
from grelmicro.coordination.queues import Queues
from grelmicro.coordination.renewal import Renewer
from grelmicro.errors import BackendUnavailableError, GrelmicroError, OutcomeUnknownError, OutOfContextError
from grelmicro.leases import InstantLeases, Lease, LeaseStore, PassingLeases, RaisingLeases, Scope, Waiter
from grelmicro.leases.fences import fences
from grelmicro.leases.outage import Outage
from grelmicro.leases.record import edit
from grelmicro.leases.unsent import changed_nothing
from grelmicro.lifecycle import Resource, end_or_leave, outlast

logger = logging.getLogger("grelmicro.coordination")

DRAIN_LIMIT = 5.0
"""Seconds for which closing waits for undos and repeated releases."""

ENDING = "ending "
"""Begins the names of tasks that undo an acquire, or repeat a release."""

NAMES = 3
"""Leases that the log names at most."""

FREEINGS = 3
"""How often an acquire frees what an earlier one of this process took, before it is refused all the same."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between the repetitions of an undo: doubled from the first to the longest."""


class LeaseAdapter(Resource):
    """Leases of one store, with the undo of what ended unknown.

    Args:
        store: where the leases are; it is opened and closed with the adapter.
    """

    worker = ""
    """The readable name of this process, if its app has one: see `Grelmicro.worker`."""

    def __init__(self, store: LeaseStore) -> None:
        self.move_to(store)
        self._void: dict[str, None] = {}  # holders of acquires that ended unknown, until their undo is done
        self._background: set[asyncio.Task[None]] = set()
        self._drained = False
        self._warned_of_copy = False

    def move_to(self, store: LeaseStore) -> None:
        """Have the leases in `store` from now on, for all who use this adapter. It must not be open."""
        self.store = store
        self.clock: Clock = store.clock
        # Records in the memory of this process cannot be replaced by an older copy.
        self._fences = None if isinstance(store, InstantLeases) else fences

    @property
    def outage(self) -> Outage:
        """The outage of the store, shared by all its users."""
        return self.store.outage

    @property
    def scope(self) -> Scope:
        """Who can share it."""
        return self.store.scope

    @property
    def notice(self) -> float:
        """Seconds until another process learns of a release."""
        return self.store.notice

    async def open(self) -> None:
        """Open the store."""
        self._drained = False
        await self.store.__aenter__()

    async def close(self) -> None:
        """Finish the undos, then close the store; a cancellation of the caller waits for that."""
        await outlast(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        try:
            await self._drain()
        finally:
            await self.store.__aexit__(None, None, None)
            if not self.store.is_open:
                self.store.outage.forget()

    def abandon(self) -> None:
        """Forget the undos of a loop that is gone; leases end by themselves."""
        self.store.outage.forget()
        self._background.clear()
        self._void.clear()

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """See `LeaseBackend.acquire`. No two grants of this process have the same fence."""
        self.check_open(name)
        tries = FREEINGS
        while True:
            least = 0
            try:
                lease = await self.store.acquire(name, holder, ttl, data=data, waiting=waiting)
                if self._fences is not None and (least := self._fences.see(self.store.place, lease, holder)):
                    raised = await self._raise_fence(lease, least)
                    if raised is None:  # it expired meanwhile, or is no more
                        continue
                    return raised
            except BaseException as error:
                if least or not changed_nothing(error):
                    self._void[holder] = None
                    self._in_background(name, self._undo(name, holder, ttl))
                if _unexplained(error):
                    raise _unknown(error, f"acquiring {name!r}, which is undone in the background,") from error
                raise
            if self.store.outage.is_on:
                self.store.outage.over(self.clock.now())
            if lease.holder not in self._void or not tries:
                return lease
            tries -= 1
            # Refused by what an earlier, unanswered request of this process took: nobody has that, so free it. Its
            # undo may do so in the same moment, and then the store may be unsure.
            with suppress(OutcomeUnknownError):
                await self.release(Lease(name, lease.holder, 0))

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """See `LeaseBackend.renew`."""
        self.check_open(lease.name)
        try:
            return await self.store.renew(lease, ttl, data=data)
        except (Exception, asyncio.CancelledError) as error:
            if _unexplained(error):
                raise _unknown(error, f"renewing {lease.name!r}") from error
            raise

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """See `LockBackend.renew_many`."""
        self.check_open()
        try:
            return await self.store.renew_many(renewals)
        except (Exception, asyncio.CancelledError) as error:
            if _unexplained(error):
                raise _unknown(error, f"renewing {len(renewals)} leases") from error
            raise

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseBackend.release`."""
        self.check_open(lease.name)
        try:
            return await self.store.release(lease, data=data)
        except BaseException as error:
            self._in_background(lease.name, self._release_again(lease, data, limit=lease.remaining, sure=False))
            if _unexplained(error):
                raise _unknown(error, f"releasing {lease.name!r}, which is repeated in the background,") from error
            raise

    def settle(self, lease: Lease, seconds: float = 0.0, *, data: Mapping[str, str] | None = None) -> None:
        """See `LeaseBackend.settle`."""
        if seconds > 0:
            self._in_background(lease.name, self._renew_again(lease, seconds, data))
        else:
            self._in_background(lease.name, self._release_again(lease, data, limit=lease.remaining, sure=False))

    async def read(self, name: str) -> Lease | None:
        """See `LeaseBackend.read`."""
        self.check_open(name)
        try:
            record = await self.store.read(name)
        except (Exception, asyncio.CancelledError) as error:
            if _unexplained(error):
                raise _unknown(error, f"reading {name!r}") from error
            raise
        if record is not None and self._fences is not None:
            self._fences.see(self.store.place, record)
        return record

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """See `LeaseBackend.watch`."""
        return self.store.watch(name)

    async def _raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """The lease under a fence of at least `least`; None if it is not held any more.

        Raises:
            BackendUnavailableError: the store cannot raise it.
        """
        if not self._warned_of_copy:
            self._warned_of_copy = True
            logger.warning(
                "%s granted %s under fence %d, which is not above those seen before: its records were replaced by an "
                "older copy, and fences that only other processes have seen may repeat",
                type(self.store).__name__,
                lease.name,
                lease.fence,
            )
        if not isinstance(self.store, RaisingLeases):
            raise BackendUnavailableError(
                f"acquiring {lease.name!r}: the store granted fence {lease.fence}, and {least - 1} was seen before: "
                "its records were replaced by an older copy; put back the newer one, or use another name"
            )
        raised = await self.store.raise_fence(lease, least)
        if raised is not None:
            fences.see(self.store.place, raised, raised.holder)
        return raised

    async def _undo(self, name: str, holder: str, ttl: float) -> None:
        try:
            await self._release_again(Lease(name, holder, 0), None, limit=ttl, sure=not self.store.ordered)
        finally:
            self._void.pop(holder, None)

    async def _release_again(self, lease: Lease, data: Mapping[str, str] | None, *, limit: float, sure: bool) -> None:
        """Repeat a release for `limit` seconds at most, until it is answered; with `sure`, until it found something.

        A "no" to an undo may be early: where requests can overtake each other, the acquire may still arrive.
        """

        async def release() -> bool:
            return await self.store.release(lease, data=data) or not sure

        await self._repeat(release, lease.name, limit)

    async def _renew_again(self, lease: Lease, seconds: float, data: Mapping[str, str] | None) -> None:
        """Repeat a renewal that shortens, until it is answered."""
        until = self.clock.now() + seconds

        async def renew() -> bool:
            await self.store.renew(lease, max(until - self.clock.now(), 0.001), data=data)
            return True

        await self._repeat(renew, lease.name, lease.remaining)

    async def _repeat(self, request: Callable[[], Awaitable[bool]], name: str, limit: float) -> None:
        """Repeat a request until it returns True, for `limit` seconds at most: then the lease has ended by itself."""
        until = self.clock.now() + limit
        pause = 0.0
        while True:
            try:
                with lifecycle.distinguish_cancellation():
                    if pause:
                        await sleep(self.clock, pause)
                    if await request() or self._drained:
                        return
            except OutOfContextError:  # it was closed
                return
            except asyncio.CancelledError:
                if self._drained:
                    raise
                until = min(until, self.clock.now() + DRAIN_LIMIT)  # the event loop ends, and waits for its tasks
            except Exception as error:
                logger.debug("ending %s is tried again: %s", name, error)
            pause = min(max(pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
            if self.clock.now() + pause >= until:
                return

    def _in_background(self, name: str, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=ENDING + name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _drain(self) -> None:
        """Wait for what goes on in the background and what begins there meanwhile, then end the rest."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_LIMIT
        while self._background and (left := until - loop.time()) > 0:
            with suppress(asyncio.CancelledError):  # the event loop ends, and waits for its tasks
                await asyncio.wait(self._background, timeout=left)
        self._drained = True
        if self._background:
            names = ", ".join(sorted({task.get_name().removeprefix(ENDING) for task in self._background})[:NAMES])
            logger.warning(
                "closing before %d releases were confirmed, such as of %s: the leases end by themselves",
                len(self._background),
                names,
            )
        await end_or_leave(set(self._background))
        self._void.clear()


class LockAdapter(LeaseAdapter):
    """`LockBackend` over a store: adds the lines of waiters, to whom leases are passed on, and the renewer."""

    def __init__(self, store: LeaseStore) -> None:
        super().__init__(store)
        self.queues = Queues()

    def move_to(self, store: LeaseStore) -> None:
        """See `LeaseAdapter.move_to`."""
        super().move_to(store)
        self._instant = store if isinstance(store, InstantLeases) else None
        self._passing = store if isinstance(store, PassingLeases) else None
        self.renewer = Renewer(self.clock, self.renew_many, store.outage, partial(why_lost, self))

    def instant(self, running: asyncio.AbstractEventLoop, name: str) -> InstantLeases | None:
        """See `LockBackend.instant`."""
        if self._loop is not running or self._generation is not lifecycle.generation:
            self.check_open(name)  # which says why not
        return self._instant

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """See `LeaseBackend.release`. The first who waits in this process gets it by the same request."""
        # An undo, which knows no fence, gives back what nobody had.
        if self._passing is not None and lease.fence and data is None:
            offer = self.queues.take_offer(lease.name)
            if offer is not None:
                self.check_open(lease.name)
                return await self._pass_on(self._passing, lease, offer)
        return await super().release(lease, data=data)

    async def _pass_on(self, store: PassingLeases, lease: Lease, offer: Offer) -> bool:
        """Release `lease` in favour of `offer`; whether it was held."""
        offer.begin(self.clock.now())
        passed: Lease | None = None
        try:
            passed = await store.pass_on(lease, offer.holder, offer.ttl)
        except BaseException as error:
            if not changed_nothing(error):
                self._void[offer.holder] = None
            self._in_background(lease.name, self._take_back(lease, offer))
            if _unexplained(error):
                raise _unknown(error, f"releasing {lease.name!r}, which is repeated in the background,") from error
            raise
        finally:
            repeated = passed is not None and bool(fences.see(self.store.place, passed, passed.holder))
            accepted = (
                offer.end(None if repeated else passed) and not repeated
            )  # a waiter without a lease asks the store
        if passed is not None and not accepted:
            self.settle(passed)
        await asyncio.sleep(0)  # who has it now goes on first
        return passed is not None

    async def _take_back(self, lease: Lease, offer: Offer) -> None:
        """Release `lease` on its own; and then, when nothing can be passed on any more, what may have been."""
        await self._release_again(lease, None, limit=lease.remaining, sure=False)
        if offer.holder in self._void:
            await self._undo(lease.name, offer.holder, offer.ttl)

    async def close(self) -> None:
        """Stop renewing, finish the undos, then close the store; a cancellation of the caller waits for that."""
        self.renewer.let_go()
        await super().close()

    async def _end(self) -> None:
        try:
            await self.renewer.close()
        finally:
            await super()._end()

    def abandon(self) -> None:
        """Forget waiters, renewals and undos of a loop that is gone."""
        super().abandon()
        self.queues.clear()
        self.renewer.abandon()


class LeaderElectionAdapter(LeaseAdapter):
    """`LeaderElectionBackend` over a store."""


class ScheduleAdapter(LeaseAdapter):
    """`ScheduleBackend` over a store: the last fire is data of a record."""

    async def claim(self, name: str, due: float) -> bool:
        """See `ScheduleBackend.claim`."""

        def fire(data: Mapping[str, str]) -> Mapping[str, str] | None:
            last = data.get("last_fired")
            return None if last is not None and float(last) >= due else {**data, "last_fired": repr(float(due))}

        return await edit(self, f"schedule:{name}", fire)

    async def last_fired(self, name: str) -> float | None:
        """See `ScheduleBackend.last_fired`."""
        record = await self.read(f"schedule:{name}")
        return None if record is None or "last_fired" not in record.data else float(record.data["last_fired"])


def _unexplained(error: BaseException) -> bool:
    """Whether it is an error of the client library that the store let through: the request may have happened.

    A cancellation is one, too, when something inside the library was cancelled and the running task was not.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, Exception) and not isinstance(error, GrelmicroError)


def _unknown(error: BaseException, action: str) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"{action} failed with {type(error).__name__}: check the store; the cause is attached")
