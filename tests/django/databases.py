"""Databases of a Django project for one test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections


@contextmanager
def databases(**settings: dict[str, Any]) -> Iterator[None]:
    """These databases beside those of the project."""
    before = dict(connections.settings)
    connections.settings.update(connections.configure_settings({"default": {}, **settings}))
    try:
        yield
    finally:
        for alias in settings:
            connections[alias].close()
            del connections[alias]
        connections.settings.clear()
        connections.settings.update(before)
