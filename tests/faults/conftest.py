"""Fixtures of every test in this folder."""

from tests.helpers.worlds import clock, nothing_left, real_world, world

__all__ = ["clock", "nothing_left", "real_world", "world"]
