"""Whether this process runs the tests of a project."""

from django.test import utils


def is_test_run() -> bool:
    """Whether `setup_test_environment()` was called, as `manage.py test` and pytest-django do."""
    return hasattr(utils._TestState, "saved_data")
