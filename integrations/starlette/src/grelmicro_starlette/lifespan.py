"""`lifespan`: opens a `Grelmicro` around an application, and lets elected work run beside it."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any

import anyio

from grelmicro import Grelmicro
from grelmicro.coordination import LeaderElection
from grelmicro.errors import SettingsValidationError
from grelmicro.signals import handing_over
from grelmicro.task import Tasks
from grelmicro_starlette.serving import KEY, check_guards, installed_below

logger = logging.getLogger("grelmicro.starlette")

LEAVE_LIMIT = 5.0
"""Seconds for which a process that a signal is to end at once goes on to hand leadership over."""

LOOK = 0.02
"""Seconds between two looks at whether that is done."""

Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]
UserLifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]
Work = Callable[[], Coroutine[Any, Any, object]]


def lifespan(
    micro: Grelmicro,
    mine: UserLifespan | None = None,
    *,
    lead: Mapping[LeaderElection, Work] | None = None,
    signals: bool = True,
) -> Lifespan:
    """A lifespan that opens `micro` first and closes it last; the request state has it under `"grelmicro"`.

    What was installed on apps mounted below opens and closes with it; their own lifespans do not run. When a part of it
    fails to start, those that were started before are stopped, and its error is raised.

    Args:
        micro: what to open.
        mine: your own lifespan. `micro` is open from before its start until after its end, and its state is kept.
        lead: work for each election, run between the start and the end of `mine` in every term of this worker. An
            election that `Tasks` run already is left to them. Work that fails is logged, and begins anew after the
            election's `retry_interval`. Work that returns is done: this worker gives the role up and leaves the
            election, unless `Tasks` run it. To keep the role, let it end with `await leader.wait_lose_leader()`.
        signals: hand leadership over at SIGTERM and SIGINT, not when the server has served its last request.

    Raises:
        SettingsValidationError: `lead` has something else than coroutine functions by election. At the start: a route
            runs a function without the guard that it is decorated with.
    """
    for leader, work in (lead or {}).items():
        _check_lead(leader, work)

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[Mapping[str, Any]]:
        check_guards(app)
        # This app's own comes last, so that `mine` is served by it.
        every = [*(other for other in dict.fromkeys(installed_below(app)) if other is not micro), micro]
        departure = _Departure(every, lead or {})
        # Signals are heard until all is closed: the second interrupt is for those who are tired of waiting for that.
        with ExitStack() as hearing:
            async with AsyncExitStack() as stack:
                for each in every:
                    await stack.enter_async_context(each)
                if signals:
                    heard = handing_over(departure, unhandled=departure.leave, second_ends=False, hurry=departure.hurry)
                    hearing.enter_context(heard)
                state = None if mine is None else await stack.enter_async_context(mine(app))
                for leader, work in (lead or {}).items():
                    await stack.enter_async_context(_leading(leader, work, departure))
                yield {**(state or {}), KEY: micro}

    return opened


def _check_lead(leader: object, work: object) -> None:
    """Tell at once, since work that cannot be called would otherwise fail in the log of whoever leads."""
    if not (isinstance(leader, LeaderElection) and callable(work)):
        raise SettingsValidationError(
            "lifespan(lead=) takes a coroutine function for each LeaderElection, "
            f"not {type(work).__name__} for {type(leader).__name__}: lead={{leader: feed}}"
        )


class _Departure:
    """What a signal that stops the process begins."""

    def __init__(self, every: Sequence[Grelmicro], lead: Iterable[LeaderElection]) -> None:
        self._every = every
        tasks = (item.tasks for micro in every for item in micro.uses if isinstance(item, Tasks))
        self._leaders = [*lead, *(task for each in tasks for task in each if isinstance(task, LeaderElection))]
        self._leaving: asyncio.Task[None] | None = None
        self.begun = asyncio.Event()
        self.work: list[asyncio.Task[object]] = []

    def hand_over(self) -> None:
        for micro in self._every:
            micro.hand_over()
        self.begun.set()

    def leave(self, number: int) -> None:
        """Die of a signal, as it is the server's wish, but not before leadership is handed over."""
        self._leaving = asyncio.create_task(self._leave(number), name="grelmicro-departure")

    async def _leave(self, number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_LIMIT):
                while any(leader.is_running() for leader in self._leaders):
                    await asyncio.sleep(LOOK)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def hurry(self) -> None:
        for micro in self._every:
            micro.hurry()
        for task in self.work:
            task.cancel()  # also if it was: what it is busy with at its end is cut short


@asynccontextmanager
async def _leading(leader: LeaderElection, work: Work, departure: _Departure) -> AsyncIterator[None]:
    """Run an election and its work; in the end the work stops first, then the election resigns."""
    async with AsyncExitStack() as stack:
        election: asyncio.Task[object] | None = None
        if not leader.is_running():
            name = f"grelmicro-election-{leader.name}"
            election = await stack.enter_async_context(_running(leader(stop=departure.begun), name))
        task = await stack.enter_async_context(_running(_lead(leader, work, election), f"grelmicro-lead-{leader.name}"))
        departure.work.append(task)
        yield


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, object], name: str) -> AsyncIterator[asyncio.Task[object]]:
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        with anyio.CancelScope(shield=True):  # that of a server may be cancelled, and what comes next needs the end
            await asyncio.wait({task})


async def _lead(leader: LeaderElection, work: Work, election: asyncio.Task[object] | None) -> None:
    """Run the work in every term, until it returns; then end `election`, so that another worker can lead."""
    while True:
        try:
            await leader.lead(work, repeat=True)
        except Exception:
            pause = leader.config.retry_interval
            logger.exception("the work of leader '%s' failed, and begins anew in %g s", leader.name, pause)
            await asyncio.sleep(pause)
        else:
            logger.info("the work of leader '%s' is done", leader.name)
            if election is not None:
                election.cancel()
            return
