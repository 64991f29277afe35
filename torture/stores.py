"""The stores that are tormented: where each worker finds one, and what can happen to it."""

import asyncio
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self
from urllib.parse import quote

from tests.servers import found
from tests.servers.home import Home
from tests.servers.kubernetes import ADMIN, KubernetesServer
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import Proxy
from tests.servers.redis import DURABLE, FAST, RedisServer
from tests.servers.server import Server
from torture.hand import LEASES
from torture.log import Log, now


@dataclass(frozen=True, slots=True)
class Source:
    """Trouble of which one happens at a time."""

    troubles: Mapping[str, Callable[[], Awaitable[None]]]
    """By name; each is over when its call returns."""
    calm: tuple[float, float] = (1.0, 4.0)
    """Seconds between two, at least and at most."""


WAYS = 2
"""Workers whose ways to the server are in trouble at the same time, at most."""


def a_while(chance: Random) -> float:
    """Half a lease to two leases, in seconds."""
    return chance.uniform(0.5, 2.0) * chance.uniform(*LEASES)


class Store(ABC):
    """A store, from its start to its end."""

    @abstractmethod
    def url(self, slot: int) -> str:
        """Where the worker in a slot finds it."""

    def sources(self, log: Log, chance: Random) -> Sequence[Source]:
        """What can happen to it."""
        return ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class OutsideStore(Store):
    """One that runs already, and is left alone."""

    def __init__(self, url: str) -> None:
        self._url = url

    def url(self, slot: int) -> str:
        """Its URL."""
        return self._url


class SQLiteFile(Store):
    """A SQLite file; another process may lock it for a while."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "leases.db"

    def url(self, slot: int) -> str:
        """The file's URL."""
        return f"sqlite:///{self._path}"

    def sources(self, log: Log, chance: Random) -> Sequence[Source]:
        """Nobody can write to it for a while."""

        async def lock() -> None:
            await asyncio.to_thread(self._lock, a_while(chance))

        return [Source({"file locked": lock})]

    def _lock(self, seconds: float) -> None:
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=5.0)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:  # a worker that was stopped has it locked: that is trouble enough
                return
            time.sleep(seconds)
            connection.execute("ROLLBACK")


class ServerStore(Store):
    """A server of its own, which each worker reaches by a proxy of its own.

    Args:
        make: makes the server in a folder.
        slots: how many workers there are.
        forgets: whether it has lost everything when it is started again.
    """

    def __init__(self, make: Callable[[Home], Server], slots: int, *, forgets: bool = False) -> None:
        self._make = make
        self._slots = slots
        self._forgets = forgets
        self._stack = AsyncExitStack()
        self._server: Server
        self._proxies: list[Proxy] = []

    def url(self, slot: int) -> str:
        """The URL of the proxy of that slot."""
        return self._proxies[slot].url

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._server = self._make(stack.enter_context(Home()))
            stack.callback(self._end)
            await asyncio.to_thread(self._server.start)
            for _ in range(self._slots):
                self._proxies.append(await stack.enter_async_context(self._proxy()))
            self._stack = stack.pop_all()
        return self

    def _proxy(self) -> Proxy:
        return Proxy(self._server.url)

    def _end(self) -> None:
        self._server.kill()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def sources(self, log: Log, chance: Random) -> Sequence[Source]:
        """What happens to the server, and on the ways to it."""
        return [Source(self._troubles(log, chance)), *(_on_the_way(chance, self._proxies) for _ in range(WAYS))]

    def _troubles(self, log: Log, chance: Random) -> dict[str, Callable[[], Awaitable[None]]]:
        return _troubles_of("server", self._server, log, chance, forgets=self._forgets)


