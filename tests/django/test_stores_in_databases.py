"""`database:ALIAS`: the store in a database of the project."""

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import django
import pytest
from django.db import connections
from django.test import override_settings

from grelmicro.errors import SettingsValidationError
from grelmicro_django import lock
from grelmicro_django.databases import IGNORED, REFUSED, TRANSLATED, unknown_options, url_of_database
from grelmicro_django.stores import store_sql, url_of
from tests.django.databases import databases
from tests.servers.fixtures import StartPostgres
from tests.servers.postgres import execute

PASSWORD = "p@ss/wo#r?d %41&="
ENGINE = "django.db.backends.postgresql"


def shop(**settings: Any) -> dict[str, Any]:
    return {"ENGINE": ENGINE, "NAME": "shop", **settings}


def of_url(url: str, **settings: Any) -> dict[str, Any]:
    """The settings of a database that a URL names."""
    parts = urlsplit(url)
    place = {"HOST": parts.hostname or "", "PORT": parts.port or "", "USER": parts.username or ""}
    return shop(**{**place, "NAME": parts.path.removeprefix("/"), **settings})


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "postgresql:///shop"),
        ({"HOST": "db", "PORT": 5433, "USER": "me"}, "postgresql://me@db:5433/shop"),
        ({"HOST": "db", "USER": "a@b", "PASSWORD": "s/c"}, "postgresql://a%40b:s%2Fc@db/shop"),
        ({"HOST": "::1", "PORT": "5433"}, "postgresql://[::1]:5433/shop"),
        ({"HOST": "a,b", "PORT": "1,2"}, "postgresql://a:1,b:2/shop"),
        ({"HOST": "a,b", "PORT": "1"}, "postgresql://a:1,b:1/shop"),
        ({"HOST": "/run/pg", "PORT": "1", "USER": "me"}, "postgresql://me@/shop?host=%2Frun%2Fpg&port=1"),
        ({"NAME": "a b/c?"}, "postgresql:///a%20b%2Fc%3F"),
        ({"NAME": None, "HOST": "db"}, "postgresql://db/postgres"),
        ({"NAME": "", "OPTIONS": {"service": "prod"}}, "postgresql://?service=prod"),
        ({"OPTIONS": {"dbname": "other", "host": "h", "user": "u"}, "HOST": "db"}, "postgresql://u@db/other"),
        (
            {"OPTIONS": {"sslmode": "verify-full", "connect_timeout": 3}},
            "postgresql:///shop?sslmode=verify-full&connect_timeout=3",
        ),
        ({"OPTIONS": {"pool": True, "isolation_level": 3, "keepalives": 1, "sslrootcert": None}}, "postgresql:///shop"),
        ({"OPTIONS": {"channel_binding": "prefer", "assume_role": None}}, "postgresql:///shop"),
    ],
)
def test_settings_of_postgresql_make_a_url(settings: dict[str, Any], url: str) -> None:
    with databases(shop=shop(**settings)):
        assert url_of("database:shop") == url


@pytest.mark.parametrize("option", sorted(REFUSED))
def test_options_that_a_store_cannot_follow_are_refused(option: str) -> None:
    with databases(shop=shop(PASSWORD="hidden", OPTIONS={option: "require"})):
        with pytest.raises(SettingsValidationError, match=f"OPTIONS.'{option}'.*give the URL of a store") as caught:
            url_of("database:shop")
        assert "hidden" not in str(caught.value)


def test_each_option_is_in_one_list() -> None:
    assert len(TRANSLATED | IGNORED | REFUSED.keys()) == len(TRANSLATED) + len(IGNORED) + len(REFUSED)
    with databases(shop=shop(OPTIONS={"sslmode": "require", "pool": True, "colour": 1})):
        assert unknown_options("shop") == ["colour"]
        assert url_of("database:shop") == "postgresql:///shop?sslmode=require"


