"""The names of databases and caches in the setting `STORE`."""

from collections.abc import Sequence
from difflib import get_close_matches

from grelmicro.errors import SettingsValidationError


def known_alias(kind: str, alias: str, known: Sequence[str]) -> None:
    """Refuse a name that the settings do not have.

    Args:
        kind: `database` or `cache`.
        alias: the name.
        known: the names that there are.

    Raises:
        SettingsValidationError: it is none of them.
    """
    if alias in known:
        return
    near = get_close_matches(alias, known, 1)
    advice = f"did you mean {kind}:{near[0]}?" if near else f"those are {', '.join(known)}"
    raise SettingsValidationError(f"STORE: {kind}:{alias} names no {kind} of {kind.upper()}S: {advice}")
