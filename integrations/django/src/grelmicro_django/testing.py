"""Aids for the tests of a project: locks that another worker holds, lost leases, and time that is moved."""

import asyncio
import time
import unittest
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from grelmicro import Grelmicro
from grelmicro.config import Duration
from grelmicro.coordination import Coordination, LeaseHolder, LoopLockHandle, ThreadLockHandle
from grelmicro.errors import LockNotOwnedError, OutOfContextError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.testing import MovableClock, held_elsewhere
from grelmicro_django.serving import aserved, served, serving
from grelmicro_django.testrun import is_test_run

T = TypeVar("T")


class GrelmicroLocks:
    """The locks of the project in a test: the fixture `grelmicro_locks`, and that attribute of `GrelmicroTestMixin`."""

    def __init__(self) -> None:
        self._clock = MovableClock(wall=time.time(), running=True)

    def held_elsewhere(self, name: str, *, timeout: Duration = 5.0, lease_duration: Duration = 60.0) -> "HeldElsewhere":
        """Hold a lock as another worker would, so that the tested code finds it busy.

            with grelmicro_locks.held_elsewhere("order:1"):
                assert client.post("/orders/1/ship").status_code == 409

        `with` is for synchronous tests and `async with` for coroutines. Both give the other worker's handle.

        Args:
            name: the full name of a lock or a singleton, such as `order:1`.
            timeout: seconds to wait for it.
            lease_duration: seconds after which the other worker loses it, as if it had died.

        Entering it raises:
            LockTimeoutError: it was held for the whole timeout.
            SettingsValidationError: the name is a template, or a number is none.
        """
        return HeldElsewhere(name, timeout, lease_duration)

    def holder(self, name: str) -> LeaseHolder | None:
        """The holder of a lock or a singleton; None if it is free. `worker` is "elsewhere" for `held_elsewhere`."""

        def read() -> LeaseHolder | None:
            with served() as micro:
                return _call(micro, micro.coordination.holder_of(name))

        return _run(read)

    def lose(self, name: str) -> LeaseHolder:
        """Take a lock away from its holder, as if that had been paused for longer than its lease.

        Returns:
            The holder that has lost it.

        Raises:
            LockNotOwnedError: the lock is free.
        """

        def lose() -> LeaseHolder | None:
            with served() as micro:
                return _call(micro, micro.coordination.break_lock(name))

        holder = _run(lose)
        if holder is None:
            raise LockNotOwnedError(f"lose(): lock '{name}' is free: no holder can lose it")
        return holder

    def advance(self, seconds: Duration) -> None:
        """Let time pass for the leases, besides the time that the test takes.

        Args:
            seconds: how much.

        Raises:
            SettingsValidationError: `seconds` is no number from 0 to ten years.
            OutOfContextError: the leases are on another store than the private one, whose time cannot be moved.
        """

        def advance() -> None:
            with served() as micro:
                if micro.coordination.lock_backend.clock is not self._clock:
                    raise OutOfContextError(
                        "advance(): this test run has a store of its own (TEST, or overridden settings), "
                        "whose time cannot be moved: leave that out for this test"
                    )
                self._clock.from_thread.advance(seconds)

        _run(advance)

    def make_private(self) -> Coordination:
        """The coordination on the private store of this test."""
        return Coordination(MemoryProvider(clock=self._clock))


class HeldElsewhere:
    """What `GrelmicroLocks.held_elsewhere` returns."""

    def __init__(self, name: str, timeout: Duration, lease_duration: Duration) -> None:
        self._in = partial(held_elsewhere, name=name, timeout=timeout, lease_duration=lease_duration)
        self._timeout = timeout
        self._entered: ExitStack | None = None
        self._aentered: AsyncExitStack | None = None

    def __enter__(self) -> ThreadLockHandle:
        with ExitStack() as stack:
            handle = stack.enter_context(self._in(stack.enter_context(served())))
            self._entered = stack.pop_all()
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(kind, error, traceback)

    async def __aenter__(self) -> LoopLockHandle:
        async with AsyncExitStack() as stack:
            other = self._in(await stack.enter_async_context(aserved()))
            handle = await other.lock().from_loop.acquire(timeout=self._timeout)
            stack.push_async_callback(_release, handle)
            self._aentered = stack.pop_all()
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered, self._aentered = self._aentered, None
        if entered is not None:
            await entered.__aexit__(kind, error, traceback)


async def _release(handle: LoopLockHandle) -> None:
    with suppress(LockNotOwnedError):  # the test let it run out, or released it itself
        await handle.release()


def _run(work: Callable[[], T]) -> T:
    """Call `work` in a thread without an event loop, as this one may not be: the test waits for it."""
    with ThreadPoolExecutor(1, "grelmicro-testing") as thread:
        return thread.submit(work).result()


def _call(micro: Grelmicro, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, micro.get_loop()).result()


@contextmanager
def fresh_locks() -> Iterator[GrelmicroLocks]:
    """The aids for a test, which begins and ends without any leases in the private store of the test run.

    Raises:
        OutOfContextError: no test run prepared its environment, so that the locks would be those of the project.
    """
    if not is_test_run():
        raise OutOfContextError(
            "grelmicro_locks: no test run has begun, so the locks would be on the project's own store: run the tests "
            "by pytest-django or `manage.py test`, or call django.test.utils.setup_test_environment() before"
        )
    locks = GrelmicroLocks()
    before, serving.private = serving.private, locks.make_private
    serving.replace()
    try:
        yield locks
    finally:
        serving.private = before
        serving.replace()


class GrelmicroTestMixin(unittest.TestCase):
    """Gives tests under `manage.py test` the attribute `grelmicro_locks`, and lets each begin without any leases.

    class ShipTests(GrelmicroTestMixin, TestCase):
        def test_busy(self):
            with self.grelmicro_locks.held_elsewhere("order:1"):
                self.assertEqual(self.client.post("/orders/1/ship").status_code, 409)
    """

    grelmicro_locks: GrelmicroLocks

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """See `unittest.TestCase.run`."""
        with fresh_locks() as self.grelmicro_locks:
            return super().run(result)

    def debug(self) -> None:
        """See `unittest.TestCase.debug`."""
        with fresh_locks() as self.grelmicro_locks:
            super().debug()
