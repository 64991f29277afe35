"""Processes that wait for locks on Kubernetes, or hold them, and what tests want to know of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from time import monotonic

import pytest

from grelmicro.backends.hints import Hints
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.store import KubernetesStore
from grelmicro.clock import Clock
from grelmicro.coordination import Lock, LockHandle
from grelmicro.coordination.adapters import LeaseAdapter, LockAdapter
from grelmicro.coordination.wait import SAFETY_POLL
from grelmicro.testing import MovableClock
from tests.helpers.gateway import Gateway
from tests.helpers.worlds import eventually
from tests.servers.kubernetes import ADMIN, Namespace

LEASE = 3600.0
"""Seconds: if anything waited for its end, the test would hang."""

RETRY = 0.1
"""Seconds after which those poll who do not rely on the watch."""

PROMPT = SAFETY_POLL / 2
"""Seconds: a hand-over that takes less was not found by the poll of those who rely on the watch."""


def store_of(
    namespace: Namespace,
    gateway: Gateway | None = None,
    *,
    user: str = ADMIN,
    clock: Clock | None = None,
    request_timeout: float = 30.0,
) -> KubernetesStore:
    """The store of a process, which may reach the API server by way of a gateway."""
    kubeconfig = namespace.kubeconfig(user, gateway.address if gateway is not None else "")
    return KubernetesStore(Cluster.at(namespace.name, kubeconfig, request_timeout=request_timeout), clock=clock)


@pytest.fixture
async def gateway(kubernetes_namespace: Namespace) -> AsyncIterator[Gateway]:
    api = kubernetes_namespace.api
    async with Gateway(api.address, api.certificate) as gateway:
        yield gateway


@pytest.fixture
async def waiting_backend(kubernetes_namespace: Namespace, gateway: Gateway) -> AsyncIterator[LockAdapter]:
    """Of a process that waits, by way of the gateway."""
    async with LockAdapter(store_of(kubernetes_namespace, gateway)) as backend:
        yield backend


@pytest.fixture
async def holding_backend(kubernetes_namespace: Namespace) -> AsyncIterator[LockAdapter]:
    """Of a process that holds."""
    async with LockAdapter(store_of(kubernetes_namespace)) as backend:
        yield backend


def lock_on(backend: LockAdapter, name: str = "cart", lease: float = LEASE) -> Lock:
    return Lock(name, backend=backend, lease_duration=lease, retry_interval=RETRY)


def waiting_for(backend: LockAdapter, name: str = "cart") -> asyncio.Task[LockHandle]:
    return asyncio.create_task(lock_on(backend, name).acquire())


def hints_of(backend: LeaseAdapter) -> Hints:
    """What wakes those who wait in a process."""
    assert isinstance(backend.store, KubernetesStore)
    return backend.store._get_open().hints


def trusts(backend: LeaseAdapter) -> bool:
    """Whether a process relies on its watch."""
    return hints_of(backend).trusted


async def until_quiet(*gateways: Gateway, seconds: float = 2 * RETRY) -> None:
    """Until nothing has been asked for a while: who would poll has done so by then."""
    before, since = [gateway.calls.copy() for gateway in gateways], monotonic()
    while monotonic() < since + seconds:
        await asyncio.sleep(0.005)
        now = [gateway.calls.copy() for gateway in gateways]
        if now != before or any(gateway.busy for gateway in gateways):
            before, since = now, monotonic()


async def until_relied(backend: LockAdapter, gateway: Gateway) -> None:
    """Until a process waits, and relies on its watch."""
    await eventually(lambda: trusts(backend), "the watch is relied on")
    await until_quiet(gateway)


async def hand_over(held: LockHandle, waiting: "asyncio.Task[LockHandle]") -> float:
    """Seconds from a release until the next one has it."""
    begun = monotonic()
    await held.release()
    handle = await asyncio.wait_for(waiting, 30.0)
    took = monotonic() - begun
    await handle.release()
    return took


async def pass_by(clock: MovableClock, *gateways: Gateway, seconds: float) -> None:
    """Let `seconds` pass slowly enough for the server to answer in time."""
    for _ in range(round(seconds)):
        await clock.advance(1.0)
        await until_quiet(*gateways, seconds=0.005)


async def is_passed_on(held: LockHandle, waiting: "asyncio.Task[LockHandle]", gateway: Gateway) -> None:
    """A release is heard, and not polled for."""
    await until_quiet(gateway)
    before = gateway.calls.copy()
    begun = monotonic()
    await held.release()
    handle = await asyncio.wait_for(waiting, 30.0)
    assert monotonic() - begun < PROMPT
    assert gateway.calls - before == Counter(update=1)
    await handle.release()


def is_waiting(backend: LockAdapter) -> bool:
    """Whether somebody waits for a hint."""
    hints = hints_of(backend)
    return len(hints._unused) < len(hints._topics)
