"""Aids for the tests of an application that uses locks."""

from types import TracebackType

from grelmicro import Grelmicro
from grelmicro.coordination import Lock, LockConfig, LockHandle, LockNotOwnedError, ThreadLockHandle


def held_elsewhere(
    micro: Grelmicro, name: str, *, timeout: float = 5.0, lease_duration: float = 60.0
) -> "HeldElsewhere":
    """Hold a lock as another worker would, so that the tested code finds it busy.

        with TestClient(app) as client, held_elsewhere(micro, "cart:42"):
            assert client.post("/carts/42/checkout").status_code == 409

    `with` works in every thread but that of the event loop on which the app is open, and `async with` on that loop.
    Both give the other worker's handle.

    Args:
        micro: the app under test; it must be open when the block is entered.
        name: the lock's full name.
        timeout: seconds to wait for it.
        lease_duration: seconds after which the other worker loses it, as if it had died.
    """
    return HeldElsewhere(micro, name, timeout, LockConfig(worker="elsewhere", lease_duration=lease_duration))


class HeldElsewhere:
    """What `held_elsewhere` returns.

    Entering it raises `LockTimeoutError` when somebody keeps the lock for the whole timeout, and `OutOfContextError`
    when the app is not open or the form is not the one for this thread.
    """

    def __init__(self, micro: Grelmicro, name: str, timeout: float, config: LockConfig) -> None:
        self._micro = micro
        self._name = name
        self._timeout = timeout
        self._config = config
        self._in_thread: ThreadLockHandle | None = None
        self._on_loop: LockHandle | None = None

    def __enter__(self) -> ThreadLockHandle:
        self._in_thread = self._lock().from_thread.acquire(timeout=self._timeout)
        return self._in_thread

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._in_thread is not None:
                self._in_thread.release()
        except LockNotOwnedError:
            return  # the test let it run out, or released it itself

    async def __aenter__(self) -> LockHandle:
        self._on_loop = await self._lock().acquire(timeout=self._timeout)
        return self._on_loop

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._on_loop is not None:
                await self._on_loop.release()
        except LockNotOwnedError:
            return

    def _lock(self) -> Lock:
        """Another worker is another instance: nothing of the app's own locks is shared with it."""
        return Lock.from_config(self._name, self._config, backend=self._micro.coordination.lock_backend)
