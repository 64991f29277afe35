"""Fixtures of every test in this folder."""

from tests.helpers.kubernetes import mine, other, place
from tests.helpers.worlds import clock, nothing_left, real_world, world

__all__ = ["clock", "mine", "nothing_left", "other", "place", "real_world", "world"]
