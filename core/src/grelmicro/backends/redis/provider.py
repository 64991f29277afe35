"""The provider of a Redis server, and its backends."""

from typing import Self

from grelmicro.backends.redis.library import Redis
from grelmicro.backends.redis.server import ENV_PREFIX, RedisServer
from grelmicro.backends.redis.store import RedisStore
from grelmicro.clock import Clock
from grelmicro.config import Duration, check_env_prefix
from grelmicro.coordination.adapters import LeaderElectionAdapter, LeaseAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider, shared_store
from grelmicro.leases import LeaseStore
from grelmicro.leases.retention import RETENTION


class RedisProvider(Provider):
    """One Redis server for locks, elections and schedules.

    Give a URL, or a host with what belongs to it; with neither, the environment says where the server is: `REDIS_URL`,
    or `REDIS_HOST`, `REDIS_PORT`, `REDIS_DB`, `REDIS_TLS`; and in both cases `REDIS_USER` and `REDIS_PASSWORD`.

    Args:
        url: `redis://[user]:[password]@host:6379/0`, `rediss://...` for TLS, or `unix:///path/to/redis.sock?db=0`.
        host: the server's name or address, instead of a URL.
        port: 6379 by default.
        db: the number of the database, 0 by default.
        user: whose rights are used.
        password: as it is, not percent-encoded.
        tls: encrypt, and check the server's certificate.
        namespace: separates applications that share one server.
        command_timeout: seconds after which a request counts as unanswered; or `REDIS_COMMAND_TIMEOUT`, or 5.
        max_connections: how many requests are under way at once; or `REDIS_MAX_CONNECTIONS`, or 10. One more
            connection is reserved for renewals, and one for hints.
        env_prefix: what the names of its environment variables begin with, such as `CACHE_REDIS_` for a second server.
        clock: the time of deadlines in this process.
        retention: seconds for which a free lock's record is kept.

    Raises:
        SettingsValidationError: a setting breaks a rule, or two of them contradict each other.
    """

    store: RedisStore

    def __init__(
        self,
        url: str | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        db: int | None = None,
        user: str | None = None,
        password: str | None = None,
        tls: bool | None = None,
        namespace: str = "grelmicro",
        command_timeout: Duration | None = None,
        max_connections: int | None = None,
        env_prefix: str = ENV_PREFIX,
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        limits = {"command_timeout": command_timeout, "max_connections": max_connections}
        place = {"url": url, "host": host, "port": port, "db": db, "user": user, "password": password, "tls": tls}
        self.env_prefix = check_env_prefix("Redis", env_prefix)
        self._use(RedisServer.at(limits, env_prefix=env_prefix, **place), namespace, clock, retention)

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "grelmicro") -> Self:
        """The provider of a URL.

        Raises:
            SettingsValidationError: it has another form, or an option that is not known.
        """
        return cls(url, namespace=namespace)

    @classmethod
    def from_client(
        cls,
        client: object,
        *,
        own: bool = False,
        namespace: str = "grelmicro",
        command_timeout: Duration | None = None,
        max_connections: int | None = None,
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> Self:
        """The provider of the server that a `redis.asyncio.Redis` uses.

        Its address, credentials and TLS are used, on connections of its own: an exhausted pool of the application
        cannot cost it a lease, and the client's retries do not repeat an acquire.

        Args:
            client: of the server.
            own: close the client together with the provider; else it stays the caller's.
            namespace: see `RedisProvider`, as for the rest.
            command_timeout: see there.
            max_connections: see there.
            clock: see there.
            retention: see there.

        Raises:
            SettingsValidationError: it is a client for threads or for a cluster.
        """
        provider = cls.__new__(cls)
        limits = {"command_timeout": command_timeout, "max_connections": max_connections}
        provider.env_prefix = ENV_PREFIX
        provider._use(RedisServer.of_client(client, limits, own=own), namespace, clock, retention)
        return provider

    @property
    def client(self) -> Redis:
        """A `redis.asyncio.Redis` for whatever else the application does with the server.

        It is the one that `from_client` was given; else one with connections of its own, which is made when it is first
        asked for while the provider, or one of its backends, is open, and closed with it. Leases never use it.

        Raises:
            OutOfContextError: the provider was given no client and is not open.
        """
        return self.store.client

    def _use(self, server: RedisServer, namespace: str, clock: Clock | None, retention: Duration) -> None:
        store = RedisStore(server, namespace=server.namespace or namespace, clock=clock, retention=retention)
        super().__init__(store, url=server.safe_url)


class RedisAdapter(LeaseAdapter):
    """An adapter on a Redis server; the arguments are those of `RedisStore`, or a provider whose store it shares."""

    def __init__(
        self,
        server: str | RedisServer | None = None,
        *,
        provider: RedisProvider | None = None,
        namespace: str = "grelmicro",
        clock: Clock | None = None,
        retention: Duration = RETENTION,
    ) -> None:
        if provider is None:
            store: LeaseStore = RedisStore(server, namespace=namespace, clock=clock, retention=retention)
        else:
            alone = (server, namespace, clock, retention) == (None, "grelmicro", None, RETENTION)
            store = shared_store(provider, RedisProvider, type(self).__name__, alone=alone)
        super().__init__(store)
        self.provider = provider


class RedisLockAdapter(RedisAdapter, LockAdapter):
    """Locks on a Redis server; the arguments are those of `RedisStore`."""


class RedisLeaderElectionAdapter(RedisAdapter, LeaderElectionAdapter):
    """Elections on a Redis server; the arguments are those of `RedisStore`."""


class RedisScheduleAdapter(RedisAdapter, ScheduleAdapter):
    """Schedules on a Redis server; the arguments are those of `RedisStore`."""
