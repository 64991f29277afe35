"""FastAPI integration of grelmicro-suite."""

from grelmicro.alone import check_alone
from grelmicro_fastapi.dependencies import FenceDep, LeaderDep, LockDep, LocksDep, TaskLockDep
from grelmicro_fastapi.install import install
from grelmicro_starlette import exception_handlers, lifespan

__all__ = [
    "FenceDep",
    "LeaderDep",
    "LockDep",
    "LocksDep",
    "TaskLockDep",
    "exception_handlers",
    "install",
    "lifespan",
]

check_alone()