@pytest.mark.parametrize(
    ("store", "text"),
    [
        ("database:shpo", "did you mean database:shop"),
        ("database:", "names no database"),
        ("database:memory", "is in memory"),
        ("database:shared", "is in memory"),
        ("database:uri", "is named by a URI"),
        ("database:default", "in which there can be no store"),
        ("database:shop", "neither NAME nor"),
    ],
)
def test_a_database_without_a_store_is_refused(store: str, text: str) -> None:
    sqlite = {"ENGINE": "django.db.backends.sqlite3"}
    with (
        databases(
            shop=shop(NAME=""),
            memory={**sqlite, "NAME": ":memory:"},
            shared={**sqlite, "NAME": "file:x?mode=memory&cache=shared"},
            uri={**sqlite, "NAME": "file:/tmp/x.db?mode=rw"},
        ),
        pytest.raises(SettingsValidationError, match=text),
    ):
        url_of(store)


@pytest.mark.parametrize("vendor", ["mysql", "oracle"])
def test_another_vendor_is_refused(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with databases(shop=shop()):
        monkeypatch.setattr(connections["shop"], "vendor", vendor)
        with pytest.raises(SettingsValidationError, match="give the URL of a store"):
            url_of("database:shop")


def test_sqlite_has_a_file_of_its_own_beside_the_database(tmp_path: Path) -> None:
    file = tmp_path / "a %b.db"
    with (
        databases(shop={"ENGINE": "django.db.backends.sqlite3", "NAME": file}),
        override_settings(GRELMICRO={"STORE": "database:shop"}),
        lock("order"),
    ):
        assert Path(f"{file}.locks").exists()
        assert not file.exists()
        # As in a clone of a parallel test run.
        connections["shop"].settings_dict["NAME"] = f"{file}_2"
        assert url_of("database:shop").endswith("_2.locks")
        assert "CREATE TABLE IF NOT EXISTS grelmicro_leases" in store_sql()


def test_a_lock_in_postgresql(postgres_url: str) -> None:
    options = {"application_name": "shop one", "options": "-c statement_timeout=4321", "connect_timeout": 7}
    pool = {"pool": False} if django.VERSION >= (5, 1) else {}
    with (
        databases(shop=of_url(postgres_url, OPTIONS={**options, **pool, "sslmode": "prefer"})),
        override_settings(GRELMICRO={"STORE": "database:shop"}),
    ):
        with lock("order") as held, connections["shop"].cursor() as cursor:
            assert held.fencing_token > 0
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'shop one'")
            assert cursor.fetchone()[0] > 1  # beside Django's
            cursor.execute("SELECT count(*) FROM grelmicro_leases WHERE name = 'lock:order'")
            assert cursor.fetchone() == (1,)
        assert 'CREATE TABLE IF NOT EXISTS "public".grelmicro_leases' in store_sql()


def test_login_service_and_passfile(
    start_postgres: StartPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_postgres()
    user = "o'neill@shop"
    asyncio.run(execute(server.url, f"CREATE ROLE \"{user}\" SUPERUSER LOGIN PASSWORD '{PASSWORD}'"))
    rules = server.data / "pg_hba.conf"
    rules.write_text(rules.read_text().replace("trust", "scram-sha-256"))
    server.restart()
    passfile = tmp_path / "pass"
    passfile.write_text(f"127.0.0.1:*:*:{user}:{PASSWORD}\n")
    passfile.chmod(0o600)
    services = tmp_path / "services"
    services.write_text(f"[prod]\nhost=127.0.0.1\nport={server.port}\ndbname=postgres\nuser={user}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    # The environment names another one.
    monkeypatch.setenv("POSTGRES_PASSWORD", "wrong")
    here = {"HOST": "127.0.0.1", "PORT": server.port, "USER": user, "NAME": "postgres"}
    ways = [
        shop(**here, PASSWORD=PASSWORD),
        shop(**here, OPTIONS={"passfile": str(passfile)}),
        shop(**here | {"HOST": str(server.folder)}, PASSWORD=PASSWORD),
        shop(NAME="", OPTIONS={"service": "prod", "passfile": str(passfile)}),
        shop(NAME="", PASSWORD=PASSWORD, OPTIONS={"service": "prod"}),
    ]
    for settings in ways:
        with databases(shop=settings), override_settings(GRELMICRO={"STORE": "database:shop"}), lock("order") as held:
            assert held.fencing_token > 0


def test_a_relative_name_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with databases(shop={"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}):
        assert url_of_database("shop") == f"sqlite:///{quote(os.path.abspath('shop.db'))}.locks"
