"""The watch of Kubernetes: it goes on through what API servers and networks do to it."""

import asyncio
import json
import urllib.request
from collections.abc import Callable
from time import monotonic

import pytest

from grelmicro.backends.hints import LONGEST_PAUSE, TEST_INTERVAL
from grelmicro.backends.kubernetes.names import hints_name
from grelmicro.coordination import LockHandle
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.wait import SAFETY_POLL
from grelmicro.errors import BackendUnavailableError
from grelmicro.testing import MovableClock
from tests.helpers.gateway import Gateway
from tests.helpers.kubernetes_waiters import (
    PROMPT,
    hand_over,
    is_passed_on,
    is_waiting,
    lock_on,
    pass_by,
    store_of,
    trusts,
    until_quiet,
    until_relied,
    waiting_for,
)
from tests.helpers.matrix import further
from tests.helpers.worlds import eventually
from tests.servers.fixtures import StartKubernetes
from tests.servers.kubernetes import KubernetesServer, Namespace

pytestmark = pytest.mark.usefixtures("nothing_left")

ECHO = hints_name("grelmicro")


async def test_a_watch_that_the_server_ends_goes_on(
    waiting_backend: LockAdapter, holding_backend: LockAdapter, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    held = await lock_on(holding_backend).acquire()
    waiting = waiting_for(waiting_backend)
    await until_relied(waiting_backend, gateway)
    await asyncio.sleep(1.1)  # one that ends sooner counts as broken
    gateway.end_watches(hold=True)
    await eventually(lambda: gateway.calls["watch"] == 2, "it watches again")
    assert trusts(waiting_backend)
    await held.release()  # nobody tells now
    gateway.heal()
    await (await asyncio.wait_for(waiting, PROMPT)).release()
    held = await lock_on(holding_backend).acquire()
    await is_passed_on(held, waiting_for(waiting_backend), gateway)
    assert gateway.calls["list"] == 1
    assert caplog.text == ""


@pytest.mark.xdist_group("kubernetes")
async def test_a_watch_whose_version_is_forgotten_begins_anew(
    start_kubernetes: StartKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_kubernetes(watch_cache="false")
    namespace = server.api.namespace()
    async with (
        Gateway(server.api.address, server.api.certificate) as gateway,
        LockAdapter(store_of(namespace)) as holding_backend,
        LockAdapter(store_of(namespace, gateway)) as waiting_backend,
    ):
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        await asyncio.sleep(1.1)
        gateway.end_watches(hold=True)
        await eventually(lambda: gateway.calls["watch"] == 2, "it watches again")
        await held.release()
        await asyncio.to_thread(compact, server, namespace)
        gateway.heal()
        await (await asyncio.wait_for(waiting, PROMPT)).release()
        assert gateway.calls["list"] == 2, "it was told that it is too old"
        held = await lock_on(holding_backend).acquire()
        await is_passed_on(held, waiting_for(waiting_backend), gateway)
    assert caplog.text == "", "that is how Kubernetes works"


def compact(server: KubernetesServer, namespace: Namespace) -> None:
    """Let etcd forget everything but what is now."""
    version = namespace.create({"metadata": {"name": "newest"}})["metadata"]["resourceVersion"]
    request = urllib.request.Request(
        f"{server.etcd.url}/v3/kv/compaction", json.dumps({"revision": version, "physical": True}).encode()
    )
    with urllib.request.urlopen(request):
        pass


async def test_a_watch_whose_connection_breaks_is_made_anew(
    waiting_backend: LockAdapter, holding_backend: LockAdapter, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        gateway.break_watches()
        assert await hand_over(held, waiting) < PROMPT
    held = await lock_on(holding_backend).acquire()
    waiting = waiting_for(waiting_backend)
    await until_relied(waiting_backend, gateway)
    await is_passed_on(held, waiting, gateway)
    assert caplog.text == "", "each is made anew at once"


async def test_a_watch_that_falls_silent_is_found_out(
    kubernetes_namespace: Namespace, holding_backend: LockAdapter, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovableClock()
    async with LockAdapter(store_of(kubernetes_namespace, gateway, clock=clock)) as waiting_backend:
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        gateway.swallow()
        await held.extend()
        await pass_by(clock, gateway, seconds=2 * TEST_INTERVAL)
        assert not trusts(waiting_backend)
        assert caplog.text.count("they poll meanwhile") == 1
        gateway.heal()
        await pass_by(clock, gateway, seconds=LONGEST_PAUSE + 5)
        assert trusts(waiting_backend)
        await is_passed_on(held, waiting, gateway)


async def test_a_release_that_a_silent_watch_hides_costs_one_poll(
    kubernetes_namespace: Namespace, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    clock = MovableClock()
    async with LockAdapter(store_of(kubernetes_namespace, gateway, clock=clock)) as waiting_backend:
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        gateway.swallow()
        await held.release()
        await until_quiet(gateway)
        assert not waiting.done()
        await pass_by(clock, gateway, seconds=SAFETY_POLL + 1)
        await (await asyncio.wait_for(waiting, 30.0)).release()


async def test_the_lease_for_tests_may_be_deleted(
    kubernetes_namespace: Namespace, holding_backend: LockAdapter, gateway: Gateway
) -> None:
    clock = MovableClock()
    async with LockAdapter(store_of(kubernetes_namespace, gateway, clock=clock)) as waiting_backend:
        held = await lock_on(holding_backend).acquire()
        waiting = waiting_for(waiting_backend)
        await until_relied(waiting_backend, gateway)
        for _ in range(2):
            await asyncio.to_thread(kubernetes_namespace.delete, ECHO)
            await pass_by(clock, gateway, seconds=3 * TEST_INTERVAL)
            assert trusts(waiting_backend)
            assert kubernetes_namespace.lease(ECHO) is not None
        assert gateway.calls["watch"] == 1
        await is_passed_on(held, waiting, gateway)


# Outages


async def persist(backend: LockAdapter, failures: list[Exception]) -> LockHandle:
    """Wait for the lock as a service does: whatever happens to the server, it tries again."""
    while True:
        try:
            return await lock_on(backend).acquire()
        except BackendUnavailableError as error:
            failures.append(error)
            await asyncio.sleep(0.1)


OUTAGES: dict[str, tuple[Callable[[KubernetesServer], None], Callable[[KubernetesServer], None]]] = {
    "it is paused": (KubernetesServer.pause, KubernetesServer.resume),
    "it is killed": (KubernetesServer.kill, KubernetesServer.start),
    "its etcd is paused": (lambda server: server.etcd.pause(), lambda server: server.etcd.resume()),
    "its etcd is killed": (lambda server: server.etcd.kill(), lambda server: server.etcd.start()),
}
"""What happens to an API server, and how it ends."""


@pytest.mark.slow
@pytest.mark.xdist_group("kubernetes")
@pytest.mark.parametrize("what", ["it is paused", "its etcd is killed", *further("it is killed", "its etcd is paused")])
async def test_an_outage_ends_for_those_who_wait(
    start_kubernetes: StartKubernetes, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin, end = OUTAGES[what]
    server = start_kubernetes()
    namespace = server.api.namespace()
    clock = MovableClock()
    failures: list[Exception] = []
    async with (
        Gateway(server.api.address, server.api.certificate) as gateway,
        LockAdapter(store_of(namespace, request_timeout=2.0)) as holding_backend,
        LockAdapter(store_of(namespace, gateway, clock=clock, request_timeout=2.0)) as waiting_backend,
    ):
        held = await lock_on(holding_backend).acquire()
        waiting = asyncio.create_task(persist(waiting_backend, failures))
        await until_relied(waiting_backend, gateway)
        await asyncio.to_thread(begin, server)
        await until(lambda: len(failures) >= 2, clock)
        await asyncio.to_thread(end, server)
        told = len(failures)
        await until(lambda: trusts(waiting_backend) and is_waiting(waiting_backend), clock)
        assert len(failures) <= told + 5
        await is_passed_on(held, waiting, gateway)
    assert caplog.text.count("has trouble") == caplog.text.count("works again") <= 1


async def until(condition: Callable[[], object], clock: MovableClock, patience: float = 45.0) -> None:
    """Until it is so, while time passes ten times as fast."""
    until = monotonic() + patience
    while not condition():
        assert monotonic() < until
        await clock.advance(0.5)
        await asyncio.sleep(0.05)
