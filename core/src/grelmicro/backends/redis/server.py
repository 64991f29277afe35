"""Where a Redis server is, and how a connection to it is made."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import quote

from pydantic import BeforeValidator, Field, SecretStr

from grelmicro.backends.redis.library import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from grelmicro.backends.redis.url import Address, parse, tls_options
from grelmicro.config import Config, Seconds, build
from grelmicro.errors import SettingsValidationError

ENV_PREFIX = "REDIS_"
"""What the names of environment variables begin with, unless `env_prefix` says otherwise."""

OWN = {"socket_timeout": None, "socket_connect_timeout": None, "protocol": 2}
"""How every connection is: requests have their own limit, and the older protocol needs no negotiation."""

KEEP_ALIVE_S = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""When the system asks whether the other end of an idle connection is there: each 30 s, and three times before it gives
up. Load balancers drop connections that were idle for 4 to 6 minutes."""

KEEP_ALIVE: Mapping[str, object] = {
    "socket_keepalive": True,
    "socket_keepalive_options": {
        getattr(socket, option): value for option, value in KEEP_ALIVE_S.items() if hasattr(socket, option)
    },
}
"""The same as redis-py takes it."""

NOT_TAKEN = ("retry", "health_check_interval", "decode_responses", "maint", "oss_cluster", "orig_")
"""What is not taken over from a client: what repeats requests, sends others between them, or changes replies."""


def _without_service_links(value: object) -> object:
    """Kubernetes sets REDIS_PORT to an address for a service named redis."""
    return None if isinstance(value, str) and value.startswith("tcp://") else value


class RedisPlace(Config):
    """Where a server is, as it is set; `REDIS_URL` and so on in the environment."""

    kind: ClassVar[str] = "REDIS"

    url: SecretStr | None = None
    host: Annotated[str | None, Field(min_length=1)] = None
    port: Annotated[Annotated[int, Field(ge=1, le=65535)] | None, BeforeValidator(_without_service_links)] = None
    db: Annotated[int | None, Field(ge=0)] = None
    user: str | None = None
    password: SecretStr | None = None
    tls: bool | None = None


class RedisLimits(Config):
    """Limits on requests and connections."""

    kind: ClassVar[str] = "REDIS"

    command_timeout: Seconds = 5.0
    """Seconds after which a request counts as unanswered, all its waits included."""
    max_connections: Annotated[int, Field(ge=1, le=10_000)] = 10
    """How many requests are under way at once; two more connections serve renewals and hints."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server, and the limits of its use."""

    safe_url: str
    connection_class: type[AbstractConnection]
    options: Mapping[str, Any] = field(repr=False)
    limits: RedisLimits
    namespace: str | None = None
    """The one that the URL names."""
    client: Redis | None = field(default=None, repr=False)
    """The client that it was given by."""
    owns_client: bool = False
    """Whether the client is closed with the store."""

    @classmethod
    def at(cls, limits: Mapping[str, object], *, env_prefix: str = ENV_PREFIX, **given: object) -> Self:
        """The server at a URL, at a host, or where the environment says.

        Args:
            limits: the fields of `RedisLimits`, None where they are not given.
            env_prefix: what the names of environment variables begin with.
            given: the fields of `RedisPlace`, None where they are not given.

        Raises:
            SettingsValidationError: a setting breaks a rule, or two of them contradict each other.
        """
        # Whoever names a server wants nothing of what the environment says about another one.
        named = given.get("url") is not None or given.get("host") is not None
        place = build(RedisPlace, "Redis", given, name=None if named else "redis", prefix=env_prefix)
        address = _address(place, env_prefix)
        chosen = {**address.limits, **{name: value for name, value in limits.items() if value is not None}}
        return cls(
            address.safe_url,
            _CLASSES[address.scheme],
            {**_options(address), **OWN},
            build(RedisLimits, "Redis", chosen, name="redis", prefix=env_prefix),
            address.namespace,
        )

    @classmethod
    def of_client(cls, client: object, limits: Mapping[str, object], *, own: bool = False) -> Self:
        """The server of a client of redis-py: its address, credentials and TLS, on connections of its own.

        Raises:
            SettingsValidationError: it is not a `redis.asyncio.Redis`.
        """
        if not isinstance(client, Redis):
            raise SettingsValidationError(
                f"RedisProvider.from_client takes a redis.asyncio.Redis, not {type(client).__module__}."
                f"{type(client).__qualname__}: clients for threads and for clusters are not supported"
            )
        pool = client.connection_pool
        taken = {name: value for name, value in pool.connection_kwargs.items() if not name.startswith(NOT_TAKEN)}
        return cls(
            _safe_url_of(pool.connection_class, taken),
            pool.connection_class,
            {**_keep_alive(taken), **taken, **OWN},
            build(RedisLimits, "Redis", limits, name="redis", prefix=ENV_PREFIX),
            client=client,
            owns_client=own,
        )

    def new_client(self) -> Redis:
        """A client of redis-py for the application, with connections of its own."""
        options = {**self.options, "socket_timeout": self.limits.command_timeout}
        return Redis.from_pool(ConnectionPool(connection_class=self.connection_class, **options))

    def connection(self) -> AbstractConnection:
        """A new connection, not made yet. It never repeats a request by itself."""
        return self.connection_class(**self.options)


_CLASSES: Mapping[str, type[AbstractConnection]] = {
    "redis": Connection,
    "rediss": SSLConnection,
    "unix": UnixDomainSocketConnection,
}


def _address(place: RedisPlace, env_prefix: str) -> Address:
    password = place.password.get_secret_value() if place.password is not None else None
    if place.url is None:
        if place.host is None:
            raise SettingsValidationError(
                "Redis: url is missing: give it, such as RedisProvider('redis://localhost:6379/0'), "
                f"or host=, or set the environment variable {env_prefix}URL or {env_prefix}HOST"
            )
        return Address(
            "rediss" if place.tls else "redis",
            host=place.host,
            port=place.port or 6379,
            db=place.db or 0,
            user=place.user,
            password=password or None,
            tls=tls_options({}) if place.tls else {},
        )
    for setting in ("host", "port", "db", "tls"):
        if getattr(place, setting) is not None:
            raise SettingsValidationError(
                f"Redis: url and {setting} are both set (as arguments, or as {env_prefix}URL and "
                f"{env_prefix}{setting.upper()}): the url says it all, so leave the other out"
            )
    return parse(place.url.get_secret_value()).with_login(place.user, password or None, env_prefix)


def _options(address: Address) -> dict[str, object]:
    where = {"path": address.path} if address.scheme == "unix" else {"host": address.host, "port": address.port}
    return {
        **where,
        **_keep_alive(where),
        "db": address.db,
        "username": address.user,
        "password": address.password,
        **address.tls,
    }


def _keep_alive(where: Mapping[str, object]) -> Mapping[str, object]:
    """The options that keep a connection to `where` alive; a socket in the file system needs none."""
    return {} if "path" in where else KEEP_ALIVE


def _safe_url_of(connection_class: type[AbstractConnection], options: Mapping[str, Any]) -> str:
    if "path" in options:
        return f"unix://{quote(options['path'])}?db={options.get('db') or 0}"
    scheme = "rediss" if issubclass(connection_class, SSLConnection) else "redis"
    return Address(
        scheme,
        host=str(options.get("host", "localhost")),
        port=int(options.get("port", 6379)),
        db=int(options.get("db") or 0),
    ).safe_url
