"""FastAPI integration of grelmicro-suite."""

from grelmicro_fastapi.dependencies import LeaderDep, LockDep
from grelmicro_starlette import exception_handlers, install, lifespan

__all__ = ["LeaderDep", "LockDep", "exception_handlers", "install", "lifespan"]
