"""The store that the setting `STORE` names."""

from grelmicro.coordination import Coordination
from grelmicro.errors import SettingsValidationError
from grelmicro_django.caches import url_of_cache
from grelmicro_django.databases import url_of_database
from grelmicro_django.settings import read_settings

DATABASE = "database"
CACHE = "cache"


def coordination_of(store: str, namespace: str | None) -> Coordination:
    """The coordination on a store, which is not opened.

    Args:
        store: the URL of a store, `database:ALIAS` or `cache:ALIAS?db=N`.
        namespace: separates this project from others on the same store. None: the default of the core.

    Raises:
        SettingsValidationError: it names no store, or one of its options is not known.
        DependencyNotFoundError: the store's client library is not installed.
    """
    return Coordination.from_url(url_of(store), namespace=namespace)


def url_of(store: str) -> str:
    """The URL of a store, as the settings are now; it connects to nothing.

    Raises:
        SettingsValidationError: it names a database or a cache that cannot have one.
    """
    kind, _, rest = store.partition(":")
    if rest.startswith("//"):
        return store
    if kind == DATABASE:
        return url_of_database(rest)
    if kind == CACHE:
        return url_of_cache(rest)
    return store


def database_of(store: str) -> str | None:
    """The alias of the database that the store is in; None where it is elsewhere."""
    kind, _, rest = store.partition(":")
    return rest if kind == DATABASE and not rest.startswith("//") else None


def store_sql() -> str:
    """The SQL that makes the store's table, which the store makes itself where it may.

    Raises:
        SettingsValidationError: the store has no table, or the settings break a rule.
        DependencyNotFoundError: the store's client library is not installed.
    """
    settings = read_settings()
    backend = coordination_of(settings.STORE, settings.NAMESPACE).lock_backend
    sql = getattr(getattr(backend, "store", None), "table_sql", None)
    if not isinstance(sql, str):
        raise SettingsValidationError("STORE is no database: it has no table, and needs no SQL")
    return sql