class KubernetesStore(ServerStore):
    """An API server of its own, and its etcd, which keeps every acknowledged write."""

    _server: KubernetesServer

    def __init__(self, slots: int) -> None:
        super().__init__(self._start, slots)

    def url(self, slot: int) -> str:
        """A URL whose kubeconfig has the address of the proxy of that slot."""
        kubeconfig = self._server.api.kubeconfig(ADMIN, address=self._proxies[slot].url)
        return f"kubernetes://default?kubeconfig={quote(str(kubeconfig), safe='')}"

    def _proxy(self) -> Proxy:
        return Proxy(self._server.api.address, self._server.api.trust)

    def _end(self) -> None:
        super()._end()
        self._server.etcd.kill()

    def _troubles(self, log: Log, chance: Random) -> dict[str, Callable[[], Awaitable[None]]]:
        return super()._troubles(log, chance) | _troubles_of("etcd", self._server.etcd, log, chance)

    @staticmethod
    def _start(home: Home) -> KubernetesServer:
        binaries = found.kubernetes_binaries()
        _first("kubernetes", binaries)
        return KubernetesServer(home, binaries, {})


def _troubles_of(
    name: str, server: Server, log: Log, chance: Random, *, forgets: bool = False
) -> dict[str, Callable[[], Awaitable[None]]]:
    """What happens to one server."""

    async def pause() -> None:
        await asyncio.to_thread(server.pause)
        await asyncio.sleep(a_while(chance))
        await asyncio.to_thread(server.resume)

    async def restart() -> None:
        began = now()
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        await asyncio.to_thread(server.start)
        log.write("restart", began, until=now(), forgets=forgets)

    return {f"{name} paused": pause, f"{name} restarted": restart}


def _on_the_way(chance: Random, proxies: list[Proxy]) -> Source:
    """What happens between one worker and its server."""

    async def drop() -> None:
        chance.choice(proxies).drop_reply(then=chance.choice(["reset", "silent"]))
        await asyncio.sleep(0.1)

    async def hold() -> None:
        held = chance.choice(proxies).hold_request()
        await asyncio.sleep(a_while(chance))
        held.release()

    async def delay() -> None:
        proxy = chance.choice(proxies)
        proxy.delay(requests=chance.uniform(0, 0.5), replies=chance.uniform(0, 0.5))
        await asyncio.sleep(a_while(chance))
        await proxy.heal()

    async def reset() -> None:
        chance.choice(proxies).reset()

    async def cut_off() -> None:
        proxy = chance.choice(proxies)
        proxy.black_hole()
        await asyncio.sleep(a_while(chance))
        await proxy.heal()

    troubles = {"reply lost": drop, "request held": hold, "delay": delay, "reset": reset, "black hole": cut_off}
    return Source(troubles, calm=(0.1, 1.0))


def redis(slots: int) -> Store:
    """A Redis server that keeps every acknowledged write."""
    return ServerStore(lambda home: RedisServer(home, _first("redis", found.redis_binaries()), DURABLE), slots)


def forgetful_redis(slots: int) -> Store:
    """A Redis server that keeps nothing over a restart."""
    return ServerStore(
        lambda home: RedisServer(home, _first("redis", found.redis_binaries()), FAST), slots, forgets=True
    )


def postgres(slots: int) -> Store:
    """A PostgreSQL server that keeps every commit."""
    return ServerStore(lambda home: PostgresServer(home, _first("postgres", found.postgres_binaries()), {}), slots)


SERVERS: Mapping[str, Callable[[int], Store]] = {
    "redis": redis,
    "redis-forgetful": forgetful_redis,
    "postgres": postgres,
    "kubernetes": KubernetesStore,
}


def store_of(given: str, folder: Path, slots: int) -> Store:
    """The store of a name or a URL.

    Raises:
        LookupError: there is none of that name, or no server program for it on this machine.
    """
    if given == "sqlite":
        return SQLiteFile(folder)
    if given in SERVERS:
        return SERVERS[given](slots)
    if "://" in given and not given.startswith("memory:"):
        return OutsideStore(given)
    raise LookupError(f"no store '{given}': give sqlite, {', '.join(SERVERS)}, or the URL of one that processes share")


def _first(kind: str, binaries: tuple[found.Binary, ...]) -> found.Binary:
    if not binaries:
        raise LookupError(f"no {kind} server here: {found.REMEDIES[kind]}")
    return binaries[0]
