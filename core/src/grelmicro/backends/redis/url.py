"""The URLs of Redis servers: read strictly, since one that is misread leads to the wrong server."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from grelmicro.errors import SettingsValidationError
from grelmicro.urls import check_url

LIMITS = ("command_timeout", "max_connections")
TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
KNOWN = ("db", "namespace", *LIMITS)
"""The options of every URL; those with TLS have `TLS` besides, those of a socket `user` and `password`."""

ALIASES = {"valkey": "redis", "valkeys": "rediss"}
"""Schemes of URLs for Valkey, which is spoken to as Redis is."""

FORMS = "redis://[user]:[password]@host:6379/0, rediss://... for TLS, or unix:///path/to/redis.sock?db=0"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and who asks."""

    scheme: str
    host: str = "localhost"
    port: int = 6379
    path: str = ""
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None

    @property
    def safe_url(self) -> str:
        """The URL without user and password."""
        if self.scheme == "unix":
            return f"unix://{quote(self.path)}?db={self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.db}"

    def with_login(self, user: str | None, password: str | None, env_prefix: str = "REDIS_") -> Self:
        """With a user and a password that were set beside the URL.

        Raises:
            SettingsValidationError: the URL has others.
        """
        for setting, value, own in (("user", user, self.user), ("password", password, self.password)):
            if value is not None and own is not None and value != own:
                raise SettingsValidationError(
                    f"Redis: url has a {setting}, and {setting} is also set on its own (as an argument, or as "
                    f"{env_prefix}{setting.upper()}): leave one of them out"
                )
        return replace(self, user=self.user or user, password=self.password or password)


def parse(url: str) -> Address:
    """What a URL says.

    Raises:
        SettingsValidationError: it has another form, an option that is not known, or a value that breaks a rule.
    """
    check_url("Redis", url, FORMS)
    try:
        parts = urlsplit(url)
        parts = parts._replace(scheme=ALIASES.get(parts.scheme, parts.scheme))
        port = parts.port
    except ValueError:
        raise _wrong(
            "has no valid host and port: write characters like / # ? @ : in a password percent-encoded"
        ) from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise _wrong("begins with another scheme")
    if parts.fragment or "#" in url:
        raise _wrong("has a #: in a password, write it as %23")
    options = _options(parts)
    base = Address(
        parts.scheme,
        user=unquote(parts.username) if parts.username else options.get("user"),
        password=unquote(parts.password) if parts.password else options.get("password"),
        limits={name: options[name] for name in LIMITS if name in options},
        namespace=options.get("namespace"),
    )
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.startswith("/") or parts.path == "/":
            raise _wrong("has no absolute path")
        return replace(base, path=unquote(parts.path), db=_db(options.get("db", "")))
    in_path = unquote(parts.path).removeprefix("/")
    if in_path and "db" in options:
        raise _wrong("has a database in its path and as an option: leave one out")
    return replace(
        base,
        host=unquote(parts.hostname or "localhost"),
        port=port or 6379,
        db=_db(in_path or options.get("db", "")),
        tls=tls_options(options) if parts.scheme == "rediss" else {},
    )


def _options(parts: SplitResult) -> dict[str, str]:
    known: tuple[str, ...] = KNOWN
    if parts.scheme == "rediss":
        known += TLS
    elif parts.scheme == "unix":
        known += ("user", "password")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if options.keys() - set(known):
        raise SettingsValidationError(
            f"Redis: url has an option that is not known: those of {parts.scheme}:// are {', '.join(known)}"
        )
    return options


def _db(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _wrong("names a database that is not a number")
    return int(text)


def tls_options(options: Mapping[str, str]) -> dict[str, object]:
    """What the options of a URL say about TLS; without any, the server's certificate is checked."""
    found: dict[str, object] = {name: options[name] for name in TLS if name in options}
    required = options.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    if required not in ("none", "optional", "required"):
        raise _wrong("has an option ssl_cert_reqs that is none of none, optional, required")
    check = options.get("ssl_check_hostname", "true" if required != "none" else "false").lower()
    if check not in ("true", "false"):
        raise _wrong("has an option ssl_check_hostname that is neither true nor false")
    return {**found, "ssl_cert_reqs": required, "ssl_check_hostname": check == "true" and required != "none"}


def _wrong(rule: str) -> SettingsValidationError:
    return SettingsValidationError(f"Redis: url {rule}; give {FORMS}")
