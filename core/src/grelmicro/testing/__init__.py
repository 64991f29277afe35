"""For tests: a clock that is moved, and the contract that every store of leases has to keep."""

from typing import TYPE_CHECKING

from grelmicro.errors import DependencyNotFoundError
from grelmicro.testing.clock import MovableClock

if TYPE_CHECKING:
    from grelmicro.testing.contract import LeaseStoreContract

__all__ = ["LeaseStoreContract", "MovableClock"]
