"""`LockDep` and its like: a held lock and a term of leadership as dependencies."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from fastapi import params

from grelmicro.config import Duration
from grelmicro.coordination import LeaderElection
from grelmicro.errors import SettingsValidationError
from grelmicro.names import NameTemplate
from grelmicro_fastapi.declared import Declaration
from grelmicro_fastapi.guards import REQUEST, Guard, HeldFence, HeldLock, HeldLocks, HeldTaskLock, PresentTerm

Scope = Literal["function", "request"]


def LockDep(
    name: str,
    *,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    scope: Scope = "function",
    **results: Any,
) -> Any:
    """A lock that is held while a request is served: `Annotated[LockHandle, LockDep("cart:{cart_id}")]`.

    It is taken before the handler runs. When it is lost meanwhile, an async handler is cancelled and `LockLostError`
    raised; a plain one runs in a thread and ends first.

    A lock must outlive the transaction that it guards: declare it before the database session, and give both the same
    scope. FastAPI's own default for a dependency that yields is `request`, so say `Depends(session, scope="function")`.

    However many of them give one name, a request holds one lock of that name, for the longest of their scopes, and
    with the settings of the one that is entered first. A request that needs several locks takes them with one
    `LocksDep`.

    Args:
        name: the lock's name; `{field}` stands for a path, query, header, cookie or body parameter, as the handler
            receives it: for `cart_id: int`, `/carts/042` and `/carts/42` are one cart. `{order.item_id}` is a field of
            the body `order`. A parameter that only a dependency takes counts as that one receives it. Different values
            never share a name; `grelmicro.names.NameTemplate` tells what is encoded for that.
            The lock's environment variables are those of the template: `GREL_LOCK_CART_*` for `cart:{cart_id}`.
        timeout: seconds to wait for the lock; None waits as long as it takes, 0 tries once.
        auto_renew: keep the lease alive while it is held. None: the environment, else on.
        lease_duration: seconds after which the lock frees itself. None: the environment, else 30, or 60 where it is
            not renewed.
        max_hold: seconds after which it is not renewed any more, so that a handler that hangs loses it.
            None: the environment, else no limit.
        scope: `function` gives it back before the response is sent; `request` after the response and its background
            tasks, which streams need.
        results: dependencies whose results stand in the name, by the names of their fields:
            `LockDep("user:{user.id}", user=Depends(current_user))`. A handler that has the same dependency gets the
            same result.

    Raises:
        SettingsValidationError: the template, a setting or a dependency breaks a rule.
    """
    settings = {
        "timeout": timeout,
        "auto_renew": auto_renew,
        "lease_duration": lease_duration,
        "max_hold": max_hold,
    }
    return _declaration(HeldLock, [name], settings, scope, results)


def FenceDep(
    name: str,
    *,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    scope: Scope = "function",
    **results: Any,
) -> Any:
    """The fencing token of a lock that is held while a request is served: `Annotated[int, FenceDep("cart:{cart_id}")]`.

    It is for handlers that pass it on and do nothing else with the lock; arguments and errors are those of `LockDep`.
    """
    settings = {
        "timeout": timeout,
        "auto_renew": auto_renew,
        "lease_duration": lease_duration,
        "max_hold": max_hold,
    }
    return _declaration(HeldFence, [name], settings, scope, results)


def LocksDep(
    *names: str,
    timeout: Duration | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    scope: Scope = "function",
    **results: Any,
) -> Any:
    """Several locks that are held while a request is served, all or none.

    `Annotated[MultiLockHandle, LocksDep("stock:{source}", "stock:{target}")]`: they are taken in one order, wherever
    and however they are declared, so requests never wait for each other in a circle. Names that are equal in a request
    are one lock. The handle's `handles` are in the order of the names.

    Args:
        names: the names; see `LockDep`. Each has environment variables of its own.
        timeout: seconds to wait for all of them together; None waits as long as it takes, 0 tries each once.
        auto_renew: see `LockDep`.
        lease_duration: see `LockDep`.
        max_hold: see `LockDep`.
        scope: see `LockDep`.
        results: see `LockDep`.

    Raises:
        SettingsValidationError: there is no name, or a template, a setting or a dependency breaks a rule.
    """
    settings = {
        "timeout": timeout,
        "auto_renew": auto_renew,
        "lease_duration": lease_duration,
        "max_hold": max_hold,
    }
    return _declaration(HeldLocks, names, settings, scope, results)


def TaskLockDep(
    name: str,
    *,
    min_hold_duration: Duration | None = None,
    auto_renew: bool | None = None,
    lease_duration: Duration | None = None,
    max_hold: Duration | None = None,
    scope: Scope = "function",
    **results: Any,
) -> Any:
    """A task lock around a route, for work that is not to be repeated soon: `TaskLockDep("report:{day}")`.

    A request never waits: it is refused with `WouldBlockError` while another one does the work, and after that until
    the minimum hold is over. The value is a `LockHandle`. When it is lost meanwhile, an async handler is cancelled and
    `LockLostError` raised; a plain one runs in a thread and ends first.

    The minimum hold is for work that began: when a request ends before its handler begins, because a parameter is not
    valid, another dependency refuses or it is cancelled, the lock is free at once. What the handler raises, and what
    a dependency raises after it, keeps it.

    Args:
        name: see `LockDep`. The environment variables are `GREL_TASKLOCK_REPORT_*` for `report:{day}`.
        min_hold_duration: seconds for which it stays held at least, from the beginning, also when the work fails.
            None: the environment, else 1.
        auto_renew: keep the lease alive while it is held. None: the environment, else on.
        lease_duration: seconds after which it frees itself, at least `min_hold_duration`. None: the environment, else
            30, or 60 where it is not renewed.
        max_hold: see `LockDep`.
        scope: see `LockDep`.
        results: see `LockDep`.

    Raises:
        SettingsValidationError: the template, a setting or a dependency breaks a rule.
    """
    settings = {
        "min_hold_duration": min_hold_duration,
        "auto_renew": auto_renew,
        "lease_duration": lease_duration,
        "max_hold": max_hold,
    }
    return _declaration(HeldTaskLock, [name], settings, scope, results)


def LeaderDep(leader: LeaderElection) -> Any:
    """The term of this worker, where it leads: `Annotated[LeaderRecord, LeaderDep(leader)]`.

    Elsewhere `NotLeaderError` is raised. Leadership may end while the handler runs: give the record's `fence` to what
    it writes to, or run the work with `leader.run_in_term`.

    Raises:
        SettingsValidationError: `leader` is no `LeaderElection`.
    """
    if not isinstance(leader, LeaderElection):
        raise SettingsValidationError(
            "LeaderDep(leader): 'leader' should be a LeaderElection, like that of coordination.leaderelection('name')"
        )
    return Declaration(PresentTerm(leader))


def _declaration(
    guard: type[Guard], names: Sequence[str], settings: Mapping[str, Any], scope: Scope, results: Mapping[str, Any]
) -> Declaration:
    title = f"{guard.title}({', '.join(map(repr, names))})"
    if not names:
        raise SettingsValidationError(
            f"{title} needs a name: say what is locked, like {guard.title}('cart:{{cart_id}}')"
        )
    _check_results(title, names, {**settings, "scope": scope}, results)
    if scope not in get_args(Scope):
        raise SettingsValidationError(f"{title}: scope should be 'function' or 'request'")
    return Declaration(guard([guard.family.of(name, **settings) for name in names], results), scope=scope)


def _check_results(
    title: str, names: Sequence[str], settings: Mapping[str, object], results: Mapping[str, object]
) -> None:
    """Refuse keywords that are no dependencies, or none that a name needs.

    Args:
        title: what is declared, for error texts.
        names: the names of locks.
        settings: what the keywords of settings were given.
        results: all other keywords.

    Raises:
        SettingsValidationError: a keyword is wrong.
    """
    fields = dict.fromkeys(field for name in names for field in NameTemplate(name).fields)
    taken = [name for name, value in settings.items() if isinstance(value, params.Depends)]
    for name in (*taken, *results.keys() & {REQUEST.name}):
        raise SettingsValidationError(
            f"{title}: '{name}' means something else here, so it cannot be the name of a dependency's result: "
            f"give the field another name, like {{my_{name}}} and my_{name}=Depends(...)"
        )
    for name, value in results.items():
        if name not in fields:
            raise SettingsValidationError(
                f"{title}: '{name}' is neither a setting nor a field of the name, whose fields are "
                f"{', '.join(fields) or 'none'}: leave it out, or write {{{name}}} in the name"
            )
        if not isinstance(value, params.Depends) or value.dependency is None:
            raise SettingsValidationError(
                f"{title}: '{name}' should be a dependency with what it depends on: {name}=Depends(get_{name})"
            )
