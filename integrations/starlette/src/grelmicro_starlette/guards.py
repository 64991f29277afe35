"""`locked` and `leader_only`: decorators for Starlette handlers."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from grelmicro.callables import runs_in_thread
from grelmicro.config import Duration
from grelmicro.coordination import LeaderElection, LeadershipLostError
from grelmicro.errors import SettingsValidationError
from grelmicro.guards import check_guardable, note_guard
from grelmicro_starlette.family import LockFamily
from grelmicro_starlette.serving import WEBSOCKET, check_takes_part

Handler = Callable[..., Any]
AsyncHandler = Callable[..., Coroutine[Any, Any, Any]]


def locked(
    name: str,
    *,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
) -> Callable[[Handler], AsyncHandler]:
    """Run the decorated handler while it holds a lock; `request.state["lock"]` is its `LockHandle`.

    The lock is given back before the response is sent. When it is lost meanwhile, an async handler is cancelled and
    `LockLostError` raised; a plain one runs in a thread and ends first.

    Args:
        name: the lock's name; `{field}` stands for a path parameter, as its convertor gives it. Its environment
            variables are those of the template: `GREL_LOCK_ORDER_*` for `order:{order_id}`.
        timeout: seconds to wait for the lock; None waits as long as it takes, 0 tries once.
        auto_renew: keep the lease alive while the handler runs. None: the environment, else on.
        lease_duration: seconds after which the lock frees itself. None: the environment, else 30, or 60 where it is
            not renewed.
        max_hold: seconds after which it is not renewed any more, so that a handler that hangs loses it.
            None: the environment, else no limit.

    Raises:
        SettingsValidationError: the template or a setting breaks a rule.
    """
    family = LockFamily.of(
        name, timeout=timeout, auto_renew=auto_renew, lease_duration=lease_duration, max_hold=max_hold
    )

    def decorate(handler: Handler) -> AsyncHandler:
        call, in_thread = _awaitable(handler), runs_in_thread(handler)

        @functools.wraps(handler)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            connection = _connection(handler, args, kwargs)
            async with family.hold(_name(family, connection), connection, in_thread=in_thread) as handle:
                connection.state.lock = handle
                return await call(*args, **kwargs)

        note_guard(f"@locked({name!r})", handler, guarded)
        return guarded

    return decorate


def leader_only(leader: LeaderElection) -> Callable[[Handler], AsyncHandler]:
    """Run the decorated handler on the worker that leads; `request.state["leader"]` is the term's `LeaderRecord`.

    Elsewhere `NotLeaderError` is raised. When the term ends meanwhile, an async handler is cancelled and
    `LeadershipLostError` raised; a plain one runs in a thread and ends first.

    Raises:
        SettingsValidationError: `leader` is no election.
    """
    if not isinstance(leader, LeaderElection):
        raise SettingsValidationError(
            f"leader_only() takes a LeaderElection, not {'a class' if inspect.isclass(leader) else _title(leader)}: "
            "build one and decorate with it, leader = LeaderElection('feed') and @leader_only(leader)"
        )

    def decorate(handler: Handler) -> AsyncHandler:
        call, in_thread = _awaitable(handler), runs_in_thread(handler)

        @functools.wraps(handler)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            connection = _connection(handler, args, kwargs)
            check_takes_part(connection, leader)
            term = connection.state.leader = leader.guard()
            if not in_thread:
                return await leader.run_in_term(functools.partial(call, *args, **kwargs))
            answer = await call(*args, **kwargs)
            if not leader.is_leader() or leader.guard().fence != term.fence:
                raise LeadershipLostError(f"leadership of '{leader.name}' was lost while a handler ran in a thread")
            return answer

        note_guard("@leader_only", handler, guarded)
        return guarded

    return decorate


def _awaitable(handler: Handler) -> AsyncHandler:
    """`handler` as a coroutine function: a plain one runs in a thread, as Starlette would run it.

    Raises:
        TypeError: it would return before its work is done.
    """
    check_guardable("locked() and leader_only()", handler)
    return functools.partial(run_in_threadpool, handler) if runs_in_thread(handler) else handler


def _connection(handler: Handler, args: tuple[object, ...], kwargs: Mapping[str, object]) -> HTTPConnection:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, HTTPConnection):
            if isinstance(argument, WebSocket):
                argument.scope[WEBSOCKET] = argument
            return argument
    raise TypeError(
        f"{_title(handler)} was called without a request: locked() and leader_only() decorate handlers that take "
        "the request or the websocket"
    )


def _title(handler: object) -> str:
    return getattr(handler, "__qualname__", type(handler).__qualname__)


def _name(family: LockFamily, connection: HTTPConnection) -> str:
    try:
        return family.name(connection.path_params)
    except KeyError as missing:
        raise SettingsValidationError(
            f"lock name {family.template.text!r} has the field {missing}, but the route has no such path parameter: "
            f"it has {', '.join(connection.path_params) or 'none'}"
        ) from None
