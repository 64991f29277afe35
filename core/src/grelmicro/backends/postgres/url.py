"""Where a PostgreSQL server is: a URL, a host with the rest, or the environment; read strictly, and shown safely."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from grelmicro.config import Duration, check_seconds
from grelmicro.errors import SettingsValidationError
from grelmicro.urls import check_url

COMMAND_TIMEOUT = 5.0
"""Seconds after which a request to the server is given up, unless `command_timeout` says otherwise."""

ENV_PREFIX = "POSTGRES_"
"""What the names of environment variables begin with, unless `env_prefix` says otherwise."""

SCHEMA = "public"
"""Where the table is, unless `schema` says otherwise."""

FORM = "postgresql://[user]:[password]@host:5432/database"

OWN = ("namespace", "schema")
"""Options of a URL that are for the store and not for the server."""

CONNECT_TIMEOUT = "connect_timeout"
"""The option of libpq that asyncpg would send to the server as one of its settings."""

FOREIGN = ("async_fallback", "prepared_statement_cache_size", "prepared_statement_name_func")
"""Options of a URL that are for SQLAlchemy."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and who asks."""

    arguments: Mapping[str, Any] = field(repr=False)
    """What asyncpg takes to connect."""
    safe_url: str
    """The URL without password and options."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options of the URL that are for the store: `namespace` and `schema`."""
    connect_timeout: float = inf
    """Seconds after which connecting is given up, if that is sooner than a request would be."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a store is told about its server, by arguments or by the environment."""

    url: str | None = field(default=None, repr=False)
    host: str | None = None
    port: int | str | None = None
    database: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    env_prefix: str = ENV_PREFIX

    def address(self) -> Address:
        """What they say together.

        Raises:
            SettingsValidationError: nothing says where the server is, or two things do.
        """
        settings = self if self.url is not None or self.host is not None else _from_environment(self)
        if settings.url is not None:
            settings.check_alone()
            return parse(settings.url, settings.password, settings.env_prefix)
        if settings.host is None:
            raise SettingsValidationError(
                "PostgreSQL: url is missing: give it, such as PostgresProvider('postgresql://localhost/shop'), or "
                f"host=, or set the environment variable {self.env_prefix}URL or {self.env_prefix}HOST"
            )
        return settings.composed(settings.host)

    def check_unset(self, beside: str) -> None:
        """Refuse all of them beside something else that says where the server is."""
        for name in ("url", "host", "port", "database", "user", "password"):
            if getattr(self, name) is not None:
                raise SettingsValidationError(f"PostgreSQL: {beside} and {name} are both given: leave one of them out")

    def check_alone(self) -> None:
        """Refuse what the URL says already."""
        beside = [name for name in ("host", "port", "database", "user") if getattr(self, name) is not None]
        if beside:
            raise SettingsValidationError(
                f"PostgreSQL: url and {beside[0]} are both given (as an argument, or as {self.env_prefix}URL "
                f"and {self.env_prefix}{beside[0].upper()}): leave one of them out"
            )

    def composed(self, host: str) -> Address:
        """The address that host, port, database, user and password make."""
        given = {"host": host, "port": _port(self.port), "user": self.user, "password": self.password}
        given["database"] = self.database
        login = f"{quote(self.user, safe='')}@" if self.user else ""
        shown = f"[{host}]" if ":" in host else quote(host, safe="")
        return Address(
            {name: value for name, value in given.items() if value is not None},
            f"postgresql://{login}{shown}:{given['port']}/{quote(self.database or '', safe='')}",
        )


def parse(url: str, password: str | None = None, env_prefix: str = ENV_PREFIX) -> Address:
    """What a URL says, `postgresql+asyncpg://` and the like among them; `password` is one given beside it.

    Raises:
        SettingsValidationError: it has another form, or a password beside that is another one than its own.
    """
    parts = _split(url)
    own = unquote(parts.password) if parts.password else dict(parse_qsl(parts.query)).get("password")
    if password is not None and own is not None and password != own:
        raise SettingsValidationError(
            "PostgreSQL: url has a password, and another one is set on its own (as an argument, or as "
            f"{env_prefix}PASSWORD): leave one of them out"
        )
    query = [("sslmode" if name == "ssl" else name, value) for name, value in parse_qsl(parts.query)]
    dsn = _joined(parts, [(name, value) for name, value in query if name not in (*OWN, CONNECT_TIMEOUT)])
    login = f"{parts.username}@" if parts.username else ""
    safe = f"postgresql://{login}{parts.netloc.rpartition('@')[2]}{parts.path}"
    options = {name: value for name, value in query if name in OWN}
    arguments = {"dsn": dsn} | ({} if password is None else {"password": password})
    return Address(arguments, safe, options, _connect_timeout(dict(query).get(CONNECT_TIMEOUT)))


