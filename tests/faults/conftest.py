"""Fixtures of every test in this folder."""

from tests.helpers.kubernetes_fleet import fleet, slow_gateway
from tests.helpers.kubernetes_waiters import gateway, holding_backend, waiting_backend
from tests.helpers.sites import any_site, any_url, site
from tests.helpers.worlds import clock, matrix_world, nothing_left, real_world, world

__all__ = [
    "any_site",
    "any_url",
    "clock",
    "fleet",
    "gateway",
    "holding_backend",
    "matrix_world",
    "nothing_left",
    "real_world",
    "site",
    "slow_gateway",
    "waiting_backend",
    "world",
]
