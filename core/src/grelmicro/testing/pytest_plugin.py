"""Fixtures for the tests of an application: `pytest_plugins = ["grelmicro.testing.pytest_plugin"]` in `conftest.py`."""

from collections.abc import Iterator

import pytest

from grelmicro import Grelmicro
from grelmicro.testing.clock import MovableClock
from grelmicro.testing.memory import clock_of, on_memory


@pytest.fixture
def grelmicro_app() -> Grelmicro:
    """The application's own `Grelmicro`: a project overrides this fixture, in the same `conftest.py`."""
    pytest.fail("define a fixture grelmicro_app that returns your Grelmicro", pytrace=False)


@pytest.fixture
def grelmicro_memory(grelmicro_app: Grelmicro, request: pytest.FixtureRequest) -> Iterator[Grelmicro]:
    """The app, with its leases in a memory store of this test's own; the test opens it, after this."""
    clock = MovableClock() if "grelmicro_clock" in request.fixturenames else None
    with on_memory(grelmicro_app, clock=clock) as app:
        yield app


@pytest.fixture
def grelmicro_clock(grelmicro_memory: Grelmicro) -> MovableClock:
    """As `grelmicro_memory`, on a clock that stands still until the test moves it: that clock."""
    clock = clock_of(grelmicro_memory)
    if not isinstance(clock, MovableClock):
        pytest.fail("name grelmicro_clock among the arguments of the test, or with usefixtures", pytrace=False)
    return clock
