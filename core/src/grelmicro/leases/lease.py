"""The one record that everything is built on, and what a store of such records must do."""

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol, runtime_checkable

from grelmicro.clock import SYSTEM_CLOCK, Clock, Signal, expect
from grelmicro.config import check_namespace
from grelmicro.errors import OutcomeUnknownError
from grelmicro.leases.identity import process_of, worker_of
from grelmicro.leases.outage import Outage
from grelmicro.lifecycle import Resource, carry_out

logger = logging.getLogger("grelmicro.coordination")

NO_DATA: Mapping[str, str] = MappingProxyType({})

CLOSE_LIMIT = 5.0
"""Seconds within which a store must close."""

Scope = Literal["process", "host", "cluster"]
"""Who can share a store: the tasks of one process, the processes of one host, or all hosts."""


@dataclass(slots=True)
class Lease:
    """A right that ends by itself. Treat it as immutable: it is not frozen only because that makes it slow to build."""

    name: str
    holder: str = field(repr=False)  # it proves ownership, and a repr ends in logs
    """Who has it; `""` when it is free."""
    fence: int
    """Grows by one at each change from free to held; never repeats or falls for a name."""
    transitions: int = 0
    """How often the holder changed."""
    acquired_at: float = 0.0
    """Seconds since 1970 by the store, for display."""
    renewed_at: float = 0.0
    """Seconds since 1970 by the store, for display."""
    expires_at: float = 0.0
    """Seconds on the store's own clock: only `expires_at - now` has meaning to a caller."""
    now: float = 0.0
    """The store's clock when it answered."""
    data: Mapping[str, str] = field(default_factory=lambda: NO_DATA)
    waited: bool = False
    """Another process waits for it (as far as the store knows)."""

    @property
    def worker(self) -> str:
        """The readable name of the worker that has it; `""` when it is free. It proves nothing, so it can be shown."""
        return worker_of(self.name, self.holder)

    @property
    def process(self) -> str:
        """The public id of the process which has it, `process:{id}` is that process's record; `""` if not known."""
        return process_of(self.holder)

    @property
    def live(self) -> bool:
        """Held and not expired when the store answered; at the very instant of expiry it is still live."""
        return self.holder != "" and self.expires_at >= self.now

    @property
    def remaining(self) -> float:
        """Seconds until it expires, counted from the store's answer; 0.0 when it is not live."""
        return max(self.expires_at - self.now, 0.0) if self.holder else 0.0

    def granted_to(self, holder: str) -> bool:
        """Whether this answer of `acquire` is a grant to `holder`."""
        return self.holder == holder and self.expires_at >= self.now


class Waiter:
    """A subscription to hints about one name. This one has no hints and sleeps."""

    @property
    def pushes(self) -> bool:
        """Whether hints come at present; where they do not, one asks the store now and then."""
        return False

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._woken = Signal()

    async def wait(self, timeout: float) -> bool:
        """Wait for a hint, at most `timeout` seconds; whether one came. A hint proves nothing: ask the store."""
        return await self._woken.wait(self._clock, timeout)

    def wake(self) -> None:
        """End the present wait, as a hint does."""
        self._woken.send()


class SignalWaiter(Waiter):
    """A subscription to a signal: what was sent since it was made, or since the last wait, is not missed."""

    def __init__(self, signal: Signal, clock: Clock) -> None:
        super().__init__(clock)
        self._signal = signal
        self._next = signal.subscribe()

    @property
    def pushes(self) -> bool:
        """Whether hints come at present."""
        return True

    async def wait(self, timeout: float) -> bool:
        """Wait for a hint, at most `timeout` seconds; whether one came."""
        came = await expect(self._next, self._clock, timeout)
        self.close()
        self._next = self._signal.subscribe()
        return came

    def wake(self) -> None:
        """End the present wait, as a hint does."""
        if not self._next.done():
            self._next.set_result(True)

    def close(self) -> None:
        """End the subscription."""
        self._signal.unsubscribe(self._next)


