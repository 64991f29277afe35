"""For tests: an app on memory, locks and leaders elsewhere, a clock that is moved, and the contract of stores."""

import importlib
import sys
from typing import TYPE_CHECKING

from grelmicro.alone import check_alone
from grelmicro.testing.aids import held_elsewhere
from grelmicro.testing.clock import MovableClock
from grelmicro.testing.leaders import leads, leads_elsewhere
from grelmicro.testing.memory import on_memory

if TYPE_CHECKING:
    from grelmicro.testing.contract import LeaseStoreContract as LeaseStoreContract

__all__ = ["LeaseStoreContract", "MovableClock", "held_elsewhere", "leads", "leads_elsewhere", "on_memory"]

check_alone()

_CONTRACT = "grelmicro.testing.contract"


def __getattr__(name: str) -> object:
    """The contract is loaded when it is asked for: it needs pytest, the clock does not."""
    if name != "LeaseStoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (pytest := sys.modules.get("pytest")) is not None:
        pytest.register_assert_rewrite(_CONTRACT)  # so that a failure shows the values
    return importlib.import_module(_CONTRACT).LeaseStoreContract
