"""Waiting on Kubernetes: woken by one watch, and taken by one request; without the right to watch, polled."""

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from random import Random
from time import monotonic

import pytest

from grelmicro.backends.hints import LONGEST_PAUSE
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases import Lease
from grelmicro.testing import MovableClock
from tests.helpers.gateway import Gateway
from tests.helpers.kubernetes_waiters import (
    LEASE,
    PROMPT,
    hand_over,
    is_passed_on,
    lock_on,
    pass_by,
    store_of,
    trusts,
    until_quiet,
    until_relied,
    waiting_for,
)
from tests.servers.kubernetes import GUEST, Namespace

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_release_elsewhere_is_heard_and_the_lease_taken_by_one_put(
    waiting_backend: LockAdapter, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    took = []
    for _ in range(15):
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        before = gateway.calls.copy()
        begun = monotonic()
        await held.release()
        handle = await asyncio.wait_for(waiting, 30.0)
        took.append(monotonic() - begun)
        assert gateway.calls - before == Counter(update=1)
        await handle.release()
    assert sorted(took)[7] < PROMPT, took


async def test_no_moment_of_a_release_is_missed(
    kubernetes_namespace: Namespace, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    """Each is released at another moment while its waiter asks, begins to watch, and asks again."""
    moments = Random(7)

    async def pass_on(turn: int) -> float:
        async with LockAdapter(store_of(kubernetes_namespace, gateway)) as waiting_backend:
            held = await lock_on(holding_backend, f"cart:{turn}").acquire()
            waiting = waiting_for(waiting_backend, f"cart:{turn}")
            await asyncio.sleep(moments.random() * 0.3)
            return await hand_over(held, waiting)

    for _ in range(6):
        took = await asyncio.gather(*(pass_on(turn) for turn in range(10)))
        assert max(took) < PROMPT, took


async def test_a_renewal_wakes_nobody_and_an_earlier_end_does(
    waiting_backend: LockAdapter, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    lease: Lease | None = await holding_backend.store.acquire("lock:cart", "somebody", LEASE)
    waiting = waiting_for(waiting_backend)
    await until_relied(waiting_backend, gateway)
    before = gateway.calls.copy()
    for _ in range(20):
        assert lease is not None
        lease = await holding_backend.store.renew(lease, LEASE)
    await until_quiet(gateway)
    assert gateway.calls == before
    begun = monotonic()
    assert lease is not None
    assert await holding_backend.store.renew(lease, 1.0) is not None
    handle = await asyncio.wait_for(waiting, 30.0)
    assert monotonic() - begun < PROMPT, "it ends in a second, and the waiting_backend has heard of it"
    await handle.release()


async def test_those_who_wait_in_several_processes_get_it_one_after_the_other(
    kubernetes_namespace: Namespace, gateway: Gateway
) -> None:
    inside, order = 0, []

    async def work(backend: LockAdapter, number: int) -> None:
        nonlocal inside
        async with lock_on(backend):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            order.append(number)
            inside -= 1

    async with AsyncExitStack() as stack:
        stores = [store_of(kubernetes_namespace, gateway) for _ in range(4)]
        backends = [await stack.enter_async_context(LockAdapter(store)) for store in stores]
        begun = monotonic()
        await asyncio.gather(*(work(backend, n) for n, backend in enumerate(backends) for _ in range(5)))
        assert Counter(order) == dict.fromkeys(range(4), 5)
        assert monotonic() - begun < 2 * PROMPT
        assert gateway.calls["watch"] == 4, "one each"


async def test_a_hundred_names_use_one_watch(
    waiting_backend: LockAdapter, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    names = [f"cart:{number}" for number in range(100)]
    held = await asyncio.gather(*(lock_on(holding_backend, name).acquire() for name in names))
    waiting = [waiting_for(waiting_backend, name) for name in names]
    await until_relied(waiting_backend, gateway)
    assert (gateway.watches, gateway.calls["watch"], gateway.calls["list"]) == (1, 1, 1)
    before = gateway.calls.copy()
    begun = monotonic()
    await asyncio.gather(*(handle.release() for handle in held))
    got = await asyncio.wait_for(asyncio.gather(*waiting), 30.0)
    assert monotonic() - begun < PROMPT
    assert gateway.calls - before == Counter(update=100)
    await asyncio.gather(*(handle.release() for handle in got))


@pytest.mark.parametrize("missing", ["list", "watch"])
async def test_without_a_right_waiters_poll_and_it_is_told_once(
    kubernetes_namespace: Namespace,
    holding_backend: LockAdapter,
    gateway: Gateway,
    caplog: pytest.LogCaptureFixture,
    missing: str,
) -> None:
    caplog.set_level(logging.WARNING)
    verbs = {"get", "create", "update", "list", "watch"}
    await asyncio.to_thread(kubernetes_namespace.allow, *(verbs - {missing}))
    clock = MovableClock()
    async with LockAdapter(store_of(kubernetes_namespace, gateway, user=GUEST, clock=clock)) as waiting_backend:
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await pass_by(clock, gateway, seconds=60)
        assert not trusts(waiting_backend)
        right = f"{missing} leases.coordination.k8s.io in namespace {kubernetes_namespace.name}"
        [told] = [text for text in caplog.messages if "they poll meanwhile" in text]
        assert right in told
        [role] = [text for text in caplog.messages if "kind: Role" in text]
        assert right in role
        assert '"watch"' in role
        assert gateway.calls["get"] >= 60, "it polls"
        await held.release()
        await pass_by(clock, gateway, seconds=2)
        await (await asyncio.wait_for(waiting, 30.0)).release()

        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await asyncio.to_thread(kubernetes_namespace.allow, *verbs)
        await pass_by(clock, gateway, seconds=LONGEST_PAUSE + 5)
        assert trusts(waiting_backend)
        await is_passed_on(held, waiting, gateway)


async def test_who_may_read_nothing_at_all_is_told_so(kubernetes_namespace: Namespace) -> None:
    async with LockAdapter(store_of(kubernetes_namespace, user=GUEST)) as waiting_backend:
        with pytest.raises(BackendUnavailableError, match="get leases.coordination.k8s.io"):
            await lock_on(waiting_backend).acquire()
