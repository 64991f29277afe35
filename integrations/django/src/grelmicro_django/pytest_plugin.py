"""The pytest plugin: it is loaded before any settings are, and imports none."""

import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from grelmicro_django.testing import GrelmicroLocks


@pytest.fixture(autouse=True)
def _grelmicro_clear_leases() -> Iterator[None]:
    """Leave no leases of the private store to the next test."""
    yield
    if (module := sys.modules.get("grelmicro_django.serving")) is not None:
        module.serving.replace()


@pytest.fixture
def grelmicro_locks() -> "Iterator[GrelmicroLocks]":
    """The locks of the project: hold one elsewhere, lose one, let time pass, and see the holder."""
    with importlib.import_module("grelmicro_django.testing").fresh_locks() as locks:
        yield locks
