"""Leases: rights that end by themselves, and the stores that keep them."""

from grelmicro.alone import check_alone
from grelmicro.leases.lease import (
    DroppingLeases,
    InstantLeases,
    Lease,
    LeaseStore,
    PartlyRenewedError,
    PassingLeases,
    RaisingLeases,
    Scope,
    SignalWaiter,
    Waiter,
)

__all__ = [
    "DroppingLeases",
    "InstantLeases",
    "Lease",
    "LeaseStore",
    "PartlyRenewedError",
    "PassingLeases",
    "RaisingLeases",
    "Scope",
    "SignalWaiter",
    "Waiter",
]

check_alone()