def limit_of(given: Duration | None, env_prefix: str = ENV_PREFIX) -> float:
    """The limit of a request in seconds: as given, or of POSTGRES_COMMAND_TIMEOUT, or the default.

    Raises:
        SettingsValidationError: it is not a number of seconds.
    """
    if given is not None:
        return check_seconds("command_timeout", given)
    variable = f"{env_prefix}COMMAND_TIMEOUT"
    text = os.environ.get(variable)
    if not text:
        return COMMAND_TIMEOUT
    try:
        return check_seconds(variable, float(text))
    except ValueError:
        raise SettingsValidationError(
            f"{variable} should be a number of seconds, more than 0 and at most ten years, such as 5"
        ) from None


def listening(url: str | None, env_prefix: str = ENV_PREFIX) -> Address | None:
    """Where to listen, if that is said: as given, or in POSTGRES_LISTEN_URL.

    Raises:
        SettingsValidationError: the URL has another form.
    """
    url = os.environ.get(f"{env_prefix}LISTEN_URL") or None if url is None else url
    return None if url is None else parse(url)


def check_schema(schema: object) -> str:
    """`schema`, if a schema of PostgreSQL can have this name.

    Raises:
        SettingsValidationError: none can.
    """
    if isinstance(schema, str) and 0 < len(schema.encode(errors="replace")) < 64 and schema.isprintable():
        return schema
    raise SettingsValidationError(
        "PostgreSQL: schema should be the name of a schema, at most 63 bytes of text: give one, such as 'public'"
    )


def _split(url: object) -> SplitResult:
    """The parts of a URL, which say what its writer meant."""
    url = check_url("PostgreSQL", url, FORM)
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        hosts = [host.rpartition("]")[2].partition(":")[2] for host in parts.netloc.rpartition("@")[2].split(",")]
    except ValueError:
        raise _wrong("cannot be read: write characters like / # ? @ : in a password percent-encoded") from None
    if parts.scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise _wrong("begins with another scheme")
    # Any of these would lead to another host than the one that was meant, with a part of the password in its name.
    if parts.netloc.count("@") > 1 or "@" in parts.path or "#" in url or not all(map(_is_port, hosts)):
        raise _wrong("cannot be read: write characters like / # ? @ : in user and password percent-encoded")
    if not parts.netloc and not parts.path.strip("/") and not query:
        raise _wrong("says neither host nor database")
    kept = [(name, value) for name, value in query if name not in FOREIGN]
    return parts._replace(query=urlencode(kept, quote_via=quote))


def _connect_timeout(text: str | None) -> float:
    """The limit that an option says; as in libpq, 0 and less say none."""
    if text is None:
        return inf
    try:
        seconds = int(text)
    except ValueError:
        raise _wrong("has an option connect_timeout that is not a whole number of seconds") from None
    return seconds if seconds > 0 else inf


def _joined(parts: SplitResult, query: Sequence[tuple[str, str]]) -> str:
    options = f"?{urlencode(query, quote_via=quote)}" if query else ""
    return f"postgresql://{parts.netloc}{parts.path}{options}"


def _is_port(text: str) -> bool:
    return text == "" or (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536)


def _port(given: int | str | None) -> int:
    text = str(5432 if given is None else given)
    if not text or not _is_port(text):
        raise SettingsValidationError(
            "PostgreSQL: port should be a number from 1 to 65535: give the one of the server, such as 5432"
        )
    return int(text)


def _from_environment(given: Settings) -> Settings:
    """What the environment says, for all that was not given; a variable that is empty says nothing."""

    def found(*names: str) -> str | None:
        variables = [given.env_prefix + name for name in names]
        return next((os.environ[variable] for variable in variables if os.environ.get(variable)), None)

    url, host = found("URL"), found("HOST")
    if url is not None:
        return Settings(url, host=host, password=given.password or found("PASSWORD"), **_named(given))
    return Settings(
        host=host,
        port=given.port if given.port is not None else found("PORT"),
        database=given.database or found("DB", "DATABASE"),
        user=given.user or found("USER"),
        password=given.password if given.password is not None else found("PASSWORD"),
        env_prefix=given.env_prefix,
    )


def _named(given: Settings) -> dict[str, Any]:
    return {"port": given.port, "database": given.database, "user": given.user, "env_prefix": given.env_prefix}


def _wrong(rule: str) -> SettingsValidationError:
    return SettingsValidationError(f"PostgreSQL: url {rule}; its form is {FORM}")
