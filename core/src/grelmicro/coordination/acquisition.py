"""What `acquire()` of a lock returns: a coroutine that can also be entered."""

from collections.abc import Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

H = TypeVar("H", bound=AbstractAsyncContextManager[Any])


class Acquisition(Coroutine[Any, Any, H]):
    """The taking of a lock, which begins when it is awaited or entered.

        handle = await lock.acquire(timeout=2)
        async with lock.acquire(timeout=2) as handle:
            ...

    Everything that takes a coroutine takes it: `asyncio.create_task`, `wait_for`, `gather` and `shield`.
    """

    __slots__ = ("_coroutine", "_held")

    def __init__(self, coroutine: Coroutine[Any, Any, H]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, H]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> H:
        self._held = held = await self._coroutine
        await held.__aenter__()
        return held

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._held.__aexit__(kind, error, traceback)

    def send(self, value: Any) -> Any:
        """See `Coroutine.send`."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """See `Coroutine.throw`."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """See `Coroutine.close`."""
        self._coroutine.close()

    if not TYPE_CHECKING:  # which would take it for anything that has any attribute

        def __getattr__(self, name: str) -> object:
            # Scopes of anyio, names of tasks and debuggers look at `cr_frame`, `cr_running`, `__qualname__` and so on.
            return getattr(self._coroutine, name)
