"""Elections of an application under test: this worker leads, or another one does."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from grelmicro import Grelmicro
from grelmicro.clock import SYSTEM_CLOCK
from grelmicro.config import Duration, in_seconds
from grelmicro.context import bind
from grelmicro.coordination import LeaderElection, LeaderRecord
from grelmicro.coordination.records import LEASE_DURATION
from grelmicro.coordination.threads import call
from grelmicro.errors import NotLeaderError
from grelmicro.leases import Lease
from grelmicro.leases.identity import mint
from grelmicro.lifecycle import outlast
from grelmicro.testing.aids import check_entered

T = TypeVar("T")


def leads(micro: Grelmicro, leader: LeaderElection, *, timeout: Duration = 5.0) -> "LeaderBlock":
    """Let this worker lead while the block runs.

        with TestClient(app) as client, leads(micro, leader):
            assert client.post("/reports").status_code == 200

    An election that runs is waited for, and one that does not runs for the block. `with` works in every thread but that
    of the event loop on which the app is open, and `async with` on that loop. Both give the record of the term.

    Args:
        micro: the app under test; it must be open when the block is entered.
        leader: its election.
        timeout: real seconds to wait for leadership.
    """
    return _Leads(micro, leader, in_seconds(timeout))


def leads_elsewhere(
    micro: Grelmicro,
    leader: LeaderElection,
    *,
    metadata: Mapping[str, str] | None = None,
    timeout: Duration = 5.0,
    lease_duration: Duration = 60.0,
) -> "LeaderBlock":
    """Let another worker lead while the block runs, so that this one follows.

        with TestClient(app) as client, leads_elsewhere(micro, leader):
            assert client.post("/reports").status_code == 503

    If this worker leads, it loses its term as if it had been paused for too long: its work is cancelled. After the
    block it may lead again at once. `with` works in every thread but that of the event loop on which the app is open,
    and `async with` on that loop. Both give the other worker's record.

    Args:
        micro: the app under test; it must be open when the block is entered.
        leader: its election, which may run or not.
        metadata: what the other worker attached to its leadership.
        timeout: real seconds to wait until this worker knows of it.
        lease_duration: seconds after which the other worker does not lead any more, as if it had died.
    """
    duration = float(in_seconds(lease_duration))
    data = {**(metadata or {}), LEASE_DURATION: repr(duration)}
    return _LeadsElsewhere(micro, leader, in_seconds(timeout), duration, data)


class LeaderBlock(ABC):
    """What `leads` and `leads_elsewhere` return.

    Entering it raises `NotLeaderError` when `leads` does not come to lead within the timeout, `TimeoutError` when this
    worker's election does not notice the other leader within it, and `OutOfContextError` when the app is not open or
    the form is not the one for this thread.
    """

    _title: str
    """For texts."""

    def __init__(self, micro: Grelmicro, leader: LeaderElection, timeout: float) -> None:
        self._micro = micro
        self._leader = leader
        self._timeout = timeout

    def __enter__(self) -> LeaderRecord:
        check_entered(self._micro, self._title)
        return call(self._micro.get_loop(), self._in_app(self._enter))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        call(self._micro.get_loop(), self._in_app(self._end), finish=True)

    async def __aenter__(self) -> LeaderRecord:
        check_entered(self._micro, self._title)
        self._micro.check_open()
        return await asyncio.create_task(self._in_app(self._enter))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await outlast(asyncio.create_task(self._in_app(self._end)))

    async def _in_app(self, step: Callable[[], Coroutine[Any, Any, T]]) -> T:
        bind(self._micro)  # in a task of its own, so nobody else's context changes
        return await step()

    async def _enter(self) -> LeaderRecord:
        try:
            return await self._begin()
        except BaseException:
            await self._end()
            raise

    @abstractmethod
    async def _begin(self) -> LeaderRecord: ...

    @abstractmethod
    async def _end(self) -> None: ...


class _Leads(LeaderBlock):
    _title = "leads()"
    _running: asyncio.Task[None] | None = None

    async def _begin(self) -> LeaderRecord:
        if not self._leader.is_running():
            self._running = asyncio.create_task(self._leader(), name=f"grelmicro-election-{self._leader.name}")
        try:
            async with asyncio.timeout(self._timeout):
                await self._leader.wait_for_leader()
        except TimeoutError:
            raise NotLeaderError(
                f"leads(): this worker did not come to lead '{self._leader.name}' within {self._timeout:g} s: "
                "another one does"
            ) from None
        return self._leader.guard()

    async def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait({running})


class _LeadsElsewhere(LeaderBlock):
    _title = "leads_elsewhere()"

    def __init__(
        self, micro: Grelmicro, leader: LeaderElection, timeout: float, duration: float, data: Mapping[str, str]
    ) -> None:
        super().__init__(micro, leader, timeout)
        self._duration = duration
        self._data = data
        self._key = f"leader:{leader.name}"
        self._lease: Lease | None = None

    async def _begin(self) -> LeaderRecord:
        try:
            async with asyncio.timeout(self._timeout):
                lease = self._lease = await self._take()
                self._leader._standing.resign("another worker leads: leads_elsewhere()")
                await self._until_known(lease.fence)
        except TimeoutError:
            raise TimeoutError(
                f"leads_elsewhere(): the election '{self._leader.name}' did not notice the other leader within "
                f"{self._timeout:g} s: work that does not end when it is cancelled keeps it"
            ) from None
        return LeaderRecord.of(lease)

    async def _take(self) -> Lease:
        """Take the lease from whoever has it."""
        backend, holder = self._leader.backend, f"elsewhere:{mint()}"
        while not (lease := await backend.acquire(self._key, holder, self._duration, data=self._data)).granted_to(
            holder
        ):
            await backend.release(Lease(self._key, lease.holder, lease.fence))
        return lease

    async def _until_known(self, fence: int) -> None:
        leader = self._leader
        while leader.is_running() and (leader.record is None or leader.record.fence < fence):
            await leader._standing.changed.wait(SYSTEM_CLOCK)

    async def _end(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._leader.backend.release(lease)
