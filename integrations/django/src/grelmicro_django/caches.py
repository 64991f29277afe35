"""The store on the Redis server of a cache: `cache:ALIAS?db=N`."""

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from django.conf import settings
from django.utils.module_loading import import_string

from grelmicro.errors import SettingsValidationError
from grelmicro_django.aliases import known_alias

DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"

TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
"""What is taken over of the options for TLS; others are refused."""

FACTORY = "django_redis.pool.ConnectionFactory"

USUAL: Mapping[str, tuple[object, ...]] = {
    "CONNECTION_FACTORY": (FACTORY,),
    "CONNECTION_POOL_CLASS": ("redis.ConnectionPool", "redis.connection.ConnectionPool")
    + ("redis.BlockingConnectionPool", "redis.connection.BlockingConnectionPool"),
    "REDIS_CLIENT_CLASS": ("redis.Redis", "redis.client.Redis"),
    "CLIENT_CLASS": ("django_redis.client.DefaultClient", "django_redis.client.default.DefaultClient")
    + ("django_redis.client.HerdClient", "django_redis.client.herd.HerdClient"),
}
"""Options that say which code finds and asks the server, with the values that lead to the location's server."""

OPAQUE = ("connection_class", "credential_provider", "pool_class", "redis_connect_func", "SENTINELS", "SENTINEL_KWARGS")
"""Options that lead to a server, or log in, by code of their own."""


class Server(NamedTuple):
    """Where a cache is."""

    scheme: str
    host: str
    port: int
    path: str
    db: str
    user: str
    password: str
    tls: Mapping[str, str]

    @property
    def place(self) -> tuple[str, int, str]:
        """What tells two servers apart."""
        return self.host, self.port, self.path

    def url(self, db: str) -> str:
        """The URL of a database of this server."""
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user or self.password else ""
        if self.path:
            return f"unix://{login}{quote(self.path)}?db={db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?{urlencode(self.tls, quote_via=quote)}" if self.tls else ""
        return f"{self.scheme}://{login}{host}:{self.port}/{db}{query}"


def url_of_cache(text: str) -> str:
    """The URL of the store on the server of a cache; it connects to nothing.

    Args:
        text: `ALIAS?db=N`, what follows `cache:`.

    Raises:
        SettingsValidationError: there is no such cache, no database is named, or its server cannot be told.
    """
    alias, _, query = text.partition("?")
    known_alias("cache", alias, list(settings.CACHES))
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"db"}):
        raise SettingsValidationError(f"STORE: cache:{alias} has the unknown option {unknown[0]!r}: the only one is db")
    server = _server(alias, settings.CACHES[alias])
    db = options.get("db", "")
    if not (db.isascii() and db.isdigit() and len(db) < 10):
        raise _refused(
            alias,
            "is emptied by cache.clear()",
            f"name a database that no cache is in, as in cache:{alias}?db={1 if server.db == '0' else 0}, "
            "or give the URL of a store",
        )
    for other in settings.CACHES:
        if _uses(other, server, int(db), certain=other == alias):
            raise _refused(
                alias, f"with db={db} is where the cache {other!r} is, which clear() empties", "name another db"
            )
    return server.url(str(int(db)))


def _uses(alias: str, server: Server, db: int, *, certain: bool) -> bool:
    """Whether a cache is in this database; one whose server cannot be told counts as being elsewhere."""
    try:
        found = _server(alias, settings.CACHES[alias])
    except SettingsValidationError:
        if certain:
            raise
        return False
    return found.place == server.place and int(found.db) == db


def _server(alias: str, cache: Mapping[str, Any]) -> Server:
    """Where a cache is, and who asks, as its client reads the settings: what the location says wins over `OPTIONS`."""
    library = _library(alias, str(cache.get("BACKEND")))
    options: Mapping[str, Any] = cache.get("OPTIONS") or {}
    if cache.get("KEY_FUNCTION"):
        raise _refused(alias, "has a KEY_FUNCTION, which a store does not follow")
    _check_usual(alias, library, options)
    parts = _location(alias, cache.get("LOCATION"))
    more = {name.lower(): options[name] for name in ("USERNAME", "PASSWORD") if options.get(name)}
    extra = (options | (more | options.get("CONNECTION_POOL_KWARGS", {}))) if library == DJANGO_REDIS else options
    _check_opaque(alias, extra)
    said: dict[str, Any] = {**extra, **dict(parse_qsl(parts.query))}
    tls = {name: said[name] for name in said if name.startswith("ssl_")}
    if other := sorted(tls.keys() - set(TLS)):
        raise _refused(alias, f"has the option {other[0]!r}, which a store cannot follow")
    in_path = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    in_query = dict(parse_qsl(parts.query)).get("db", "")
    db = str(in_query or in_path or said.get("db") or 0)
    if not db.isdigit():
        raise _refused(alias, "has a database that is not a number")
    try:
        port = parts.port or 6379
    except ValueError:
        raise _refused(alias, "has a LOCATION without a valid port") from None
    return Server(
        parts.scheme,
        unquote(parts.hostname or ("" if parts.scheme == "unix" else "localhost")),
        port,
        unquote(parts.path) if parts.scheme == "unix" else "",
        db,
        unquote(parts.username or "") or str(said.get("username") or ""),
        unquote(parts.password or "") or str(said.get("password") or ""),
        {name: _tls(value) for name, value in tls.items()} if parts.scheme == "rediss" else {},
    )


def _library(alias: str, backend: str) -> str:
    """Which of the two kinds of Redis caches it is; a subclass counts as its base."""
    try:
        found = import_string(backend)
    except ImportError:
        raise _refused(alias, f"has the BACKEND {backend!r}, which cannot be imported") from None
    for base in getattr(found, "__mro__", ()):
        if (name := f"{base.__module__}.{base.__qualname__}") in (DJANGO, DJANGO_REDIS):
            return name
    raise _refused(alias, "is not in Redis")


def _check_usual(alias: str, library: str, options: Mapping[str, Any]) -> None:
    if library != DJANGO_REDIS:
        return
    factory = getattr(settings, "DJANGO_REDIS_CONNECTION_FACTORY", FACTORY)
    for name, usual in USUAL.items():
        if options.get(name, factory if name == "CONNECTION_FACTORY" else usual[0]) not in usual:
            raise _refused(alias, f"has a {name} of its own, or one for several servers")


def _check_opaque(alias: str, options: Mapping[str, Any]) -> None:
    for name in OPAQUE:
        if options.get(name) is not None:
            raise _refused(alias, f"has the option {name!r}, which a store cannot follow")


def _location(alias: str, given: object) -> SplitResult:
    """The URL of the one server."""
    each = given.replace(";", ",").split(",") if isinstance(given, str) else given
    if not isinstance(each, list | tuple) or len(each) != 1:
        raise _refused(alias, "has several locations" if each else "has no LOCATION")
    try:
        parts = urlsplit(str(each[0]).strip())
    except ValueError:
        raise _refused(alias, "has a LOCATION that cannot be read") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise _refused(alias, "has a LOCATION that is no URL of Redis")
    return parts


def _tls(value: object) -> str:
    """An option of redis-py as it stands in a URL."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return ssl.VerifyMode(value).name.removeprefix("CERT_").lower()
    return str(value)


def _refused(
    alias: str, why: str, advice: str = "give the URL of a store, such as redis://localhost:6379/1"
) -> SettingsValidationError:
    return SettingsValidationError(f"STORE: the cache {alias!r} {why}: {advice}")
