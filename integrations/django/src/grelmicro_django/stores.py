"""The store that the setting `STORE` names."""

from grelmicro.coordination import Coordination


def coordination_of(store: str, namespace: str | None) -> Coordination:
    """The coordination on a store.

    Args:
        store: the URL of a store.
        namespace: separates this project from others on the same store. None: the default of the core.

    Raises:
        SettingsValidationError: it names no store, or one of its options is not known.
        DependencyNotFoundError: the store's client library is not installed.
    """
    return Coordination.from_url(store, namespace=namespace)
