"""The system checks: what is wrong with `GRELMICRO`, said before a command or a request finds out.

A check of another part of the package gets an id of its own here and a line in `register_checks`.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error, Warning, register

from grelmicro import Grelmicro
from grelmicro.errors import DependencyNotFoundError, GrelmicroError, SettingsValidationError
from grelmicro_django.databases import unknown_options
from grelmicro_django.settings import UnknownKeyError, read_settings
from grelmicro_django.stores import coordination_of, database_of
from grelmicro_django.testrun import is_test_run

TAG = "grelmicro"
"""The tag of the checks that connect to nothing."""

STORE_TAG = "grelmicro_store"
"""The tag of the deployment check that connects to the store."""

WRONG = "grelmicro.E001"
UNKNOWN_KEY = "grelmicro.E002"
STORE = "grelmicro.E003"
MISSING_EXTRA = "grelmicro.E004"
UNREACHABLE = "grelmicro.E005"
VIEW = "grelmicro.E006"
"""A view cannot enclose its transaction in its lock."""
MEMORY = "grelmicro.W001"
NOTICED = "grelmicro.W002"
"""The server is set up so that it may lose leases, as with a `maxmemory-policy` that evicts any key."""
UNKNOWN_OPTION = "grelmicro.W003"


def register_checks() -> None:
    """Let `manage.py check` and the commands run them."""
    register(check_settings, TAG)
    register(check_store, STORE_TAG, deploy=True)


def check_settings(**_: Any) -> list[CheckMessage]:
    """Whether the settings name a store that can be used; it connects to nothing."""
    if is_test_run() and not hasattr(django_settings, "GRELMICRO"):
        return []
    try:
        settings = read_settings()
    except UnknownKeyError as error:
        return [_error(error, UNKNOWN_KEY)]
    except SettingsValidationError as error:
        return [_error(error, WRONG)]
    stores = [settings.STORE] if settings.TEST is None else [settings.STORE, settings.TEST.STORE]
    found = [message for store in stores for message in _of_store(store, settings.NAMESPACE)]
    if settings.STORE.startswith("memory:") and not django_settings.DEBUG and not is_test_run():
        found.append(
            Warning(
                "GRELMICRO['STORE'] is in the memory of one process: processes do not exclude each other",
                hint="Give the URL of a store that all of them reach, such as redis://localhost:6379/1.",
                id=MEMORY,
            )
        )
    return found


def check_store(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Whether the store can be opened, and keeps what it is given; one in a database where `databases` names it."""
    try:
        settings = read_settings()
        database = database_of(settings.STORE)
        if database is not None and database not in (databases or ()):
            return []
        coordination = coordination_of(settings.STORE, settings.NAMESPACE)
    except (SettingsValidationError, DependencyNotFoundError):
        return []  # which `check_settings` says
    micro = Grelmicro(uses=[coordination])
    with _noticed() as noticed:
        try:
            with micro:
                pass
        except GrelmicroError as error:
            return [_error(error, UNREACHABLE)]
    return [Warning(text, id=NOTICED) for text in noticed]


def _of_store(store: str, namespace: str | None) -> list[CheckMessage]:
    try:
        coordination_of(store, namespace)
    except DependencyNotFoundError as error:
        return [_error(error, MISSING_EXTRA)]
    except SettingsValidationError as error:
        return [_error(error, STORE)]
    if (alias := database_of(store)) is None:
        return []
    return [
        Warning(
            f"OPTIONS[{option!r}] of the database {alias!r} does not hold for the store in it",
            hint="Give the URL of a store if it should.",
            id=UNKNOWN_OPTION,
        )
        for option in unknown_options(alias)
    ]


def _error(error: GrelmicroError, code: str) -> Error:
    return Error(str(error), id=code)


@contextmanager
def _noticed() -> Iterator[list[str]]:
    """The warnings that a store logs while it is opened; they are logged no more."""
    texts: list[str] = []
    logger = logging.getLogger("grelmicro.coordination")

    def collect(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        texts.append(record.getMessage())
        return False

    logger.addFilter(collect)
    try:
        yield texts
    finally:
        logger.removeFilter(collect)
