"""For tests: a lock held elsewhere, a clock that is moved, and the contract that every store of leases has to keep."""

import importlib
import sys
from typing import TYPE_CHECKING

from grelmicro.testing.aids import held_elsewhere
from grelmicro.testing.clock import MovableClock

if TYPE_CHECKING:
    from grelmicro.testing.contract import LeaseStoreContract as LeaseStoreContract

__all__ = ["LeaseStoreContract", "MovableClock", "held_elsewhere"]

_CONTRACT = "grelmicro.testing.contract"


def __getattr__(name: str) -> object:
    """The contract is loaded when it is asked for: it needs pytest, the clock does not."""
    if name != "LeaseStoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (pytest := sys.modules.get("pytest")) is not None:
        pytest.register_assert_rewrite(_CONTRACT)  # so that a failure shows the values
    return importlib.import_module(_CONTRACT).LeaseStoreContract
