"""Garbage: what a test leaves is collected at its end, and what the run keeps is not searched each time."""

import gc
import logging
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Fail the test whose tasks and futures end with an error that nothing retrieved.

    asyncio logs such an error when the task is collected. Without this that happens during any later test of the
    process, which then fails in place of the one that left it.
    """
    torn_down = yield
    reported = _Reported()
    logger = logging.getLogger("asyncio")
    logger.addHandler(reported)
    try:
        gc.collect()
    finally:
        logger.removeHandler(reported)
    if reported.texts:
        pytest.fail("\n".join([f"{item.nodeid} left errors that nothing retrieved:", *reported.texts]), pytrace=False)
    return torn_down


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish() -> Generator[None, object, object]:
    """What the run itself looks for at its end is looked for everywhere."""
    gc.unfreeze()
    return (yield)


class _Reported(logging.Handler):
    """The errors that asyncio logs while this is its handler."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(logging.Formatter().format(record))
