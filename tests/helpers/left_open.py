"""Apps that a test leaves open would serve later tests of its process."""

import time
from collections.abc import Iterator

import pytest

from grelmicro.context import open_apps

CLOSING_S = 5.0  # an app that no longer has users may be closing in a thread


@pytest.fixture(autouse=True)
def no_app_left_open() -> Iterator[None]:
    """Fail the test that leaves an app open."""
    before = set(open_apps)
    yield
    deadline = time.monotonic() + CLOSING_S
    while any(app not in before and app.is_open for app in list(open_apps)):
        assert time.monotonic() < deadline, "the test left an app open, which would serve the next ones"
        time.sleep(0.01)
