"""Starlette integration of grelmicro-suite."""

from grelmicro_starlette.family import LockFamily
from grelmicro_starlette.guards import leader_only, locked
from grelmicro_starlette.holding import runs_in_thread
from grelmicro_starlette.install import install
from grelmicro_starlette.lifespan import lifespan
from grelmicro_starlette.names import NameTemplate
from grelmicro_starlette.refusals import exception_handlers
from grelmicro_starlette.serving import check_takes_part

__all__ = [
    "LockFamily",
    "NameTemplate",
    "check_takes_part",
    "exception_handlers",
    "install",
    "leader_only",
    "lifespan",
    "locked",
    "runs_in_thread",
]
