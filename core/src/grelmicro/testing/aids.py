"""Aids for the tests of an application that uses locks."""

import re
from types import TracebackType

from grelmicro import Grelmicro
from grelmicro.config import Duration, in_seconds
from grelmicro.coordination import Lock, LockConfig, LockHandle, LockNotOwnedError, TaskLock, ThreadLockHandle
from grelmicro.errors import OutOfContextError, SettingsValidationError

FIELD = re.compile(r"\{[^\W\d]\w*(\.\w+)*\}")
"""A field of a template. Other braces, as in JSON, are part of a name."""


def held_elsewhere(
    micro: Grelmicro, name: str | Lock | TaskLock, *, timeout: Duration = 5.0, lease_duration: Duration = 60.0
) -> "HeldElsewhere":
    """Hold a lock or a task lock as another worker would, so that the tested code finds it busy.

        with TestClient(app) as client, held_elsewhere(micro, "cart:42"):
            assert client.post("/carts/42/checkout").status_code == 409

    `with` works in every thread but that of the event loop on which the app is open, and `async with` on that loop.
    Both give the other worker's handle.

    Args:
        micro: the app under test; it must be open when the block is entered.
        name: a lock's full name; or a `Lock` or `TaskLock`, of which the name counts, and the backend if it was given
            one. For what `TaskLockDep("report:{day}")` holds, `TaskLock("report:7")`.
        timeout: seconds to wait for it.
        lease_duration: seconds after which the other worker loses it, as if it had died.

    Raises:
        SettingsValidationError: `name` is none of these, or a template such as `cart:{cart_id}`, which no lock that
            the tested code takes has for its name.
    """
    if not isinstance(name, str | Lock | TaskLock):
        raise SettingsValidationError(
            f"held_elsewhere() takes the name of a lock, a Lock or a TaskLock, not {type(name).__name__}"
        )
    if isinstance(name, str) and FIELD.search(name):
        raise SettingsValidationError(
            f"held_elsewhere(): {name!r} looks like a template: give the name itself, such as 'a:1', "
            f"or Lock({name!r}) where that is the name"
        )
    return HeldElsewhere(
        micro, name, timeout, LockConfig(worker="elsewhere", lease_duration=in_seconds(lease_duration))
    )


def check_entered(micro: Grelmicro, aid: str) -> None:
    """Raise `OutOfContextError` if the app is not open."""
    if not micro.is_open:
        raise OutOfContextError(
            f"{aid}: the app is not open: enter it first, with `with TestClient(app)` or `async with micro`"
        )


class OthersTaskLock(Lock):
    """A task lock as another worker has it. A test waits for it as for a lock, and it has no minimum hold."""

    kind = "tasklock"


class HeldElsewhere:
    """What `held_elsewhere` returns.

    Entering it raises `LockTimeoutError` when somebody keeps the lock for the whole timeout, and `OutOfContextError`
    when the app is not open or the form is not the one for this thread.
    """

    def __init__(self, micro: Grelmicro, lock: str | Lock | TaskLock, timeout: Duration, config: LockConfig) -> None:
        self._micro = micro
        self._what = lock
        self._timeout = timeout
        self._config = config
        self._in_thread: ThreadLockHandle | None = None
        self._on_loop: LockHandle | None = None

    def __enter__(self) -> ThreadLockHandle:
        self._in_thread = self.lock().from_thread.acquire(timeout=self._timeout)
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
        self._on_loop = await self.lock().acquire(timeout=self._timeout)
        return self._on_loop

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._on_loop is not None:
                await self._on_loop.release()
        except LockNotOwnedError:
            return

    def lock(self) -> Lock:
        """The lock as the other worker has it: another instance, with which the app's own ones share nothing."""
        check_entered(self._micro, "held_elsewhere()")
        if isinstance(self._what, str):
            return Lock.from_config(self._what, self._config, backend=self._micro.coordination)
        backend = self._what._source.of(self._micro)
        if isinstance(self._what, TaskLock):
            return OthersTaskLock.from_config(self._what.name, self._config, backend=backend)
        return Lock.from_config(self._what.name, self._config, backend=backend)