class LeaseStore(Resource, ABC):
    """Where leases are kept. A backend's author writes `acquire`, `renew`, `release`, `read` and `scan`.

    Each operation is atomic, judges expiry by the store's own clock when it is carried out, and ends in bounded time.
    It raises `BackendUnavailableError` only when it *knows* that it changed nothing. Any other error of `acquire` is
    taken as "may have happened" and is undone by the caller of the store.

    Args:
        namespace: separates applications that share one store; 1 to 63 letters, digits, `_`, `-` or `.`.
        clock: the time of deadlines in this process; tests move it.
    """

    scope: ClassVar[Scope] = "cluster"
    """Who can share it: the tasks of one process, the processes of one host, or all hosts."""
    resolution: ClassVar[float] = 0.001
    """The shortest lease that is kept exactly, in seconds; shorter ones are rounded up to it."""
    ordered: ClassVar[bool] = False
    """Requests take effect in the order in which this process sent them, so an undo comes after what it undoes."""
    notice: float = 0.0
    """Seconds until another process learns of a release: a process that yields to others waits this long."""

    def __init__(self, *, namespace: str = "grelmicro", clock: Clock | None = None) -> None:
        self.namespace = check_namespace(namespace)
        self.clock = clock or SYSTEM_CLOCK
        self.place: Hashable = object()
        """Where the records are: stores whose places are equal have the same ones."""
        self.outage = Outage(type(self).__name__, logger, emits=True)
        """The trouble that its users in this process have with it. Its title is what the log calls the store."""

    async def _end_use(self) -> None:
        """Close it; neither cut short by a cancellation of the caller, nor for longer than `CLOSE_LIMIT`."""
        await carry_out(self.close(), CLOSE_LIMIT, f"closing {self._title()}")

    @abstractmethod
    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        """Take the lease for `ttl` seconds if it is free or expired, and return the record in any case.

        It is a grant when the record is live and held by `holder`. One's own live lease is extended under the same
        fence. A refusal tells for how long. `data` replaces the record's on a grant (None keeps it). `waiting` marks,
        in the same atomic step, that the caller will wait if it is refused.
        """

    @abstractmethod
    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        """Let it end `ttl` seconds from now, while it is held and unexpired under that fence; else None.

        It never takes the lease again. It may shorten, and wakes waiters then as a release does.
        """

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        """Renew each lease by its ttl; the survivors. A store that can do it in one call, or at once, overrides this.

        Raises:
            PartlyRenewedError: some requests failed, and others did not.
        """
        answers: list[Lease | BaseException | None] = []
        for lease, ttl in renewals:
            try:
                answers.append(await self.renew(lease, ttl))
            except Exception as error:
                answers.append(error)
        return survivors_of(renewals, answers)

    @abstractmethod
    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        """Vacate it in place and wake waiters, if it is live under that holder and fence; whether it was.

        Fence, transitions and data stay; `data` replaces the record's (None keeps it). With fence 0 the fence is
        unknown (an undo), and name and holder decide.
        """

    @abstractmethod
    async def read(self, name: str) -> Lease | None:
        """The record, live or not; None when there is none."""

    @abstractmethod
    def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        """The records whose name begins with `prefix`, in the order of their names."""

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        """Subscribe to hints about `name`: from entry on, no release is missed. The base class polls."""
        return _polling(self.clock)


class PartlyRenewedError(OutcomeUnknownError):
    """Of several renewals some failed, for the reason that is attached."""

    def __init__(self, survivors: list[Lease], failed: list[Lease]) -> None:
        super().__init__(f"{len(failed)} of several renewals failed, such as that of {failed[0].name!r}")
        self.survivors = survivors
        """What was renewed."""
        self.failed = failed
        """What may have been, as it was before. Whatever is in neither list is lost."""


def survivors_of(
    renewals: Sequence[tuple[Lease, float]], answers: Sequence[Lease | BaseException | None]
) -> list[Lease]:
    """What `renew_many` returns, or raises, when the renewals had these answers."""
    survivors = [answer for answer in answers if isinstance(answer, Lease)]
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if failures and not survivors:
        raise failures[0]
    if failures:
        failed = [
            lease for (lease, _), answer in zip(renewals, answers, strict=True) if isinstance(answer, BaseException)
        ]
        raise PartlyRenewedError(survivors, failed) from failures[0]
    return survivors


@runtime_checkable
class InstantLeases(Protocol):
    """What a store offers besides that never waits: the same operations as plain calls, for uncontended locks.

    Its records tell the time of the store's `clock`.
    """

    def acquire_now(self, name: str, holder: str, ttl: float) -> Lease:
        """See `LeaseStore.acquire`."""

    def release_now(self, lease: Lease) -> bool:
        """See `LeaseStore.release`."""


@runtime_checkable
class PassingLeases(Protocol):
    """What a store offers besides that gives a lease back and to the next holder in one request."""

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        """What `release` of `lease` and `acquire` for `holder` do, with nobody in between; None if it was not held.

        It wakes nobody. Errors mean what those of `acquire` mean: raised as unknown, both may have happened.
        """


@runtime_checkable
class RaisingLeases(Protocol):
    """What a store offers besides whose records can be replaced by an older copy, in which fences are lower."""

    async def raise_fence(self, lease: Lease, least: int) -> Lease | None:
        """Give a lease that is held and unexpired under its fence one of at least `least`; None if it was not held.

        Errors mean what those of `renew` mean.
        """


@runtime_checkable
class DroppingLeases(Protocol):
    """What a store offers besides that keeps free records for good: it can drop one on request."""

    async def drop(self, name: str) -> bool:
        """Drop the record, whatever it says, if there is one; False where the store does not allow that."""


@asynccontextmanager
async def _polling(clock: Clock) -> AsyncIterator[Waiter]:
    yield Waiter(clock)
