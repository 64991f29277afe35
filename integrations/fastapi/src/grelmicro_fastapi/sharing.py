"""`share`: what several dependencies of one request hold is taken once."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NamedTuple

from fastapi.requests import HTTPConnection

from grelmicro_fastapi.declared import separate_locks

HOLDS = "grelmicro.holds"
"""Where a request's scope keeps what it holds."""


class Key(NamedTuple):
    """What a dependency holds."""

    waits: bool
    """Whether it is waited for."""
    kind: str
    names: tuple[str, ...]


class Shared:
    """What several dependencies of one request hold; the last to leave gives it back."""

    def __init__(self, holds: "dict[Key, Shared]", key: Key, held: AbstractAsyncContextManager[Any]) -> None:
        self._holds = holds
        self._key = key
        self._held = held
        self._handle: Any = None
        self._users = 0

    async def __aenter__(self) -> Any:
        if not self._users:
            self._handle = await self._held.__aenter__()
            self._holds[self._key] = self
        self._users += 1
        return self._handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            del self._holds[self._key]
            await self._held.__aexit__(kind, error, traceback)


def share(connection: HTTPConnection, key: Key, hold: Callable[[], AbstractAsyncContextManager[Any]]) -> Shared:
    """What this request holds under `key`, or is to hold with `hold`.

    Raises:
        SettingsValidationError: it would wait for this while it holds something else.
    """
    holds: dict[Key, Shared] = connection.scope.setdefault(HOLDS, {})
    if key in holds:
        return holds[key]
    others = [held.names for held in holds if held.waits]
    if others and key.waits:
        raise separate_locks(connection.url.path, *others, key.names)
    return Shared(holds, key, hold())
