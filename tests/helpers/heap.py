"""Garbage: what a test leaves is collected at its end, and what the run keeps is not searched each time."""

import gc
import logging
import sys
import traceback
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Set apart what was loaded and collected: it stays, and thousands of tests collect garbage when they end.

    A search of all of it takes a fifth of a second, and finds only what the test has made anyway.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail the test that leaves an error which shows only when garbage is collected.

    That of a task which nothing retrieved, or of a finalizer. Without this it shows during any later test of the
    process, which then fails in place of the one that left it.
    """
    reported = _Reported()
    logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    logger.addHandler(reported)
    sys.unraisablehook = reported.add
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook
        logger.removeHandler(reported)
    gc.freeze()  # what outlives the test is not searched again at the end of each later one
    if reported.texts:
        pytest.fail("\n".join([f"{item.nodeid} left errors behind:", *reported.texts]), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish() -> Generator[None, object, object]:
    """What the run itself looks for at its end is looked for everywhere."""
    gc.unfreeze()
    return (yield)


class _Reported(logging.Handler):
    """The errors that show while this is the handler of asyncio's log and the hook of finalizers."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(logging.Formatter().format(record))

    def add(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Note the error of a finalizer, but not the object, which would live on."""
        self.texts.append(f"{unraisable.err_msg or 'Exception ignored in'}: {unraisable.object!r}")
        self.texts.extend(traceback.format_exception(unraisable.exc_value))
