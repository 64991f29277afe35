"""`Grelmicro`: opens what an application uses in order, and closes it in reverse."""

import asyncio
import os
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from inspect import isclass
from pkgutil import resolve_name
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeGuard
from uuid import UUID

from grelmicro import lifecycle
from grelmicro.alone import check_alone
from grelmicro.background import Background
from grelmicro.config import check_worker, worker_of_environment
from grelmicro.context import Binding, bind, open_apps, unbind
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.lifecycle import Shared
from grelmicro.signals import handing_over

if TYPE_CHECKING:
    from grelmicro.coordination.component import Coordination

COORDINATION = "grelmicro.coordination:Coordination"

ENVIRONMENTS = ("development", "test", "staging", "production")


class Grelmicro(Shared):
    """An application's coordination, and whatever else shall open and close with it.

    Open it with `async with`; in code without an event loop with `with`, or `open` and `close`, which run one of its
    own in a thread. Blocks nest, and several threads may open it: the last one closes it. It can be opened again then.
    Leases that are held still when it closes are given back, but for those of blocks that go on.

    Args:
        uses: a `Coordination`, providers, backends, `Tasks` and any other async context managers, or classes of them
            that need no argument; None is left out. They open in this order, but `Tasks` open last and close first. A
            bare provider serves all that it can, and a bare backend its slot, unless there is a `Coordination` named
            `default`.
        environment: `development`, `test`, `staging` or `production`; None: the variable GREL_ENVIRONMENT.
        worker: readable name of this process, with which the holders of its leases begin that have no name of their
            own; None: the variable GREL_WORKER when the app opens, so that each process of a forking server can have
            another one.
        signals: at SIGTERM and SIGINT, hand leadership over at once and end the task that opened the app, for programs
            without a server that handles signals. It needs `async with` in the main thread: with a plain `with`, whose
            loop has a thread of its own, it does nothing. Web integrations do their own.

    Raises:
        SettingsValidationError: one of them cannot be opened, two `Coordination`s have one name, or the environment is
            not known.
    """

    def __init__(
        self,
        uses: Iterable[object] = (),
        *,
        environment: str | None = None,
        worker: str | UUID | None = None,
        signals: bool = False,
    ) -> None:
        self.environment = _environment(environment)
        self._worker = check_worker("Grelmicro: worker=", worker)
        self._signals = signals
        self._uses: list[AbstractAsyncContextManager[object]] = []
        self._serving: Coordination | None = None  # what bare providers and backends make together
        self._opened = AsyncExitStack()
        self._background = Background()
        if not isinstance(uses, Iterable):
            raise SettingsValidationError(
                f"Grelmicro uses should be a list, not {type(uses).__name__}: Grelmicro(uses=[...])"
            )
        for item in uses:
            self.use(item)

    def use(self, item: object) -> None:
        """Open `item` too, the next time this app is opened; None is left out.

        Raises:
            SettingsValidationError: it is no async context manager, or there is a `Coordination` of its name already.
            OutOfContextError: the app is open.
        """
        if self.is_open:
            raise OutOfContextError("use() came after the app was opened: add everything before")
        if item is None:
            return
        item = item() if isclass(item) else item
        if not isinstance(item, AbstractAsyncContextManager):
            raise SettingsValidationError(
                f"Grelmicro uses async context managers, such as Coordination, a provider or Tasks, "
                f"not {type(item).__name__}"
            )
        if _is_coordination(item) and item.name in self._coordinations():
            raise SettingsValidationError(
                f"Grelmicro uses has two Coordinations named '{item.name}': give one a name of its own with name=, or "
                "have one with a backend for each slot, by lock=, election= and schedule="
            )
        self._uses.append(item)
        self._serving = None

    @property
    def worker(self) -> str:
        """The readable name of this process; `""` if it has none, and then each primitive has a random one.

        Raises:
            SettingsValidationError: GREL_WORKER cannot be one.
        """
        return self._worker or worker_of_environment()

    @property
    def uses(self) -> tuple[object, ...]:
        """What it opens, in the order in which that was given."""
        return tuple(self._uses)

    def get(self, kind: str, name: str = "default") -> object:
        """What it uses of a kind, such as `coordination`, and a name.

        Raises:
            OutOfContextError: there is none.
            SettingsValidationError: bare providers and backends would serve the same.
        """
        if kind == "coordination":
            return self._coordination(name)
        for item in self._uses:
            if getattr(item, "kind", None) == kind and getattr(item, "name", "default") == name:
                return item
        raise OutOfContextError(f"this app has no {kind} named '{name}': add one to Grelmicro(uses=[...])")

    @property
    def coordination(self) -> "Coordination":
        """Its `Coordination` named `default`; it can build locks and elections before the app is open."""
        return self._coordination("default")

    def _coordination(self, name: str) -> "Coordination":
        named = self._coordinations()
        if name in named:
            return named[name]
        if name == "default" and (serving := self._of_bare_ones()) is not None:
            return serving
        missing = f"coordination named '{name}', but {', '.join(map(repr, named))}" if named else "coordination"
        raise OutOfContextError(
            f"this app has no {missing}: add one, such as Grelmicro(uses=[Coordination.from_url('sqlite:///locks.db')])"
        )

    def _coordinations(self) -> dict[str, "Coordination"]:
        return {item.name: item for item in self._uses if _is_coordination(item)}

    def _of_bare_ones(self) -> "Coordination | None":
        """What providers and backends without a `Coordination` make together, if there are any."""
        if self._serving is None and (bare := [item for item in self._uses if not hasattr(item, "kind")]):
            # By its name: most programs that import this one have no use for all that it imports yet.
            self._serving = resolve_name(COORDINATION).serving(bare)
        return self._serving

    def open(self) -> None:
        """Open it on an event loop in a thread; for code that has no running loop and no block to keep it open in.

        Each `open` needs its `close`. A program that ends without closes it at the exit of its interpreter. Open it in
        the process that uses it: a forked child has nothing of what its parent opened.

        Raises:
            OutOfContextError: an event loop runs in this thread, or it is open on another one.
        """
        self._background.open(self)

    def close(self) -> None:
        """Undo one `open`; the last one closes what it uses. It does nothing when it is not open.

        Raises:
            OutOfContextError: it was called on the event loop of the app itself.
        """
        self._background.close()

    async def _begin_use(self) -> None:
        """Open what it uses; when one fails, those opened before are closed again."""
        check_alone()
        # Work may start as soon as Tasks are open, so all that it needs is open before and closes after.
        ordered = sorted(self._to_open(), key=lambda item: getattr(item, "kind", "") == "tasks")
        open_apps.append(self)
        try:
            async with AsyncExitStack() as stack:
                if self._signals and (task := asyncio.current_task()) is not None:
                    stack.enter_context(handing_over(self, unhandled=lambda _: task.cancel(), hurry=self.hurry))
                for item in ordered:
                    await stack.enter_async_context(item)
                self._opened = stack.pop_all()
        except BaseException:
            open_apps.remove(self)
            raise

    def _to_open(self) -> list[AbstractAsyncContextManager[object]]:
        """What it opens, with what bare providers and backends make together before the first of them."""
        if "default" in self._coordinations() or (serving := self._of_bare_ones()) is None:
            return self._uses
        first = next(place for place, item in enumerate(self._uses) if serving.is_source(item))
        return [*self._uses[:first], serving, *self._uses[first:]]

    async def _end_use(self) -> None:
        """Close what it uses, in reverse order."""
        try:
            await self._opened.aclose()
        finally:
            open_apps.remove(self)

    def bound(self) -> AbstractContextManager[None]:
        """A `with` block whose locks and elections are those of this app, where several are open in a process.

        It holds for the tasks started in the block and for `asyncio.to_thread`, but not for a plain `Thread`, which
        needs a block of its own. The app need not be open yet; whoever uses it has to find it open.
        """
        return Binding(self)

    def hand_over(self) -> None:
        """Begin to end what other workers can take up, such as leadership; returns at once. Everything stays open."""
        for item in self._uses:
            if (begin := getattr(item, "hand_over", None)) is not None:
                begin()

    def hurry(self) -> None:
        """Cancel work that is waited for while this closes, such as fires of tasks; returns at once."""
        for item in self._uses:
            if (cancel := getattr(item, "hurry", None)) is not None:
                cancel()

    def abandon(self) -> None:
        """Forget what an event loop that is gone had opened."""
        self._opened.pop_all()
        if self in open_apps:
            open_apps.remove(self)

    @property
    def is_open(self) -> bool:
        """Whether it serves in this process: from when it begins to open until it has closed."""
        return self in open_apps and self._generation is lifecycle.generation

    async def __aenter__(self) -> Self:
        bind(self)
        try:
            await super().__aenter__()
        except BaseException:
            unbind(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, traceback)
        finally:
            unbind(self)

    def __enter__(self) -> Self:
        """Open it on an event loop in a thread, for a block of code that has no running loop.

        Raises:
            OutOfContextError: an event loop runs in this thread, or it is open on another one.
        """
        self._background.open(self)
        bind(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._background.close()
        finally:
            unbind(self)


def _is_coordination(item: object) -> "TypeGuard[Coordination]":
    return getattr(item, "kind", None) == "coordination"


def _environment(given: str | None) -> str:
    environment = given or os.environ.get("GREL_ENVIRONMENT") or "development"
    if environment not in ENVIRONMENTS:
        source = "environment=" if given else "GREL_ENVIRONMENT"
        raise SettingsValidationError(f"Grelmicro: {source} should be one of {', '.join(ENVIRONMENTS)}")
    return environment
