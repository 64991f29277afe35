"""`was_entered`: whether a request got as far as its handler."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

from fastapi import routing
from fastapi.dependencies.utils import solve_dependencies
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError

SOLVING = solve_dependencies.__code__
"""What FastAPI runs before a handler, and not while it runs."""

INVALID = (RequestValidationError, WebSocketRequestValidationError)


def was_entered(endpoint: Callable[..., Any], error: BaseException) -> bool:
    """Whether `endpoint` had begun when `error` ended its request; in doubt it had.

    FastAPI does not tell, so this looks at where the error comes from, and at what runs now.
    """
    codes = set(_codes(endpoint))
    came_from: BaseException | None = error
    while came_from is not None:  # a custom route may have raised another error in place of it
        path = list(_path(came_from))
        for frame in path:
            if frame.f_code in codes:
                return True
            if frame.f_code is SOLVING:
                return False
        if isinstance(came_from, INVALID) and path and path[-1].f_globals is vars(routing):
            return False  # FastAPI itself raised it
        came_from = came_from.__context__
    return not _is_solving()


def _path(error: BaseException) -> Iterator[FrameType]:
    """What an error came through, outermost first."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame
        step = step.tb_next


def _is_solving() -> bool:
    """Whether a dependency runs, which holds something in a block of its own."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not SOLVING:
        frame = frame.f_back
    return frame is not None


def _codes(endpoint: Any) -> Iterator[CodeType]:
    """The code of a handler, and of what it wraps."""
    while endpoint is not None:
        while isinstance(endpoint, partial):
            endpoint = endpoint.func
        if isinstance(code := getattr(endpoint, "__code__", None), CodeType):
            yield code
        endpoint = getattr(endpoint, "__wrapped__", None)
