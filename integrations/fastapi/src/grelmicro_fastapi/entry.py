"""`was_entered`: whether a request got as far as its handler."""

import inspect
from collections.abc import Callable
from traceback import walk_stack, walk_tb
from typing import Any

from fastapi import routing
from fastapi.dependencies.utils import solve_dependencies
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError

from grelmicro.callables import codes

SOLVING = solve_dependencies.__code__
"""What FastAPI runs before a handler, and not while it runs."""

INVALID = (RequestValidationError, WebSocketRequestValidationError)


def was_entered(endpoint: Callable[..., Any], error: BaseException) -> bool:
    """Whether `endpoint` had begun when `error` ended its request; in doubt it had.

    FastAPI does not tell, so this looks at where the error comes from, and at what runs now.
    """
    handler = codes(endpoint)
    came_from: BaseException | None = error
    while came_from is not None:  # a custom route may have raised another error in place of it
        path = [frame for frame, _ in walk_tb(came_from.__traceback__)]
        for frame in path:
            if frame.f_code in handler:
                return True
            if frame.f_code is SOLVING:
                return False
        if isinstance(came_from, INVALID) and path and path[-1].f_globals is vars(routing):
            return False  # FastAPI itself raised it
        came_from = came_from.__context__
    # Else it may come from a dependency that holds something in a block of its own, which runs now.
    return all(frame.f_code is not SOLVING for frame, _ in walk_stack(inspect.currentframe()))
