"""A Django project for tests that need no process of their own."""

from collections.abc import Iterator

import django
import pytest
from django.conf import settings
from django.test.utils import setup_test_environment, teardown_test_environment

from grelmicro_django.serving import serving


def pytest_configure() -> None:
    """Configure Django once in each process that runs tests."""
    if not settings.configured:
        settings.configure(
            SECRET_KEY="tests",  # of nothing
            ALLOWED_HOSTS=["testserver"],
            INSTALLED_APPS=["grelmicro_django"],
            DATABASES={},
            GRELMICRO={"STORE": "sqlite:///never-opened.db"},
            USE_TZ=True,
        )
        django.setup()


@pytest.fixture(autouse=True)
def test_environment() -> Iterator[None]:
    """Run each test as `manage.py test` would, and close what it opened."""
    setup_test_environment()
    yield
    teardown_test_environment()
    with serving._changing:
        users = 0 if serving._served is None else serving._served.users
    serving.replace()
    assert not users, "what a test left open would serve the next ones"
