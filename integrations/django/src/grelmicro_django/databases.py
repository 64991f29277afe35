"""The store in a database of the project: `database:ALIAS`."""

import os
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections

from grelmicro.errors import SettingsValidationError
from grelmicro_django.aliases import known_alias

TRANSLATED = frozenset(
    (
        *("application_name", "connect_timeout", "options", "passfile", "service", "target_session_attrs"),
        *("dbname", "host", "password", "port", "user"),
        *("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version", "krbsrvname", "gsslib"),
    )
)
"""The `OPTIONS` of PostgreSQL that hold for the store too."""

IGNORED = frozenset(
    (
        *("pool", "isolation_level", "server_side_binding", "cursor_factory", "context", "prepare_threshold"),
        *("autocommit", "row_factory", "connection_factory", "client_encoding", "fallback_application_name"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"),
        *("sslcompression", "sslsni", "load_balance_hosts"),
    )
)
"""The `OPTIONS` of PostgreSQL that say how Django uses a connection."""

REFUSED: Mapping[str, frozenset[str]] = {
    "assume_role": frozenset(),
    "hostaddr": frozenset(),
    "requirepeer": frozenset(),
    "require_auth": frozenset(),
    "channel_binding": frozenset(("disable", "prefer")),
    "gssencmode": frozenset(("disable", "prefer")),
    "sslcertmode": frozenset(("disable", "allow")),
}
"""The `OPTIONS` of PostgreSQL without which the store would be another one, be used by another role, or trust more
than Django does; with the values that change nothing."""

IN_MEMORY = (":memory:", "mode=memory")


def url_of_database(alias: str) -> str:
    """The URL of the store in a database, as the settings of its connection are now; it connects to nothing.

    In a test run they name the test's database, and in a parallel one its clone.

    Raises:
        SettingsValidationError: there is no such database, or no store can be in it.
    """
    known_alias("database", alias, list(connections))
    connection = connections[alias]
    make = _OF_VENDOR.get(connection.vendor)
    if make is None:
        raise _refused(alias, f"is {connection.display_name}, in which there can be no store")
    return make(alias, connection.settings_dict)


def unknown_options(alias: str) -> list[str]:
    """The `OPTIONS` of a PostgreSQL database of which it is not known what they mean for a store; they are ignored."""
    if alias not in connections or connections[alias].vendor != "postgresql":
        return []
    options = connections[alias].settings_dict["OPTIONS"]
    return sorted(name for name in options if name not in TRANSLATED | IGNORED | REFUSED.keys())


def _postgresql(alias: str, settings: Mapping[str, Any]) -> str:
    given: Mapping[str, Any] = settings["OPTIONS"]
    for option, harmless in REFUSED.items():
        if (value := given.get(option)) is not None and value not in harmless:
            raise _refused(alias, f"has OPTIONS[{option!r}], which a store cannot follow")
    options = {name: str(value) for name, value in given.items() if name in TRANSLATED and value is not None}
    name = options.pop("dbname", None) or ("postgres" if settings["NAME"] is None else str(settings["NAME"]))
    # Those of Django's own keys win, as they do for its connections.
    parts = {key: str(settings[key.upper()] or options.pop(key, "")) for key in ("user", "password", "host", "port")}
    options = {name: value for name, value in options.items() if name not in parts}
    host = _hosts(parts["host"], parts["port"])
    if not host:
        options |= {name: parts[name] for name in ("host", "port") if parts[name]}
    login = quote(parts["user"], safe="")
    # A password without a user is one for the user that the service or the system names.
    if parts["password"]:
        if login:
            login += f":{quote(parts['password'], safe='')}"
        else:
            options["password"] = parts["password"]
    if not (name or options.get("service")):
        raise _refused(alias, "has neither NAME nor OPTIONS['service']")
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    # An empty name after the slash would win over that of the service.
    path = f"/{quote(name, safe='')}" if name else ""
    return f"postgresql://{login}{'@' if login else ''}{host}{path}{query}"


def _hosts(hosts: str, ports: str) -> str:
    """Hosts and ports as they stand in a URL; empty where a socket in the file system, or a default, is used."""
    each = hosts.split(",")
    if not hosts or any(not host or host.startswith(("/", "@")) for host in each):
        return ""
    numbers = ports.split(",")
    numbers = numbers * len(each) if len(numbers) == 1 else numbers
    return ",".join(_host(host, port) for host, port in zip(each, numbers, strict=False))


def _host(host: str, port: str) -> str:
    shown = f"[{host}]" if ":" in host else quote(host, safe="")
    return f"{shown}:{port}" if port else shown


def _sqlite(alias: str, settings: Mapping[str, Any]) -> str:
    name = os.fspath(settings["NAME"] or "")
    if not name or any(mark in name for mark in IN_MEMORY):
        raise _refused(alias, "is in memory, where no other process sees a lock")
    if name.startswith("file:"):
        raise _refused(alias, "is named by a URI")
    return f"sqlite:///{quote(os.path.abspath(name))}.locks"


_OF_VENDOR: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {"postgresql": _postgresql, "sqlite": _sqlite}


def _refused(alias: str, why: str) -> SettingsValidationError:
    return SettingsValidationError(
        f"STORE: the database {alias!r} {why}: give the URL of a store, such as redis://localhost:6379/1"
    )
