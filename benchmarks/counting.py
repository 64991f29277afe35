"""Count what a backend of locks does, from outside, so that it works on any package."""

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

CALLS = ("acquire", "renew", "release", "read", "locked", "owned")
"""The operations of a backend that reach its store, as far as it has them."""


def count_calls(backend: object, calls: Counter[str]) -> None:
    """Count the calls of one backend as `calls`."""
    for name in CALLS:
        if (operation := getattr(backend, name, None)) is not None:
            setattr(backend, name, _counted(operation, calls))


def _counted(operation: Callable[..., Awaitable[object]], calls: Counter[str]) -> Callable[..., Awaitable[object]]:
    async def counted(*args: Any, **kwargs: Any) -> object:
        calls["calls"] += 1
        return await operation(*args, **kwargs)

    return counted


@contextmanager
def counting_probes(calls: Counter[str]) -> Iterator[None]:
    """Count as `probes`, in connections opened meanwhile, looks at whether the file changed, which cost far less."""
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.set_trace_callback(lambda statement: calls.update(probes=int("data_version" in statement)))
        return connection

    with patch.object(sqlite3, "connect", traced):
        yield
