"""What providers have in common: variables of another prefix, clients, and adapters that share their store."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from kubernetes_asyncio.client import ApiClient, Configuration
from redis.asyncio import Redis

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, Lock
from grelmicro.coordination.kubernetes import KubernetesLockAdapter
from grelmicro.coordination.memory import MemoryLeaderElectionAdapter, MemoryLockAdapter
from grelmicro.coordination.postgres import PostgresLockAdapter
from grelmicro.coordination.redis import RedisLeaderElectionAdapter, RedisLockAdapter, RedisScheduleAdapter
from grelmicro.coordination.sqlite import SQLiteLockAdapter
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.leases import LeaseStore
from grelmicro.providers import Provider
from grelmicro.providers.kubernetes import KubernetesProvider
from grelmicro.providers.memory import MemoryProvider
from grelmicro.providers.postgres import PostgresProvider
from grelmicro.providers.redis import RedisProvider
from grelmicro.providers.sqlite import SQLiteProvider
from tests.helpers.api_server import ApiServer

pytestmark = pytest.mark.usefixtures("nothing_left")


# env_prefix


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("REDIS_URL", "REDIS_HOST", "POSTGRES_URL", "POSTGRES_HOST", "SQLITE_PATH", "KUBE_NAMESPACE"):
        monkeypatch.delenv(variable, raising=False)


def test_two_redis_servers_are_named_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://one/1")
    monkeypatch.setenv("REDIS_COMMAND_TIMEOUT", "1")
    monkeypatch.setenv("JOBS_REDIS_HOST", "two")
    monkeypatch.setenv("JOBS_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("JOBS_REDIS_COMMAND_TIMEOUT", "2")
    one, two = RedisProvider(), RedisProvider(env_prefix="JOBS_REDIS_")
    assert (one.safe_url, one.env_prefix, one.store.server.limits.command_timeout) == (
        "redis://one:6379/1",
        "REDIS_",
        1,
    )
    assert (two.safe_url, two.env_prefix, two.store.server.limits.command_timeout) == (
        "redis://two:6379/0",
        "JOBS_REDIS_",
        2,
    )
    assert two.store.server.options["password"] == "secret"
    monkeypatch.setenv("JOBS_REDIS_URL", "redis://:other@three")
    with pytest.raises(SettingsValidationError, match="JOBS_REDIS_URL and JOBS_REDIS_HOST"):
        RedisProvider(env_prefix="JOBS_REDIS_")
    monkeypatch.delenv("JOBS_REDIS_HOST")
    with pytest.raises(SettingsValidationError, match="or as JOBS_REDIS_PASSWORD") as refusal:
        RedisProvider(env_prefix="JOBS_REDIS_")
    assert "secret" not in str(refusal.value)


def test_two_postgresql_servers_are_named_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_URL", "postgresql://one/a")
    for variable, value in (
        ("HOST", "two"),
        ("PORT", "5433"),
        ("DB", "b"),
        ("USER", "me"),
        ("PASSWORD", "secret"),
        ("COMMAND_TIMEOUT", "2"),
        ("LISTEN_URL", "postgresql://two/listen"),
    ):
        monkeypatch.setenv(f"JOBS_POSTGRES_{variable}", value)
    one, two = PostgresProvider(), PostgresProvider(env_prefix="JOBS_POSTGRES_")
    assert (one.safe_url, one.env_prefix, one.store._limit) == ("postgresql://one/a", "POSTGRES_", 5.0)
    assert (two.safe_url, two.env_prefix, two.store._limit) == ("postgresql://me@two:5433/b", "JOBS_POSTGRES_", 2.0)
    assert two.store._listen is not None
    assert two.store._listen.safe_url == "postgresql://two/listen"
    monkeypatch.setenv("JOBS_POSTGRES_URL", "postgresql://me:other@three/c")
    with pytest.raises(SettingsValidationError, match="JOBS_POSTGRES_URL and JOBS_POSTGRES_HOST"):
        PostgresProvider(env_prefix="JOBS_POSTGRES_")
    monkeypatch.delenv("JOBS_POSTGRES_HOST")
    with pytest.raises(SettingsValidationError, match="JOBS_POSTGRES_PASSWORD"):
        PostgresProvider(env_prefix="JOBS_POSTGRES_")


def test_two_files_and_two_namespaces_are_named_by_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SQLITE_PATH", str(tmp_path / "one.db"))
    monkeypatch.setenv("JOBS_SQLITE_PATH", str(tmp_path / "two.db"))
    assert SQLiteProvider().safe_url.endswith("one.db")
    jobs = SQLiteProvider(env_prefix="JOBS_SQLITE_")
    assert (jobs.safe_url.endswith("two.db"), jobs.env_prefix) == (True, "JOBS_SQLITE_")
    monkeypatch.setenv("JOBS_KUBE_NAMESPACE", "jobs")
    monkeypatch.setenv("JOBS_KUBE_REQUEST_TIMEOUT", "2")
    cluster = KubernetesProvider(env_prefix="JOBS_KUBE_")
    assert (cluster.safe_url, cluster.env_prefix) == ("kubernetes://jobs", "JOBS_KUBE_")
    assert KubernetesProvider().safe_url == "kubernetes://"


@pytest.mark.parametrize(
    ("make", "variable"), [(RedisProvider, "A_URL"), (PostgresProvider, "A_URL"), (SQLiteProvider, "A_PATH")]
)
def test_what_is_missing_is_told_with_the_name_of_the_variable(make: Callable[..., Provider], variable: str) -> None:
    with pytest.raises(SettingsValidationError, match=rf"set the environment variable {variable}"):
        make(env_prefix="A_")


@pytest.mark.parametrize("make", [RedisProvider, PostgresProvider, SQLiteProvider, KubernetesProvider])
def test_a_prefix_is_text(make: Callable[..., Provider]) -> None:
    with pytest.raises(SettingsValidationError, match="env_prefix should be text, not int"):
        make(env_prefix=3)


# Clients


async def test_a_client_of_redis_is_there_while_the_provider_is_open(redis_url: str) -> None:
    provider = RedisProvider(redis_url)
    for _ in range(2):
        with pytest.raises(OutOfContextError, match="RedisStore is not open"):
            _ = provider.client
        async with Grelmicro(uses=[Coordination(provider)]), Lock("cart") as held:
            client = provider.client
            assert provider.client is client
            await client.set("mine", held.fencing_token)
            assert int(await client.get("mine") or 0) == held.fencing_token
        assert not any(each.is_connected for each in client.connection_pool._available_connections), "it was closed"


async def test_a_client_of_redis_that_was_given_stays_the_callers_unless_it_is_owned(redis_url: str) -> None:
    async with Redis.from_url(redis_url) as client:
        provider = RedisProvider.from_client(client)
        async with provider:
            assert provider.client is client
            await client.ping()
        assert client.connection_pool._available_connections
        assert provider.client is client
        async with RedisProvider.from_client(client, own=True):
            await client.ping()
        assert not any(each.is_connected for each in client.connection_pool._available_connections)


async def test_a_pool_stays_the_callers_unless_it_is_owned(postgres_url: str) -> None:
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=3) as pool:
        async with PostgresProvider.from_client(pool) as provider, Lock("a", backend=provider.lock()):
            assert provider.client is pool
        assert await pool.fetchval("SELECT 1") == 1
    own = asyncpg.create_pool(postgres_url, min_size=1, max_size=3)
    provider = PostgresProvider.from_client(own, own=True)
    async with Grelmicro(uses=[Coordination(provider)]), Lock("a"):
        assert await provider.client.fetchval("SELECT 1") == 1, "it was opened"
    assert own.is_closing()


async def test_an_own_pool_whose_connection_is_in_use_does_not_hold_up_closing(postgres_url: str) -> None:
    pool = asyncpg.create_pool(postgres_url, min_size=1, max_size=3)
    provider = PostgresProvider.from_pool(pool, own=True)
    async with asyncio.timeout(10.0):
        async with provider:
            await pool.acquire()
    assert pool.is_closing()


async def test_a_client_of_kubernetes_stays_the_callers_unless_it_is_owned() -> None:
    async with ApiServer() as api, ApiClient(Configuration(host=api.url)) as client:
        provider = KubernetesProvider.from_client(client)
        async with provider:
            assert provider.client is client
        assert not client.rest_client.pool_manager.closed
        async with KubernetesProvider.from_client(client, own=True):
            pass
        assert client.rest_client.pool_manager.closed


def test_a_provider_without_a_client_says_so(tmp_path: Path) -> None:
    for provider in (
        PostgresProvider("postgresql://host/db"),
        KubernetesProvider(),
        SQLiteProvider(tmp_path / "a.db"),
        MemoryProvider(),
    ):
        with pytest.raises(OutOfContextError, match=f"{type(provider).__name__} has no client"):
            _ = provider.client


# Adapters


async def test_adapters_on_one_provider_share_its_store(redis_url: str) -> None:
    provider = RedisProvider(redis_url, namespace="shop")
    locks, elections = RedisLockAdapter(provider=provider), RedisLeaderElectionAdapter(provider=provider)
    schedules = RedisScheduleAdapter(provider=provider)
    assert locks.store is elections.store is schedules.store is provider.store
    assert locks.provider is provider
    assert RedisLockAdapter(redis_url).provider is None
    async with Grelmicro(uses=[Coordination(lock=locks, election=elections, schedule=schedules)]), Lock("a"):
        record = await elections.read("lock:a")
        assert record is not None
        assert record.live
        assert await schedules.claim("daily", 1.0)


@pytest.mark.parametrize(
    ("adapter", "provider", "beside"),
    [
        (MemoryLockAdapter, MemoryProvider, {}),
        (SQLiteLockAdapter, lambda: SQLiteProvider("a.db"), {"path": "b.db"}),
        (RedisLockAdapter, lambda: RedisProvider("redis://host"), {"namespace": "shop"}),
        (PostgresLockAdapter, lambda: PostgresProvider("postgresql://host/db"), {"schema": "shop"}),
        (KubernetesLockAdapter, KubernetesProvider, {"prefix": "shop"}),
    ],
)
def test_an_adapter_takes_a_provider_of_its_kind_and_nothing_beside(
    adapter: Callable[..., MemoryLockAdapter], provider: Callable[[], Provider], beside: dict[str, str]
) -> None:
    made = provider()
    assert adapter(provider=made).store is made.store
    with pytest.raises(SettingsValidationError, match="provider should be a .*Provider, not"):
        adapter(provider=Provider(MemoryProvider().store))
    if beside:
        with pytest.raises(SettingsValidationError, match="leave the other arguments out"):
            adapter(provider=made, **beside)


def test_elections_in_memory_share_a_provider() -> None:
    provider = MemoryProvider()
    assert MemoryLeaderElectionAdapter(provider=provider).store is provider.store


async def test_a_third_partys_provider_is_a_subclass_of_the_public_one() -> None:
    class ShopProvider(Provider):
        """One of an application."""

        def __init__(self, store: LeaseStore) -> None:
            super().__init__(store, url="shop://")

    async with Grelmicro(uses=[Coordination(ShopProvider(MemoryProvider().store))]), Lock("a") as held:
        assert held.valid
