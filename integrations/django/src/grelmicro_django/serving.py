"""The app that serves this process: it is opened by its first use, and replaced when the settings change."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from grelmicro_django.settings import NAME, Settings, read_settings
from grelmicro_django.stores import coordination_of
from grelmicro_django.testrun import is_test_run

FOLLOWED = (NAME, "DATABASES", "CACHES")
"""The settings on which a store depends."""


class Served:
    """An open app with the number of blocks that use it."""

    def __init__(self, micro: Grelmicro) -> None:
        self.micro = micro
        self.users = 0
        self.replaced = False


class Serving:
    """The app of a process, on an event loop in a thread.

    One that is replaced stays open until its last user has ended, so that a lease is released where it was acquired.
    """

    def __init__(self) -> None:
        self.private: Callable[[], Coordination] = partial(coordination_of, "memory://", None)
        """What makes the private store of a test run."""
        self.start_anew()

    def start_anew(self) -> None:
        """Have no app, as in a child that was forked."""
        self._served: Served | None = None
        self._changing = threading.Lock()  # for moments only: event loops acquire it too
        self._opening = threading.Lock()
        self._replacements = 0
        self._overrides = 0

    def enter(self) -> Served:
        """Add a user of the app, which is opened where it is not open.

        Raises:
            SettingsValidationError: `GRELMICRO` breaks a rule.
            CoordinationBackendError: the store failed.
            OutOfContextError: an event loop runs in this thread.
        """
        with self._opening:
            if (served := self.enter_at_once()) is not None:
                return served
            replacements = self._replacements
            served = _opened(self.coordination())
            with self._changing:
                served.users += 1
                if replacements == self._replacements:
                    self._served = served
                else:  # the settings changed meanwhile: nothing but this user uses it
                    served.replaced = True
            return served

    def enter_at_once(self) -> Served | None:
        """Add a user of the app if it is open; it never waits for a store."""
        with self._changing:
            served = self._served
            if served is None or not served.micro.is_open:
                return None
            served.users += 1
            return served

    def leave(self, served: Served) -> bool:
        """Remove a user; whether the app is to be closed now."""
        with self._changing:
            served.users -= 1
            return served.replaced and not served.users

    def replace(self) -> None:
        """Let the next user open an app anew; the present one closes with its last user."""
        with self._changing:
            self._replacements += 1
            served, self._served = self._served, None
            if served is None:
                return
            served.replaced = True
            ended = not served.users
        if ended:
            close(served)

    def follow(self, *, overridden: bool) -> None:
        """The setting `GRELMICRO` was overridden for a test, or is as before again."""
        self._overrides = max(self._overrides + (1 if overridden else -1), 0)

    def coordination(self) -> Coordination:
        """A new coordination on the store of the settings, or on a private one, as in a test run.

        Raises:
            SettingsValidationError: `GRELMICRO` breaks a rule.
        """
        if not is_test_run() or self._overrides:
            settings = read_settings()
            return coordination_of(settings.STORE, settings.NAMESPACE)
        given = _test_settings()
        if given is None or given.TEST is None:
            return self.private()
        return coordination_of(given.TEST.STORE, given.NAMESPACE)


def _test_settings() -> Settings | None:
    """The settings of the project in a test run, which may have none."""
    from django.conf import settings

    return read_settings() if hasattr(settings, NAME) else None


def _opened(coordination: Coordination) -> Served:
    micro = Grelmicro(uses=[coordination])
    micro.open()
    return Served(micro)


def close(served: Served) -> None:
    """Close an app that was replaced. It waits for its thread, which an event loop must not do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        served.micro.close()
    else:
        threading.Thread(target=served.micro.close, name="grelmicro-close").start()


serving = Serving()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=serving.start_anew)


def renew(*, setting: str, enter: bool, **_: Any) -> None:
    """A setting was changed: open anew what depends on it."""
    if setting == NAME:
        serving.follow(overridden=enter)
    if setting in FOLLOWED:
        serving.replace()


@contextmanager
def served() -> Iterator[Grelmicro]:
    """The app of this process for a block, in a thread without a running event loop; raises what `enter` raises."""
    entered = serving.enter()
    try:
        yield entered.micro
    finally:
        if serving.leave(entered):
            close(entered)


@asynccontextmanager
async def aserved() -> AsyncIterator[Grelmicro]:
    """The same in a coroutine: a store is opened in a thread."""
    entered = serving.enter_at_once() or await _enter_in_thread()
    try:
        yield entered.micro
    finally:
        if serving.leave(entered):
            close(entered)


async def _enter_in_thread() -> Served:
    """`Serving.enter` in a thread; one that is not awaited to its end adds no user."""
    deciding = threading.Lock()
    entered: list[Served] = []
    given_up = False

    def leave_all() -> None:
        while entered:
            served = entered.pop()
            if serving.leave(served):
                close(served)

    def enter() -> None:
        served = serving.enter()
        with deciding:
            entered.append(served)
            if given_up:
                leave_all()

    try:
        await asyncio.to_thread(enter)
    except BaseException:
        with deciding:
            given_up = True
            leave_all()
        raise
    return entered[0]
