"""`cache:ALIAS?db=N`: the store on the server of a cache."""

import ssl
from typing import Any

import pytest
from django.core.cache import caches
from django.test import override_settings
from django.utils.module_loading import import_string

from grelmicro.errors import SettingsValidationError
from grelmicro_django import lock
from grelmicro_django.caches import DJANGO, DJANGO_REDIS
from grelmicro_django.stores import url_of
from tests.servers.fixtures import StartRedis

PASSWORD = "p@ss/w:o?r=d %41&+"


OfAnotherLibrary = type("OfAnotherLibrary", (import_string(DJANGO_REDIS),), {})
"""A cache that wraps another one."""


def url(store: str, backend: str = DJANGO, **cache: Any) -> str:
    with override_settings(CACHES={"default": {"BACKEND": backend, **cache}}):
        return url_of(store)


@pytest.mark.parametrize("backend", [DJANGO, DJANGO_REDIS, f"{__name__}.OfAnotherLibrary"])
@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({"LOCATION": "redis://cache:6380/1"}, "redis://cache:6380/5"),
        ({"LOCATION": ["redis://cache"]}, "redis://cache:6379/5"),
        ({"LOCATION": "redis://me:s%2Fc@cache/1?socket_timeout=3"}, "redis://me:s%2Fc@cache:6379/5"),
        ({"LOCATION": "redis://[::1]:6380"}, "redis://[::1]:6380/5"),
        ({"LOCATION": "unix://:x@/run/redis.sock?db=1"}, "unix://:x@/run/redis.sock?db=5"),
        ({"LOCATION": "rediss://cache/1?ssl_cert_reqs=none"}, "rediss://cache:6379/5?ssl_cert_reqs=none"),
    ],
)
def test_a_location_makes_a_url(backend: str, cache: dict[str, Any], expected: str) -> None:
    assert url("cache:default?db=5", backend, **cache) == expected


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        (DJANGO, {"username": "me", "password": "x", "ssl_cert_reqs": ssl.CERT_NONE, "ssl_ca_certs": "/ca.pem"}),
        (
            DJANGO_REDIS,
            {
                "USERNAME": "me",
                "PASSWORD": "x",
                "CONNECTION_POOL_KWARGS": {"ssl_cert_reqs": None, "ssl_ca_certs": "/ca.pem", "max_connections": 9},
            },
        ),
    ],
)
def test_options_hold_too(backend: str, options: dict[str, Any]) -> None:
    found = url("cache:default?db=5", backend, LOCATION="rediss://cache/1", OPTIONS=options)
    assert found == "rediss://me:x@cache:6379/5?ssl_cert_reqs=none&ssl_ca_certs=%2Fca.pem"


@pytest.mark.parametrize(
    ("store", "backend", "cache", "text"),
    [
        ("cache:default", DJANGO, {}, "as in cache:default?db=1"),
        ("cache:default?db=", DJANGO, {}, "as in cache:default?db=1"),
        ("cache:default?db=x", DJANGO, {}, "as in cache:default?db=1"),
        ("cache:default?db=0", DJANGO, {}, "is where the cache 'default' is"),
        ("cache:default?db=3", DJANGO, {"LOCATION": "redis://cache/3"}, "is where the cache 'default' is"),
        ("cache:default?db=3", DJANGO, {"OPTIONS": {"db": 3}}, "is where the cache 'default' is"),
        ("cache:defualt?db=5", DJANGO, {}, "did you mean cache:default"),
        ("cache:default?db=5&color=1", DJANGO, {}, "unknown option 'color'"),
        ("cache:default?db=5", DJANGO, {"LOCATION": ["redis://a:hidden@b", "redis://c"]}, "several locations"),
        ("cache:default?db=5", DJANGO, {"LOCATION": "redis://a:hidden@b;redis://c"}, "several locations"),
        ("cache:default?db=5", DJANGO, {"LOCATION": ""}, "no URL of Redis"),
        ("cache:default?db=5", DJANGO, {"LOCATION": None}, "no LOCATION"),
        ("cache:default?db=5", DJANGO, {"LOCATION": "redis://a:hidden@b:port"}, "without a valid port"),
        ("cache:default?db=5", DJANGO, {"KEY_FUNCTION": "shop.key"}, "KEY_FUNCTION"),
        ("cache:default?db=5", DJANGO, {"OPTIONS": {"pool_class": "shop.Pool"}}, "pool_class"),
        ("cache:default?db=5", DJANGO, {"OPTIONS": {"ssl_ca_data": "x"}}, "ssl_ca_data"),
        ("cache:default?db=5", DJANGO_REDIS, {"OPTIONS": {"CONNECTION_FACTORY": "shop.Factory"}}, "CONNECTION_FACTORY"),
        ("cache:default?db=5", DJANGO_REDIS, {"OPTIONS": {"SENTINELS": [("a", 1)]}}, "SENTINELS"),
        (
            "cache:default?db=5",
            DJANGO_REDIS,
            {"OPTIONS": {"CLIENT_CLASS": "django_redis.client.SentinelClient"}},
            "CLIENT_CLASS",
        ),
        ("cache:default?db=5", "django.core.cache.backends.locmem.LocMemCache", {}, "is not in Redis"),
        ("cache:default?db=5", "shop.Cache", {}, "cannot be imported"),
    ],
)
def test_a_cache_without_a_store_is_refused(store: str, backend: str, cache: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsValidationError) as caught:
        url(store, backend, **{"LOCATION": "redis://me:hidden@cache", **cache})
    assert text in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_factory_for_all_caches_is_refused() -> None:
    with (
        override_settings(DJANGO_REDIS_CONNECTION_FACTORY="django_redis.pool.SentinelConnectionFactory"),
        pytest.raises(SettingsValidationError, match="CONNECTION_FACTORY"),
    ):
        url("cache:default?db=5", DJANGO_REDIS, LOCATION="redis://cache")


def test_the_database_of_another_cache_is_refused() -> None:
    one = {"BACKEND": DJANGO, "LOCATION": "redis://cache"}
    with (
        override_settings(CACHES={"default": one, "pages": {**one, "LOCATION": "redis://cache/5"}}),
        pytest.raises(SettingsValidationError, match="where the cache 'pages' is"),
    ):
        url_of("cache:default?db=5")


def test_the_lock_is_held_on_when_the_cache_is_cleared(
    start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_redis(requirepass=f'"{PASSWORD}"')
    place = f"redis://127.0.0.1:{server.port}/1"
    monkeypatch.setenv("REDIS_PASSWORD", "wrong")
    monkeypatch.setenv("REDIS_USER", "wrong")
    for backend, options in ((DJANGO, {"password": PASSWORD}), (DJANGO_REDIS, {"PASSWORD": PASSWORD})):
        cache = {"BACKEND": backend, "LOCATION": place, "OPTIONS": options}
        with (
            override_settings(CACHES={"default": cache}, GRELMICRO={"STORE": "cache:default?db=5"}),
            lock("order") as held,
        ):
            caches["default"].set("a", 1)
            caches["default"].clear()
            assert caches["default"].get("a") is None
            held.extend()
            caches["default"].close()
