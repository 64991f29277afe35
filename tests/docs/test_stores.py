"""The pages of stores say what the code does: their settings, and the rights that a user of the server needs."""

import asyncio
import inspect
import logging
import os
import re
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from redis.asyncio import Redis

from grelmicro.backends.hints import MOST_UNUSED
from grelmicro.backends.kubernetes.cluster import ClusterSettings
from grelmicro.backends.kubernetes.url import KNOWN as OF_KUBERNETES
from grelmicro.backends.postgres.url import COMMAND_TIMEOUT, OWN, Settings
from grelmicro.backends.redis.server import RedisLimits
from grelmicro.backends.redis.url import KNOWN, TLS, Address
from grelmicro.coordination import Coordination
from grelmicro.coordination.provider import Provider
from grelmicro.providers.kubernetes import KubernetesProvider
from grelmicro.providers.memory import MemoryProvider
from grelmicro.providers.postgres import PostgresProvider
from grelmicro.providers.redis import RedisProvider
from grelmicro.providers.sqlite import SQLiteProvider
from tests.docs.examples import blocks, rows
from tests.docs.pages import PAGES
from tests.helpers.postgres import TABLE, fetchval, role
from tests.helpers.worlds import eventually
from tests.servers import found
from tests.servers.fixtures import StartRedis
from tests.servers.found import Binary
from tests.servers.postgres import execute

PROVIDERS: dict[str, Callable[..., Provider]] = {
    "memory": MemoryProvider,
    "sqlite": SQLiteProvider,
    "redis": RedisProvider,
    "postgres": PostgresProvider,
    "kubernetes": KubernetesProvider,
}

OPTIONS: dict[str, set[str]] = {
    "memory": set(),
    "sqlite": {"namespace"},
    "redis": set(KNOWN),
    "postgres": set(OWN),
    "kubernetes": set(OF_KUBERNETES),
}

BY_DEFAULT: dict[str, dict[str, Any]] = {
    "redis": {**RedisLimits().model_dump(), "port": Address("redis").port, "db": Address("redis").db},
    "postgres": {"command_timeout": COMMAND_TIMEOUT, "port": Settings(host="db").address().arguments["port"]},
    "kubernetes": ClusterSettings().model_dump(),
}
"""What holds where an argument is None and no variable is set."""

PLACES: dict[str, list[dict[str, str]]] = {
    "memory": [{}],
    "sqlite": [{"SQLITE_PATH": "locks.db"}],
    "redis": [{"REDIS_URL": "redis://localhost"}],
    "postgres": [{"POSTGRES_URL": "postgresql://localhost/shop"}, {"POSTGRES_HOST": "localhost"}],
    "kubernetes": [{}],
}
"""Environments in which a provider needs no argument; together they make it look at every variable."""

VARIABLE = re.compile(r"\b(?:SQLITE|REDIS|POSTGRES|KUBE)_[A-Z_]+\b")


class Watched(UserDict[str, str]):
    """An environment that remembers what was asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.asked: set[str] = set()
        super().__init__(values)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return super().__getitem__(name)


def variables(store: str) -> set[str]:
    """The variables that a provider looks at."""
    asked: set[str] = set()
    for environment in PLACES[store]:
        watched = Watched(environment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "environ", watched)
            PROVIDERS[store]()
        asked |= watched.asked
    return {name for name in asked if VARIABLE.fullmatch(name)}


def defaults(store: str) -> dict[str, str]:
    """The arguments of a provider and their defaults, as the documentation writes them."""
    plain = {None: "none", True: "on", False: "off"}
    shown = {}
    for name, parameter in inspect.signature(PROVIDERS[store]).parameters.items():
        value = parameter.default
        if value is None:
            value = BY_DEFAULT.get(store, {}).get(name)
        if isinstance(value, str):
            shown[name] = value
        else:
            shown[name] = plain[value] if value is None or isinstance(value, bool) else f"{value:.15g}"
    return shown


def settings(store: str) -> dict[str, list[str]]:
    """The table of settings on a store's page: by argument the variable, the part of the URL, and the default."""
    shown = rows(PAGES[f"docs/stores/{store}.md"], f"<!-- settings: {PROVIDERS[store].__name__} -->")
    return {argument.strip("`"): cells for argument, cells in shown.items()}


