"""One URL serves an application and its leases; what is no URL of a store is refused with a remedy, and never shown."""

from collections.abc import Callable
from typing import Any

import pytest

from grelmicro.coordination import Coordination
from grelmicro.errors import SettingsValidationError
from grelmicro.providers.kubernetes import KubernetesProvider
from grelmicro.providers.postgres import PostgresProvider
from grelmicro.providers.redis import RedisProvider
from grelmicro.providers.sqlite import SQLiteProvider

TAKERS: list[Callable[[Any], object]] = [
    Coordination.from_url,
    KubernetesProvider.from_url,
    PostgresProvider.from_url,
    RedisProvider.from_url,
    SQLiteProvider.from_url,
]

NO_VARIABLE = "is the variable that it is read from set? Its form is "


def refusal(url: Any, take: Callable[[Any], object] = Coordination.from_url) -> str:
    with pytest.raises(SettingsValidationError) as caught:
        take(url)
    return str(caught.value)


@pytest.mark.parametrize("driver", ["", "+asyncpg", "+psycopg", "+psycopg2", "+pg8000"])
def test_a_url_of_sqlalchemy_for_postgresql_names_the_same_database(driver: str) -> None:
    url = f"postgresql{driver}://app@db.internal:5433/shop"
    for provider in (PostgresProvider(url), served_by(url)):
        assert provider.safe_url == "postgresql://app@db.internal:5433/shop"


@pytest.mark.parametrize("driver", ["", "+aiosqlite", "+pysqlite"])
def test_a_url_of_sqlalchemy_for_sqlite_names_the_same_file(driver: str) -> None:
    url = f"sqlite{driver}:////var/lib/shop.db?check_same_thread=false&timeout=30&namespace=shop"
    for provider in (SQLiteProvider.from_url(url), served_by(url)):
        assert provider.safe_url == "sqlite:////var/lib/shop.db"
        assert provider.store.namespace == "shop"


@pytest.mark.parametrize(("scheme", "same"), [("valkey", "redis"), ("valkeys", "rediss")])
def test_a_url_for_valkey_is_one_for_redis(scheme: str, same: str) -> None:
    for provider in (RedisProvider(f"{scheme}://cache:6380/2"), served_by(f"{scheme}://cache:6380/2")):
        assert provider.safe_url == f"{same}://cache:6380/2"


def served_by(url: str) -> Any:
    """The provider that `from_url` makes of it."""
    made: list[Any] = []

    class Seen(Coordination):
        def __init__(self, source: Any = None, **settings: Any) -> None:
            made.append(source)
            super().__init__(source, **settings)

    Seen.from_url(url)
    return made[0]


@pytest.mark.parametrize("take", TAKERS)
def test_a_variable_that_is_not_set_is_asked_for(take: Callable[[Any], object]) -> None:
    for url in ("", "  "):
        assert f": url is empty: {NO_VARIABLE}" in refusal(url, take)


@pytest.mark.parametrize("url", [None, 5, b"memory://"])
def test_a_url_is_text(url: Any) -> None:
    text = f"Coordination.from_url: url should be text, not {type(url).__name__}: {NO_VARIABLE}"
    assert refusal(url).startswith(text)


@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize("url", ['"redis://:secret@cache"', "redis://:secret@cache\n"])
def test_quotation_marks_of_an_env_file_are_named(take: Callable[[Any], object], url: str) -> None:
    text = refusal(url, take)
    assert text.endswith(": url has quotation marks or spaces around it: remove them")


def test_a_path_is_no_url() -> None:
    assert refusal("locks.db") == (
        "Coordination.from_url: url has no scheme: did you mean a SQLite file? Write sqlite:/// before its path, "
        "as in sqlite:///locks.db, and sqlite://// before an absolute one"
    )


def test_host_and_port_are_no_url() -> None:
    assert refusal("localhost:6379").startswith(
        "Coordination.from_url: url has no scheme: begin it with memory:// or sqlite:// or postgresql://"
    )


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("reddis://:secret@h", "redis"),
        ("postgressql://h/secret", "postgresql"),
        ("sqllite:///secret", "sqlite"),
        ("k8s://secret", ""),
        ("mysql+aiomysql://:secret@h", ""),
    ],
)
def test_a_scheme_that_is_not_known_is_told_the_nearest_one(url: str, near: str) -> None:
    hint = f"did you mean {near}://? Or begin it with " if near else "begin it with "
    assert refusal(url).startswith(f"Coordination.from_url: the URL's scheme is not known: {hint}memory://")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("redis+sentinel://h:26379/primary/0", "Redis Sentinel"),
        ("rediss+sentinel://h:26379/primary/0", "Redis Sentinel"),
        ("redis+cluster://h:6379", "Redis Cluster"),
    ],
)
def test_other_ways_to_find_a_server_are_refused_in_words(url: str, what: str) -> None:
    assert refusal(url).startswith(f"Coordination.from_url: {what} is not supported: give redis:// and the address of ")


@pytest.mark.parametrize("url", ["secret", "secret.db", "ftp://user:secret@host/", "'secret'", "redis+x://:secret@h#"])
def test_no_text_contains_the_url(url: str) -> None:
    assert "secret" not in refusal(url)
