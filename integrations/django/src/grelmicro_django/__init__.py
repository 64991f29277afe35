"""Coordination for Django: locks, leases of management commands and leader election on the store of a project.

Add `"grelmicro_django"` to `INSTALLED_APPS` and set `GRELMICRO = {"STORE": "redis://cache:6379/1"}`.
"""

from typing import TYPE_CHECKING

from grelmicro.alone import check_alone

check_alone()

if TYPE_CHECKING:
    from grelmicro_django.locks import lock as lock

__all__ = ["lock"]

_HOMES = {"lock": "grelmicro_django.locks"}
"""The module of each public name, imported at its first use: management commands should start quickly."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
