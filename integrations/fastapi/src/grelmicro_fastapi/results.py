"""Dependencies whose results stand in the name of a lock: `LockDep("user:{user.id}", user=Depends(current_user))`."""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fastapi import params
from fastapi.requests import HTTPConnection

from grelmicro.errors import SettingsValidationError
from grelmicro.names import NameTemplate

CONNECTION = "connection"
"""The parameter by which the callables of this package get the request or websocket."""


def check_results(
    title: str, names: Sequence[str], settings: Mapping[str, object], results: Mapping[str, object]
) -> None:
    """Refuse keywords that are no dependencies, or none that a name needs.

    Args:
        title: what is declared, for error texts.
        names: the names of locks.
        settings: what the keywords of settings were given.
        results: all other keywords.

    Raises:
        SettingsValidationError: a keyword is wrong.
    """
    fields = dict.fromkeys(field for name in names for field in NameTemplate(name).fields)
    taken = [name for name, value in settings.items() if isinstance(value, params.Depends)]
    for name in (*taken, *results.keys() & {CONNECTION}):
        raise SettingsValidationError(
            f"{title}: '{name}' means something else here, so it cannot be the name of a dependency's result: "
            f"give the field another name, like {{my_{name}}} and my_{name}=Depends(...)"
        )
    for name, value in results.items():
        if name not in fields:
            raise SettingsValidationError(
                f"{title}: '{name}' is neither a setting nor a field of the name, whose fields are "
                f"{', '.join(fields) or 'none'}: leave it out, or write {{{name}}} in the name"
            )
        if not isinstance(value, params.Depends) or value.dependency is None:
            raise SettingsValidationError(
                f"{title}: '{name}' should be a dependency with what it depends on: {name}=Depends(get_{name})"
            )


def identity(results: Mapping[str, Any]) -> Hashable:
    """What makes equal declarations equal; in early releases of FastAPI a `Depends` has no hash."""
    return tuple(
        (name, type(given), given.dependency, given.use_cache, given.scope, tuple(getattr(given, "scopes", None) or ()))
        for name, given in sorted(results.items())
    )


def signature(results: Mapping[str, Any]) -> inspect.Signature:
    """What FastAPI calls a dependency with: the request, and the results of others."""
    connection = inspect.Parameter(CONNECTION, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=HTTPConnection)
    return inspect.Signature(
        [
            connection,
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=Any)
                for name, given in results.items()
            ),
        ]
    )
