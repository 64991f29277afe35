"""A store that suffers on command: requests and replies that are late, lost, refused or never answered."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar, cast

from grelmicro.errors import BackendUnavailableError
from grelmicro.leases import Lease, LeaseStore, Waiter

T = TypeVar("T")

Apply = Callable[[], Awaitable[object]]
Fault = Callable[[Apply], Awaitable[object]]
"""What becomes of one request; awaiting its argument lets the store carry it out."""


async def refused(apply: Apply) -> object:
    """The store fails, and says that it changed nothing."""
    raise BackendUnavailableError("the store is down")


async def request_lost(apply: Apply) -> object:
    """The connection breaks before the request arrives; the caller cannot know that."""
    raise ConnectionResetError("connection reset")


async def reply_lost(apply: Apply) -> object:
    """The request is carried out, and then the connection breaks."""
    await apply()
    raise ConnectionResetError("connection reset")


async def silence(apply: Apply) -> object:
    """Nothing arrives, and nothing comes back."""
    return await asyncio.Event().wait()


async def reply_never(apply: Apply) -> object:
    """The request is carried out, and nothing comes back."""
    await apply()
    return await asyncio.Event().wait()


def late(*, request: float = 0.0, reply: float = 0.0) -> Fault:
    """The request takes `request` real seconds to arrive, its reply takes `reply`."""

    async def fault(apply: Apply) -> object:
        await asyncio.sleep(request)
        answer = await apply()
        await asyncio.sleep(reply)
        return answer

    return fault


class Gate:
    """Holds requests, or with `after` their replies, until `open` is set; `arrived` is set when one is held."""

    def __init__(self, *, after: bool = False) -> None:
        self.arrived = asyncio.Event()
        self.open = asyncio.Event()
        self._after = after

    async def __call__(self, apply: Apply) -> object:
        answer = await apply() if self._after else None
        self.arrived.set()
        await self.open.wait()
        return answer if self._after else await apply()


class Overtaken:
    """The caller sees a broken connection, and the request arrives when `arrive` is called."""

    def __init__(self) -> None:
        self._apply: Apply | None = None

    async def __call__(self, apply: Apply) -> object:
        self._apply = apply
        raise ConnectionResetError("connection reset")

    async def arrive(self) -> object:
        """Let the store carry it out now."""
        assert self._apply is not None, "the request was not sent yet"
        return await self._apply()


SOON = 1e-9
"""Real seconds after which an answer comes with the next turn of the event loop: a longer sleep takes a millisecond."""


class TroubledStore(LeaseStore):
    """The store `inner`, reached over a connection that suffers what it is told to.

    `calls` counts the requests by operation.
    """

    scope = "host"
    resolution = 0.0
    ordered = True
    notice = 0.03

    def __init__(self, inner: LeaseStore) -> None:
        super().__init__(clock=inner.clock)
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self._next: dict[str, deque[Fault]] = {}
        self._until_healed: dict[str, Fault] = {}

    def suffer(self, operation: str, *faults: Fault) -> None:
        """The next requests of `operation` suffer `faults`, one each."""
        self._next.setdefault(operation, deque()).extend(faults)

    def break_down(self, fault: Fault, *operations: str) -> None:
        """All requests (of `operations`, if given) suffer `fault` until `heal`."""
        self._until_healed.update(dict.fromkeys(operations or ("*",), fault))

    def heal(self) -> None:
        """Suffer nothing any more."""
        self._until_healed.clear()
        self._next.clear()

    async def open(self) -> None:
        await self.inner.__aenter__()

    async def close(self) -> None:
        await self.inner.__aexit__(None, None, None)

    async def acquire(
        self, name: str, holder: str, ttl: float, *, data: Mapping[str, str] | None = None, waiting: bool = False
    ) -> Lease:
        return await self._send("acquire", lambda: self.inner.acquire(name, holder, ttl, data=data, waiting=waiting))

    async def renew(self, lease: Lease, ttl: float, *, data: Mapping[str, str] | None = None) -> Lease | None:
        return await self._send("renew", lambda: self.inner.renew(lease, ttl, data=data))

    async def renew_many(self, renewals: Sequence[tuple[Lease, float]]) -> list[Lease]:
        return await self._send("renew_many", lambda: self.inner.renew_many(renewals))

    async def release(self, lease: Lease, *, data: Mapping[str, str] | None = None) -> bool:
        return await self._send("release", lambda: self.inner.release(lease, data=data))

    async def read(self, name: str) -> Lease | None:
        return await self._send("read", lambda: self.inner.read(name))

    async def scan(self, prefix: str = "") -> AsyncIterator[Lease]:
        async for lease in self.inner.scan(prefix):
            yield lease

    def watch(self, name: str) -> AbstractAsyncContextManager[Waiter]:
        return self._watch(name)

    @asynccontextmanager
    async def _watch(self, name: str) -> AsyncIterator[Waiter]:
        async def nothing() -> None:
            return

        await self._send("watch", nothing)
        try:
            async with self.inner.watch(name) as waiter:
                yield waiter
        finally:
            await self._send("unwatch", nothing)

    async def _send(self, operation: str, apply: Callable[[], Awaitable[T]]) -> T:
        self.calls[operation] += 1
        waiting = self._next.get(operation)
        if waiting:
            fault: Fault | None = waiting.popleft()
        else:
            fault = self._until_healed.get(operation) or self._until_healed.get("*")
        return await apply() if fault is None else cast(T, await fault(apply))


class PassingStore(TroubledStore):
    """One that passes leases on; its inner store is one that answers at once, so that nobody comes in between."""

    async def pass_on(self, lease: Lease, holder: str, ttl: float) -> Lease | None:
        async def release_and_acquire() -> Lease | None:
            return await self.inner.acquire(lease.name, holder, ttl) if await self.inner.release(lease) else None

        return await self._send("pass_on", release_and_acquire)


class UnorderedStore(TroubledStore):
    """One whose requests can overtake each other, as they do over several connections."""

    ordered = False
