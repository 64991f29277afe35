"""Coordination for Django: locks, leases of management commands and leader election on the store of a project.

Add `"grelmicro_django"` to `INSTALLED_APPS` and set `GRELMICRO = {"STORE": "redis://cache:6379/1"}`.
"""

from typing import TYPE_CHECKING

from grelmicro.alone import check_alone

check_alone()

if TYPE_CHECKING:
    from grelmicro_django.locks import lock as lock
    from grelmicro_django.middleware import GrelmicroMiddleware as GrelmicroMiddleware
    from grelmicro_django.running import SKIPPED as SKIPPED
    from grelmicro_django.singletons import SingletonCommand as SingletonCommand
    from grelmicro_django.singletons import SingletonMixin as SingletonMixin
    from grelmicro_django.singletons import singleton as singleton
    from grelmicro_django.views import locked as locked

__all__ = ["GrelmicroMiddleware", "SKIPPED", "SingletonCommand", "SingletonMixin", "lock", "locked", "singleton"]

_HOMES = {
    "GrelmicroMiddleware": "grelmicro_django.middleware",
    "SKIPPED": "grelmicro_django.running",
    "SingletonCommand": "grelmicro_django.singletons",
    "SingletonMixin": "grelmicro_django.singletons",
    "lock": "grelmicro_django.locks",
    "locked": "grelmicro_django.views",
    "singleton": "grelmicro_django.singletons",
}
"""The module of each public name, imported at its first use: management commands should start quickly."""


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
