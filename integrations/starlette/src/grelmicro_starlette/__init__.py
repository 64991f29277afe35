"""Starlette integration of grelmicro-suite."""

from grelmicro.alone import check_alone
from grelmicro.callables import runs_in_thread
from grelmicro.names import NameTemplate
from grelmicro_starlette.family import LockFamily, hold_all
from grelmicro_starlette.guards import leader_only, locked
from grelmicro_starlette.holding import Hold
from grelmicro_starlette.install import install
from grelmicro_starlette.lifespan import lifespan
from grelmicro_starlette.middleware import CoordinationMiddleware
from grelmicro_starlette.presence import ClientLeftError
from grelmicro_starlette.readiness import readiness
from grelmicro_starlette.refusals import Problem, Refusal, exception_handlers
from grelmicro_starlette.serving import check_takes_part, lock_backend

__all__ = [
    "ClientLeftError",
    "CoordinationMiddleware",
    "Hold",
    "LockFamily",
    "NameTemplate",
    "Problem",
    "Refusal",
    "check_takes_part",
    "exception_handlers",
    "hold_all",
    "install",
    "leader_only",
    "lifespan",
    "lock_backend",
    "locked",
    "readiness",
    "runs_in_thread",
]

check_alone()
