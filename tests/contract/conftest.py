"""Fixtures of every test in this folder."""

from tests.helpers.worlds import clock, matrix_world, nothing_left, real_world, world

__all__ = ["clock", "matrix_world", "nothing_left", "real_world", "world"]