@pytest.mark.parametrize("store", PROVIDERS)
def test_arguments_and_defaults_are_those_of_the_provider(store: str) -> None:
    assert {argument: cells[2].strip("`") for argument, cells in settings(store).items()} == defaults(store)


@pytest.mark.parametrize("store", PROVIDERS)
def test_variables_are_those_that_the_provider_reads(store: str) -> None:
    assert {name for cells in settings(store).values() for name in VARIABLE.findall(cells[0])} == variables(store)


@pytest.mark.parametrize("store", PROVIDERS)
def test_options_are_those_of_the_url(store: str) -> None:
    shown = {option for cells in settings(store).values() for option in re.findall(r"\?(\w+)=", cells[1])}
    assert shown == OPTIONS[store]


def test_options_of_tls_are_those_of_the_url() -> None:
    assert {option.strip("`") for option in rows(PAGES["docs/stores/redis.md"], "<!-- options of TLS -->")} == set(TLS)


def test_no_page_names_a_variable_that_nobody_reads() -> None:
    known = set().union(*map(variables, PROVIDERS))
    assert {page: wrong for page, text in PAGES.items() if (wrong := set(VARIABLE.findall(text)) - known)} == {}


def test_a_variable_that_is_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables("memory") == set()
    assert variables("sqlite") == {"SQLITE_PATH"}


# Rights


@pytest.mark.parametrize("binary", [*found.redis_binaries()] or [None], ids=lambda binary: str(binary or "redis"))
async def test_the_redis_user_of_the_page_may_do_everything(
    start_redis: StartRedis, binary: Binary | None, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = [block.text for block in blocks(PAGES["docs/stores/redis.md"]) if block.text.startswith("user ")]
    server = start_redis(binary, user=[" ".join(line.split()).removeprefix("user ")])
    provider = RedisProvider(server.url.replace("redis://", "redis://shop:secret@"), namespace="shop")
    await use_everything(provider, caplog)
    async with Redis.from_url(server.url) as client:
        assert await client.ttl("shop:lease:lock:cart") > 0, "a free lock's record will be dropped"


async def test_the_postgres_role_of_the_page_may_do_everything(
    postgres_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    create, grant = (
        next(block.text for block in blocks(PAGES["docs/stores/postgres.md"]) if block.text.startswith(word))
        for word in ("CREATE TABLE", "GRANT")
    )
    assert create.strip() == PostgresProvider(postgres_url).table_sql.strip()
    async with role(postgres_url, namespace) as url:
        await execute(postgres_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC", create)
        await execute(postgres_url, grant.replace("TO shop", f'TO "{namespace}"'))
        await use_everything(PostgresProvider(url, auto_migrate=False), caplog)
        assert await fetchval(postgres_url, "SELECT has_table_privilege($1, $2, 'DELETE')", namespace, TABLE), (
            "old records can be dropped"
        )


async def use_everything(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    """Every operation works, hints come, and nothing is complained of."""
    caplog.set_level(logging.WARNING)
    coordination = Coordination(provider)
    async with coordination:
        await provider.check()
        lock = coordination.lock("cart", auto_renew=True, lease_duration=3.0)

        async def wait_for_it() -> bool:
            async with await lock.acquire(timeout=10) as held:
                return held.valid

        async with lock as held, provider.store.watch("lock:cart") as waiter:
            async with asyncio.timeout(10):
                while not waiter.pushes:  # some begin to watch only when somebody waits
                    await waiter.wait(0.1)
            waiting, granted = asyncio.create_task(wait_for_it()), held.deadline
            await eventually(lambda: held.deadline > granted, "it is renewed")
        assert await waiting
        async with lock as again:
            assert again.fencing_token == held.fencing_token + 2, "the start of the server is told"
        for number in range(MOST_UNUSED + 2):  # which ends the first subscriptions
            async with provider.store.watch(f"lock:{number}"):
                pass
        assert [lease.name async for lease in provider.store.scan("lock:c")] == ["lock:cart"]
        await provider.store.acquire("lock:left", "somebody", 0.05)
        await asyncio.sleep(provider.store.resolution + 0.1)
    async with provider.store as store:
        left = await store.read("lock:left")
        assert left is not None
        assert left.holder == "", "closing set free what had expired"
    assert [record.getMessage() for record in caplog.records] == []
