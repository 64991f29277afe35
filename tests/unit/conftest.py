"""Fixtures of every test in this folder."""

from tests.helpers.kubernetes import mine, other, place
from tests.helpers.worlds import clock, matrix_world, nothing_left, real_world, world

__all__ = ["clock", "matrix_world", "mine", "nothing_left", "other", "place", "real_world", "world"]
