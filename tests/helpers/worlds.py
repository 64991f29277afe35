"""The same leases as several clients see them, on each kind of store; and waiting for what happens soon."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic
from urllib.parse import urlsplit

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.backends.sqlite import SQLiteStore
from grelmicro.clock import SYSTEM_CLOCK, Clock
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.component import PROVIDERS
from grelmicro.coordination.provider import Provider
from grelmicro.leases import LeaseStore
from grelmicro.testing.clock import MovableClock
from tests.helpers.matrix import further
from tests.helpers.stores import TroubledStore, UnorderedStore
from tests.servers.kubernetes import kubeconfig_of

KINDS = ("memory", "sqlite")

SERVED = {"redis": "redis", "postgresql": "postgres", "kubernetes": "kubernetes"}
"""The kinds of stores on servers, with the schemes of their URLs."""

REAL_KINDS = (*KINDS, *(SERVED[scheme] for scheme in SERVED if scheme in PROVIDERS))

PATIENCE = 10.0
"""Real seconds after which something that should happen soon counts as never; the machine may be busy."""


class World:
    """One set of leases. Each call of `store` gives another client's view of it."""

    def __init__(self, kind: str, folder: Path, clock: Clock, url: str = "", namespace: str = "") -> None:
        self.kind = kind
        self.url = url
        self.namespace = namespace
        self.clock = clock
        self.path = folder / "locks.db"
        self._memory = MemoryStore(clock=clock)

    def store(self) -> LeaseStore:
        """A healthy client's store."""
        if self.kind == "memory":
            return self._memory
        if self.kind == "sqlite":
            return SQLiteStore(self.path, clock=self.clock)
        if self.kind == "kubernetes":  # which counts the time of leases on its own clock
            namespace, kubeconfig = urlsplit(self.url).netloc, kubeconfig_of(self.url)
            made: Provider = resolve_name(PROVIDERS[self.kind])(
                namespace, kubeconfig=kubeconfig, prefix=self.namespace, clock=self.clock
            )
            return made.store
        scheme = self.url.partition("://")[0]
        provider: Provider = resolve_name(PROVIDERS[scheme]).from_url(self.url, namespace=self.namespace)
        return provider.store

    def client(self) -> LockAdapter:
        """A healthy client."""
        return LockAdapter(self.store())

    def troubled(self, *, ordered: bool = True) -> TroubledStore:
        """The store of a client with a bad connection."""
        store = self.store()
        return (TroubledStore if ordered and store.ordered else UnorderedStore)(store)


@pytest.fixture
def clock() -> MovableClock:
    """The time of `world`."""
    return MovableClock()


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path: Path, clock: MovableClock, nothing_left: None) -> World:
    """Leases on each kind of store, under a clock that the test moves."""
    return a_world(request, tmp_path, clock)


@pytest.fixture(params=REAL_KINDS)
def real_world(request: pytest.FixtureRequest, tmp_path: Path, namespace: str, nothing_left: None) -> World:
    """Leases on each kind of store, in real time."""
    return a_world(request, tmp_path, SYSTEM_CLOCK, namespace)


@pytest.fixture(params=[*KINDS, *further(*REAL_KINDS[len(KINDS) :])])
def matrix_world(request: pytest.FixtureRequest, tmp_path: Path, namespace: str, nothing_left: None) -> World:
    """The same for a matrix of many cases, of which `make test` runs those without a server."""
    return a_world(request, tmp_path, SYSTEM_CLOCK, namespace)


def a_world(request: pytest.FixtureRequest, folder: Path, clock: Clock, namespace: str = "grelmicro") -> World:
    """Leases on the kind of store that is asked for."""
    kind = request.param
    place = "kubernetes_namespace" if kind == "kubernetes" else f"{kind}_server"
    url = request.getfixturevalue(place).url if kind in SERVED.values() else ""
    return World(kind, folder, clock, url, namespace)


@pytest.fixture
async def nothing_left() -> AsyncIterator[None]:
    """The test leaves no task behind, and no callback of its event loop fails."""
    loop = asyncio.get_running_loop()
    failed: list[dict[str, object]] = []
    loop.set_exception_handler(lambda _, context: failed.append(context))
    before = asyncio.all_tasks()
    yield
    await eventually(lambda: not asyncio.all_tasks() - before - {asyncio.current_task()}, "every task has ended", 2.0)
    loop.set_exception_handler(None)  # what is found later is logged, which fails the test: see `heap.py`
    assert failed == [], failed


async def eventually(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait in real time until `condition` holds."""
    until = monotonic() + patience
    while not condition():
        assert monotonic() < until, f"not within {patience:g} s: {what}"
        await asyncio.sleep(0.002)


async def pass_by(clock: MovableClock, client: LockAdapter, seconds: float, *, step: float = 0.5) -> None:
    """Let `seconds` pass slowly enough for the store to answer in time."""
    for _ in range(round(seconds / step)):
        await clock.advance(step)
        if renewals := set(client.renewer._calls.values()):
            await asyncio.wait(renewals, timeout=0.05)
