"""Coordination that Python web services can trust: locks, task locks, leader election and scheduled singletons."""

import os
import sys

from grelmicro.app import Grelmicro

__all__ = ["Grelmicro"]


def _refuse_the_other_package() -> None:
    """The PyPI distribution `grelmicro` is another code base with the same import name: never run a mix of both."""
    # Looking at the names takes a fraction of a millisecond; importing importlib.metadata for it takes fifty.
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, or not there
            continue
        if any(name.startswith("grelmicro-") and name.endswith((".dist-info", ".egg-info")) for name in names):
            raise ImportError(
                "the distributions 'grelmicro' and 'grelmicro-suite' are both installed, and both are imported as "
                "grelmicro: run `pip uninstall -y grelmicro grelmicro-suite`, then "
                "`pip install --force-reinstall grelmicro-suite`"
            )


_refuse_the_other_package()
