"""Fixtures of every test in this folder."""

from tests.helpers.sites import any_site, any_url, site
from tests.helpers.worlds import clock, nothing_left, real_world, world

__all__ = ["any_site", "any_url", "clock", "nothing_left", "real_world", "site", "world"]
