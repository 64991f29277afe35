"""`LockDep` and `LeaderDep`: a held lock and a term of leadership as dependencies."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from fastapi import Depends
from fastapi.requests import HTTPConnection

from grelmicro.coordination import LeaderElection, LeaderRecord, LockHandle
from grelmicro_fastapi.values import received
from grelmicro_starlette import LockFamily, check_takes_part, runs_in_thread

HOLDS = "grelmicro.holds"
"""Where a request's scope keeps the locks that it holds, by name."""


def LockDep(
    name: str,
    *,
    timeout: float | None = 5.0,
    auto_renew: bool | None = None,
    lease_duration: float | None = None,
    scope: Literal["function", "request"] = "function",
) -> Any:
    """A lock that is held while a request is served: `Annotated[LockHandle, LockDep("cart:{cart_id}")]`.

    It is taken before the handler runs. When it is lost meanwhile, an async handler is cancelled and `LockLostError`
    raised; a plain one runs in a thread and ends first.

    A lock must outlive the transaction that it guards: declare it before the database session, and give both the same
    scope. FastAPI's own default for a dependency that yields is `request`, so say `Depends(session, scope="function")`.

    However many of them give one name, a request holds one lock of that name, for the longest of their scopes.

    Args:
        name: the lock's name; `{field}` stands for a path, query, header or cookie parameter, as the handler receives
            it: for `cart_id: int`, `/carts/042` and `/carts/42` are one cart. A parameter that only a dependency
            takes counts as that one receives it. Different values never share a name; `NameTemplate` of
            `grelmicro_starlette` tells what is encoded for that.
            The lock's environment variables are those of the template: `GREL_LOCK_CART_*` for `cart:{cart_id}`.
        timeout: seconds to wait for the lock; None waits as long as it takes, 0 tries once.
        auto_renew: keep the lease alive while it is held. None: the environment, else on.
        lease_duration: seconds after which the lock frees itself. None: the environment, else 60.
        scope: `function` gives it back before the response is sent; `request` after the response and its background
            tasks, which streams need.

    Raises:
        SettingsValidationError: the template or a setting breaks a rule.
    """
    family = LockFamily.of(name, timeout=timeout, auto_renew=auto_renew, lease_duration=lease_duration)
    return Depends(HeldLock(family), scope=scope)


def LeaderDep(leader: LeaderElection) -> Any:
    """The term of this worker, where it leads: `Annotated[LeaderRecord, LeaderDep(leader)]`.

    Elsewhere `NotLeaderError` is raised. Leadership may end while the handler runs: give the record's `fence` to what
    it writes to, or run the work with `leader.run_in_term`.
    """
    return Depends(PresentTerm(leader))


@dataclass(frozen=True)
class HeldLock:
    """The dependency behind `LockDep`; equal ones are one to FastAPI, which calls it once per request."""

    family: LockFamily

    async def __call__(self, connection: HTTPConnection) -> AsyncIterator[LockHandle]:
        """Hold the lock of this request."""
        name = self.family.name(
            received(connection, self.family.template.fields, f"LockDep {self.family.template.text!r}")
        )
        in_thread = runs_in_thread(connection.scope["endpoint"])
        holds: dict[str, SharedHold] = connection.scope.setdefault(HOLDS, {})
        if name not in holds:
            holds[name] = SharedHold(self.family.hold(name, connection, in_thread=in_thread))
        async with holds[name] as handle:
            yield handle


class SharedHold:
    """A lock that several dependencies of one request hold; the last to leave gives it back."""

    def __init__(self, held: AbstractAsyncContextManager[LockHandle]) -> None:
        self._held = held
        self._handle: LockHandle | None = None
        self._users = 0

    async def __aenter__(self) -> LockHandle:
        if self._handle is None:
            self._handle = await self._held.__aenter__()
        self._users += 1
        return self._handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            await self._held.__aexit__(kind, error, traceback)


@dataclass(frozen=True)
class PresentTerm:
    """The dependency behind `LeaderDep`."""

    leader: LeaderElection

    async def __call__(self, connection: HTTPConnection) -> LeaderRecord:
        """The term in which this request is served."""
        check_takes_part(connection, self.leader)
        return self.leader.guard()
