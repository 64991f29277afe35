"""Where a Redis server is: URL, host form, environment, client; what is refused, and that no secret is shown."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from grelmicro.backends.redis import RedisLeaderElectionAdapter, RedisLockAdapter, RedisScheduleAdapter, RedisStore
from grelmicro.backends.redis.server import RedisServer
from grelmicro.coordination import Coordination
from grelmicro.errors import BackendUnavailableError, SettingsValidationError
from grelmicro.providers.redis import RedisProvider
from tests.servers.fixtures import StartRedis, each
from tests.servers.found import Binary, redis_binaries
from tests.servers.redis import Config

AWKWARD = "p@ss/w:o?r#d %41&ü"
"""A password with everything that means something in a URL."""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("URL", "HOST", "PORT", "DB", "USER", "PASSWORD", "TLS", "COMMAND_TIMEOUT", "MAX_CONNECTIONS"):
        monkeypatch.delenv(f"REDIS_{setting}", raising=False)


def server_of(provider: RedisProvider) -> RedisServer:
    assert isinstance(provider.store, RedisStore)
    return provider.store.server


def where(provider: RedisProvider) -> dict[str, Any]:
    """What of its options says where the server is and who asks."""
    names = ("host", "port", "path", "db", "username", "password")
    options = server_of(provider).options
    return {name: options[name] for name in names if options.get(name) not in (None, 0)}


@pytest.mark.parametrize(
    ("url", "found", "safe"),
    [
        ("redis://localhost:6379/0", {"host": "localhost", "port": 6379}, "redis://localhost:6379/0"),
        ("redis://", {"host": "localhost", "port": 6379}, "redis://localhost:6379/0"),
        ("redis://cache", {"host": "cache", "port": 6379}, "redis://cache:6379/0"),
        ("REDIS://cache:7000/3", {"host": "cache", "port": 7000, "db": 3}, "redis://cache:7000/3"),
        ("redis://cache?db=3", {"host": "cache", "port": 6379, "db": 3}, "redis://cache:6379/3"),
        ("redis://[::1]:7000", {"host": "::1", "port": 7000}, "redis://[::1]:7000/0"),
        (
            f"redis://:{quote(AWKWARD, safe='')}@cache",
            {"host": "cache", "port": 6379, "password": AWKWARD},
            "redis://cache:6379/0",
        ),
        (
            "redis://me%40home:pw@cache",
            {"host": "cache", "port": 6379, "username": "me@home", "password": "pw"},
            "redis://cache:6379/0",
        ),
        ("rediss://cache/2", {"host": "cache", "port": 6379, "db": 2}, "rediss://cache:6379/2"),
        (
            "unix:///run/my%20redis.sock?db=2",
            {"path": "/run/my redis.sock", "db": 2},
            "unix:///run/my%20redis.sock?db=2",
        ),
        (
            "unix://me:pw@/run/redis.sock",
            {"path": "/run/redis.sock", "username": "me", "password": "pw"},
            "unix:///run/redis.sock?db=0",
        ),
        (
            "unix:///run/redis.sock?user=me&password=p%40w",
            {"path": "/run/redis.sock", "username": "me", "password": "p@w"},
            "unix:///run/redis.sock?db=0",
        ),
    ],
)
def test_a_url_says_where_the_server_is(url: str, found: dict[str, object], safe: str) -> None:
    for provider in (RedisProvider(url), RedisProvider.from_url(url)):
        assert where(provider) == found
        assert provider.safe_url == safe
    coordination = Coordination.from_url(url)
    store: Any = coordination.lock_backend
    assert store.store.server.safe_url == safe


@pytest.mark.parametrize(
    "url",
    [
        "http://cache",
        "cache:6379",
        "redis://cache:port",
        "redis://cache:70000",
        "redis://:secret/pw@cache",
        "redis://:secret#pw@cache",
        "redis://:secret?pw@cache",
        "redis://cache/zero",
        "redis://cache/0/1",
        "redis://cache/-1",
        "redis://cache/1?db=2",
        "redis://cache?db=secret",
        "redis://cache?decode_responses=secret",
        "redis://cache?ssl_cert_reqs=none",
        "rediss://cache?ssl_cert_reqs=secret",
        "rediss://cache?ssl_check_hostname=secret",
        "redis://cache?command_timeout=secret",
        "redis://cache?command_timeout=0",
        "redis://cache?max_connections=0",
        "redis://cache?user=secret",
        "redis://cache?namespace=a b",
        "unix://",
        "unix://run/redis.sock",
        "redis://[::1",
    ],
)
def test_a_url_that_says_something_else_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SettingsValidationError) as refusal:
        RedisProvider(url)
    assert "secret" not in str(refusal.value)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_an_option_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(SettingsValidationError, match=r"redis:// are db, namespace, command_timeout, max_connections$"):
        RedisProvider("redis://cache?health_check_interval=30")
    with pytest.raises(SettingsValidationError, match=r"rediss:// are .*ssl_ca_certs"):
        RedisProvider("rediss://cache?verify=no")


def test_a_url_sets_limits_and_the_namespace() -> None:
    provider = RedisProvider("redis://cache?command_timeout=0.5&max_connections=3&namespace=shop")
    limits = server_of(provider).limits
    assert (limits.command_timeout, limits.max_connections) == (0.5, 3)
    assert provider.store.namespace == "shop"
    assert server_of(RedisProvider("redis://cache?command_timeout=2", command_timeout=1)).limits.command_timeout == 1


def test_a_url_with_tls_checks_the_certificate_unless_it_says_otherwise() -> None:
    def tls(url: str) -> dict[str, object]:
        options = server_of(RedisProvider(url)).options
        return {name: value for name, value in options.items() if name.startswith("ssl")}

    assert tls("redis://cache") == {}
    assert tls("rediss://cache") == {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
    assert tls("rediss://cache?ssl_cert_reqs=CERT_NONE") == {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    assert tls("rediss://cache?ssl_ca_certs=/ca.pem&ssl_check_hostname=false") == {
        "ssl_ca_certs": "/ca.pem",
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": False,
    }


# Host form


def test_the_host_form_takes_everything_as_it_is() -> None:
    provider = RedisProvider(host="cache", port=7000, db=2, user="me", password=AWKWARD)
    assert where(provider) == {"host": "cache", "port": 7000, "db": 2, "username": "me", "password": AWKWARD}
    assert provider.safe_url == "redis://cache:7000/2"
    assert where(RedisProvider(host="cache")) == {"host": "cache", "port": 6379}
    secure = RedisProvider(host="cache", tls=True)
    assert secure.safe_url == "rediss://cache:6379/0"
    assert server_of(secure).options["ssl_cert_reqs"] == "required"
    assert RedisProvider(host="::1").safe_url == "redis://[::1]:6379/0"


async def test_an_awkward_password_opens_the_server(start_redis: StartRedis, namespace: str) -> None:
    server = start_redis(requirepass=f'"{AWKWARD}"'.replace("ü", "\\xc3\\xbc"))
    by_url = f"redis://:{quote(AWKWARD, safe='')}@127.0.0.1:{server.port}"
    for provider in (
        RedisProvider(by_url, namespace=namespace),
        RedisProvider(host="127.0.0.1", port=server.port, password=AWKWARD, namespace=namespace),
        RedisProvider(f"unix://{server.socket}", password=AWKWARD, namespace=namespace),
    ):
        async with provider:
            await provider.check()


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "redis://cache", "host": "other"},
        {"url": "redis://cache", "port": 7000},
        {"url": "redis://cache", "db": 0},
        {"url": "redis://cache", "tls": True},
        {"url": "redis://:secret@cache", "password": "secret-too"},
        {"url": "redis://me@cache", "user": "secret"},
        {"port": 7000},
        {"host": ""},
        {"host": "cache", "port": 0},
        {"host": "cache", "port": 65536},
        {"host": "cache", "port": "secret"},
        {"host": "cache", "db": -1},
        {"host": "cache", "command_timeout": 0},
        {"host": "cache", "command_timeout": float("inf")},
        {"host": "cache", "max_connections": 0},
        {"host": "cache", "namespace": "a:b"},
        {"host": "cache", "retention": 0},
        {},
    ],
)
def test_settings_that_break_a_rule_are_refused_and_not_shown(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsValidationError) as refusal:
        RedisProvider(**settings)
    assert "secret" not in str(refusal.value)


def test_a_login_beside_the_url_completes_it() -> None:
    provider = RedisProvider("redis://cache", user="me", password=AWKWARD)
    assert where(provider) == {"host": "cache", "port": 6379, "username": "me", "password": AWKWARD}
    assert where(RedisProvider("redis://me@cache", password="pw"))["username"] == "me"


# Environment


SetEnvironment = Callable[..., None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> SetEnvironment:
    """Sets variables, whose names go without REDIS_."""

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"REDIS_{name}", value)

    return set_variables


def test_the_environment_names_a_url(environment: SetEnvironment) -> None:
    environment(URL="redis://cache/4")
    environment(PASSWORD=AWKWARD)
    assert where(RedisProvider()) == {"host": "cache", "port": 6379, "db": 4, "password": AWKWARD}
    for adapter in (RedisLockAdapter(), RedisLeaderElectionAdapter(), RedisScheduleAdapter()):
        assert isinstance(adapter.store, RedisStore)
        assert adapter.store.server.safe_url == "redis://cache:6379/4"


def test_the_environment_names_a_host(environment: SetEnvironment) -> None:
    environment(HOST="cache", PORT="7000", DB="2", USER="me", PASSWORD="", TLS="1")
    environment(COMMAND_TIMEOUT="0.5")
    environment(MAX_CONNECTIONS="3")
    provider = RedisProvider()
    assert where(provider) == {"host": "cache", "port": 7000, "db": 2, "username": "me"}
    assert provider.safe_url == "rediss://cache:7000/2"
    limits = server_of(provider).limits
    assert (limits.command_timeout, limits.max_connections) == (0.5, 3)


def test_who_names_a_server_gets_nothing_of_another_one(environment: SetEnvironment) -> None:
    environment(URL="nonsense")
    environment(PASSWORD="of-the-other")
    environment(COMMAND_TIMEOUT="0.5")
    for provider in (RedisProvider("redis://cache"), RedisProvider(host="cache")):
        assert where(provider) == {"host": "cache", "port": 6379}
        assert server_of(provider).limits.command_timeout == 0.5


def test_the_address_of_a_service_that_kubernetes_announces_is_not_a_port(environment: SetEnvironment) -> None:
    environment(URL="redis://cache")
    environment(PORT="tcp://10.0.0.1:6379")
    assert where(RedisProvider()) == {"host": "cache", "port": 6379}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"URL": "redis://cache", "HOST": "other"}, "REDIS_HOST"),
        ({"URL": "redis://cache", "DB": "1"}, "REDIS_DB"),
        ({"URL": "redis://:secret@cache", "PASSWORD": "secret-too"}, "REDIS_PASSWORD"),
        ({"HOST": "cache", "PORT": "secret"}, "REDIS_PORT"),
        ({"URL": "redis://cache", "COMMAND_TIMEOUT": "secret"}, "REDIS_COMMAND_TIMEOUT"),
        ({"URL": "secret://cache"}, "redis://"),
        ({"PASSWORD": "secret"}, "REDIS_URL or REDIS_HOST"),
    ],
)
def test_a_variable_that_breaks_a_rule_is_named_and_its_value_is_not(
    environment: SetEnvironment, variables: dict[str, str], told: str
) -> None:
    environment(**variables)
    with pytest.raises(SettingsValidationError, match=told) as refusal:
        RedisProvider()
    assert "secret" not in str(refusal.value).replace("secret:// ", "")


# Secrets


def test_nothing_that_is_printed_shows_the_password() -> None:
    for provider in (
        RedisProvider("redis://me:hidden@cache"),
        RedisProvider(host="cache", password="hidden"),
        RedisProvider("unix:///run/redis.sock?password=hidden"),
        RedisProvider.from_client(redis.asyncio.Redis(host="cache", password="hidden")),
    ):
        server = server_of(provider)
        for thing in (provider, server, provider.store, provider.safe_url, provider.lock(), server.limits):
            assert "hidden" not in f"{thing!r} {thing}"


@pytest.mark.parametrize("binary", each(redis_binaries(), ""), ids=lambda binary: str(binary or "redis"))
@pytest.mark.parametrize(
    ("login", "config", "told"),
    [
        (":hidden@", {"requirepass": "right"}, "does not accept user and password: check both"),
        ("me:hidden@", {"requirepass": "right"}, "does not accept user and password: check both"),
        ("me:hidden@", {}, "does not accept user and password: check both"),
        ("", {"requirepass": "right"}, "asks for a password: give user and password"),
        ("", {"user": ["default off"]}, "asks for a password: give user and password"),
        (":hidden@", {}, "no password for the default user, and one was given: leave it out, or name the user"),
    ],
)
async def test_a_refused_login_says_what_is_wrong_and_shows_no_password(
    start_redis: StartRedis, binary: Binary | None, login: str, config: dict[str, Config], told: str
) -> None:
    server = start_redis(binary, **config)
    with pytest.raises(BackendUnavailableError, match=told) as refusal:
        await RedisProvider(f"redis://{login}127.0.0.1:{server.port}").check()
    error: BaseException | None = refusal.value
    while error is not None:
        assert "hidden" not in f"{error!r} {error}"
        error = error.__cause__


# Clients


async def test_a_client_lends_its_address_and_stays_its_owners(redis_url: str, namespace: str) -> None:
    client = redis.asyncio.Redis.from_url(f"{redis_url}?db=1", decode_responses=True, max_connections=1)
    provider = RedisProvider.from_client(client, namespace=namespace)
    assert provider.safe_url == redis_url.removesuffix("0") + "1"
    # Its only connection is taken.
    async with client.pubsub() as messages, provider, provider.lock() as backend:
        await messages.subscribe("anything")
        lease = await backend.acquire("lock:a", "h", 30.0, data={"k": "ü"})
        assert lease.granted_to("h")
        assert dict(lease.data) == {"k": "ü"}
        async with provider.store.watch("lock:a") as waiter:
            assert waiter.pushes
    assert await client.ping()
    assert await client.hget(f"{namespace}:lease:lock:a", "holder") == "h"
    await client.aclose()


async def test_of_a_client_only_what_says_where_the_server_is_is_used(redis_url: str) -> None:
    client = redis.asyncio.Redis.from_url(
        redis_url,
        retry=Retry(NoBackoff(), 10),
        retry_on_error=[redis.ConnectionError],
        health_check_interval=1,
        protocol=3,
    )
    server = server_of(RedisProvider.from_client(client))
    assert not [name for name in server.options if name.startswith("retry")]
    connection = server.connection()
    assert (connection.health_check_interval, connection.protocol, connection.socket_timeout) == (0, 2, None)
    await client.aclose()


@pytest.mark.parametrize("client", [redis.Redis(), object(), "redis://cache"])
def test_something_else_than_an_asyncio_client_is_refused(client: object) -> None:
    with pytest.raises(SettingsValidationError, match=r"takes a redis\.asyncio\.Redis"):
        RedisProvider.from_client(client)


def test_a_server_can_be_given_to_stores_and_adapters() -> None:
    server = RedisServer.at({}, host="cache")
    assert RedisStore(server).server is server
    assert RedisLockAdapter(server, namespace="shop").store.namespace == "shop"
