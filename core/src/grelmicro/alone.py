"""Refuse to run where the distribution `grelmicro`, another code base with the same import name, is installed too.

Of two distributions that own the folder `grelmicro`, the one that is installed last replaces files of the other without
an error. The other one has no file of this name, and each package of this one imports it.
"""

import os
import sys
from functools import cache

NAME = "grelmicro-suite"

REMEDY = (
    "run `pip uninstall -y grelmicro grelmicro-suite`, then `pip install --force-reinstall grelmicro-suite`, "
    "with its extras"
)


@cache
def check_alone() -> None:
    """Raise `ImportError`, with the commands that mend it, unless this distribution is the only one; looks once.

    Raises:
        ImportError: the other one is installed, or has replaced or removed files of this one.
    """
    if _other_is_installed():
        raise ImportError(
            "the distributions 'grelmicro' and 'grelmicro-suite' are both installed, and both are imported as "
            f"grelmicro: {REMEDY}"
        )
    if getattr(sys.modules.get("grelmicro"), "__distribution__", None) != NAME:
        raise ImportError(f"files of the distribution 'grelmicro-suite' were replaced or removed: {REMEDY}")


def _other_is_installed() -> bool:
    # Looking at the names takes a fraction of a millisecond; importing importlib.metadata for it takes fifty.
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, or not there
            continue
        if any(name.startswith("grelmicro-") and name.endswith((".dist-info", ".egg-info")) for name in names):
            return True
    return False


check_alone()
