"""Apps that a test leaves open would serve later tests of its process."""

from collections.abc import Iterator

import pytest

from grelmicro.context import open_apps


@pytest.fixture(autouse=True)
def no_app_left_open() -> Iterator[None]:
    """Fail the test that leaves an app open."""
    before = set(open_apps)
    yield
    left = [app for app in open_apps if app not in before and app.is_open]
    assert not left, "the test left an app open, which would serve the next ones"
