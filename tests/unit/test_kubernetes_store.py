"""The store of a Kubernetes namespace: what opening and closing it costs, and what fails for itself."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from grelmicro.backends.kubernetes import store as module
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.names import lease_name
from grelmicro.backends.kubernetes.store import TIDY_LIMIT, KubernetesStore
from grelmicro.errors import BackendUnavailableError, OutOfContextError, SettingsValidationError
from grelmicro.leases import PartlyRenewedError
from grelmicro.testing import MovableClock
from tests.helpers.kubernetes import CART, CART_LEASE, Shelf, ShelfRequests, Trouble


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def trouble(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Trouble:
    """The requests of a store that is opened."""
    trouble = Trouble(ShelfRequests(shelf))
    monkeypatch.setattr(module, "Requests", lambda cluster: trouble)
    return trouble


@pytest.fixture
async def store(trouble: Trouble) -> AsyncIterator[KubernetesStore]:
    async with KubernetesStore(Cluster.at("default"), clock=MovableClock()) as store:
        yield store


def held_by_another(shelf: Shelf) -> None:
    shelf.put(CART_LEASE, {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 15}})


async def test_a_namespace_beside_a_cluster_is_refused() -> None:
    with pytest.raises(SettingsValidationError, match="namespace is set beside cluster"):
        KubernetesStore(Cluster.at("default"), namespace="other")
    assert KubernetesStore(namespace="other").cluster.namespace == "other"


async def test_a_process_that_tries_once_asks_once_and_leaves_what_it_saw(trouble: Trouble, shelf: Shelf) -> None:
    held_by_another(shelf)
    async with KubernetesStore(Cluster.at("default")) as store:
        assert not (await store.acquire(CART, "cron", 30.0)).granted_to("cron")
    assert trouble.calls == {"GET": 1, "PUT": 1}
    metadata = shelf.found(CART_LEASE)["metadata"]
    assert "grelmicro.io/observed" in metadata["annotations"]
    assert "labels" not in metadata


async def test_a_process_that_gets_it_asks_no_more_than_it_must(trouble: Trouble) -> None:
    async with KubernetesStore(Cluster.at("default")) as store:
        lease = await store.acquire(CART, "cron", 30.0)
        assert await store.release(lease)
    assert trouble.calls == {"GET": 1, "POST": 1, "PUT": 1}


async def test_closing_goes_on_where_marks_cannot_be_left(trouble: Trouble, shelf: Shelf) -> None:
    held_by_another(shelf)

    async def fail(verb: str, name: str) -> None:
        raise BackendUnavailableError("no")

    async with KubernetesStore(Cluster.at("default")) as store:
        await store.acquire(CART, "cron", 30.0)
        trouble.before = fail
    assert not store.is_open


async def test_closing_waits_for_marks_a_moment_only(trouble: Trouble, shelf: Shelf) -> None:
    held_by_another(shelf)

    async def hang(verb: str, name: str) -> None:
        await asyncio.sleep(60.0)

    async with asyncio.timeout(TIDY_LIMIT + 10.0):
        async with KubernetesStore(Cluster.at("default")) as store:
            await store.acquire(CART, "cron", 30.0)
            trouble.before = hang
    assert not store.is_open


async def test_a_renewal_that_fails_does_not_cut_off_the_others(store: KubernetesStore, trouble: Trouble) -> None:
    leases = [await store.acquire(f"lock:{number}", "a", 30.0) for number in range(3)]

    async def fail(verb: str, name: str) -> None:
        if name == lease_name("grelmicro", "lock:1"):
            raise BackendUnavailableError("no")
        await asyncio.sleep(0.01)

    trouble.before = fail
    with pytest.raises(PartlyRenewedError):
        await store.renew_many([(lease, 60.0) for lease in leases])
    trouble.before = None
    records = [await store.read(lease.name) for lease in leases]
    assert [record.remaining for record in records if record is not None] == [60.0, 30.0, 60.0]
    assert len(await store.renew_many([(lease, 60.0) for lease in leases])) == 3


async def test_many_are_renewed_at_once(store: KubernetesStore, trouble: Trouble) -> None:
    leases = [await store.acquire(f"lock:{number}", "a", 30.0) for number in range(5)]
    under_way = 0
    most = 0

    async def count(verb: str, name: str) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1

    trouble.before = count
    assert len(await store.renew_many([(lease, 60.0) for lease in leases])) == 5
    assert most == 5
    assert trouble.calls["urgent PUT"] == 5


async def test_a_release_wakes_who_waits_in_this_process_even_if_it_ends_unknown(
    store: KubernetesStore, trouble: Trouble, shelf: Shelf
) -> None:
    lease = await store.acquire(CART, "a", 30.0)
    async with store.watch(CART) as waiter:
        trouble.lose.add("PUT")
        with pytest.raises(Exception, match="no answer"):
            await store.release(lease)
        assert await asyncio.wait_for(waiter.wait(3600.0), 10.0)
    assert shelf.found(CART_LEASE)["spec"]["holderIdentity"] == ""


async def test_closed_it_serves_nobody(store: KubernetesStore) -> None:
    other = KubernetesStore(Cluster.at("default"))
    with pytest.raises(OutOfContextError, match="KubernetesStore is not open"):
        await other.acquire(CART, "a", 30.0)
    store._opened = None
    with pytest.raises(OutOfContextError, match="is closing"):
        await store.acquire(CART, "a", 30.0)


async def test_one_renewal_without_an_answer_costs_no_other_one(store: KubernetesStore, trouble: Trouble) -> None:
    leases = [await store.acquire(f"lock:{name}", "a", 6.0) for name in ("slow", "one", "two")]

    async def silent(verb: str, name: str) -> None:
        if name.endswith("slow"):
            await asyncio.Event().wait()

    trouble.before = silent
    clock = store.clock
    assert isinstance(clock, MovableClock)
    renewing = asyncio.create_task(store.renew_many([(lease, 6.0) for lease in leases]))
    while trouble.calls["urgent PUT"] < 3:
        await asyncio.sleep(0)
    await clock.advance(6.0 / 3 - 0.1)  # before whoever sent them gives up
    with pytest.raises(PartlyRenewedError) as partly:
        await asyncio.wait_for(renewing, 10.0)
    assert sorted(lease.name for lease in partly.value.survivors) == ["lock:one", "lock:two"]
    assert [lease.name for lease in partly.value.failed] == ["lock:slow"]
