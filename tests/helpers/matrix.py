"""Matrices of parameters: `make test` runs a part of each, `make test-all` the whole."""

from typing import Any

import pytest

FURTHER = pytest.mark.exhaustive
"""Marks a case that varies the circumstances of another one, which always runs."""


def further(*values: Any) -> list[Any]:
    """Parameters of cases that only `make test-all` runs."""
    return [pytest.param(value, marks=FURTHER) for value in values]
