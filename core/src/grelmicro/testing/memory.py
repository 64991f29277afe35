"""An application's own `Grelmicro` on a memory store, for as long as a test takes."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from grelmicro import Grelmicro
from grelmicro.clock import SYSTEM_CLOCK, Clock
from grelmicro.coordination import Coordination
from grelmicro.coordination.adapters import LeaseAdapter
from grelmicro.coordination.identity import forget_this_call
from grelmicro.coordination.provider import Provider
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.leases import LeaseStore
from grelmicro.lifecycle import Shared
from grelmicro.providers.memory import MemoryProvider
from grelmicro.task import IntervalTask, Tasks
from grelmicro.task.task import no_outcomes

A = TypeVar("A", Grelmicro, Coordination)

_clocks: weakref.WeakKeyDictionary[Grelmicro | Coordination, Clock] = weakref.WeakKeyDictionary()
"""What is on memory now, and the time there."""


@contextmanager
def on_memory(app: A, *, clock: Clock | None = None) -> Iterator[A]:
    """Keep the leases of an application's own `Grelmicro` in memory for a block, whatever store it was built with.

        with on_memory(micro), TestClient(app) as client:
            assert client.post("/carts/42/checkout").status_code == 200

    Enter it before the app is opened, and leave it when that is closed again. Every block begins without any leases and
    with no fire of its tasks counted. Locks and elections that were built from the app, or from a provider that it
    uses, move with it. Nothing that is not about leases is touched: what else the app uses is opened as ever.

    Args:
        app: a `Grelmicro`, or a `Coordination`; it is what `with` gives, too.
        clock: the time of leases and of `Tasks`, such as a `MovableClock`; None: the machine's.

    Raises:
        OutOfContextError: the app is open when the block begins or ends, or is on memory already.
        SettingsValidationError: it uses a backend that is not on a store of leases, or a store as it is.
    """
    clock = clock or SYSTEM_CLOCK
    if app in _clocks:
        raise OutOfContextError("on_memory(): this app is on memory already: one block around the test is enough")
    uses = _uses(app)
    keepers: list[Provider | LeaseAdapter] = _keepers(uses)
    _check_closed(
        [app, *keepers],
        "enter it before the app is opened; if this test did not open it, an earlier one left it open: there, close it "
        "also when the test fails, as `with TestClient(app)` and `async with micro` do",
    )
    back = ExitStack()
    forget_this_call()  # what a test left held in this thread is not held by the next one
    back.callback(forget_this_call)
    _move(keepers, clock, back)
    for tasks in uses:
        if isinstance(tasks, Tasks):
            _begin_anew(tasks, clock, back)
    _clocks[app] = clock
    try:
        yield app
    except BaseException as error:
        try:
            _end(app, keepers, back)
        except OutOfContextError as left_open:
            error.add_note(str(left_open))
        raise
    else:
        _end(app, keepers, back)


def clock_of(app: Grelmicro | Coordination) -> Clock | None:
    """The time of an app that is on memory now."""
    return _clocks.get(app)


def _uses(app: Grelmicro | Coordination) -> tuple[object, ...]:
    return app.uses if isinstance(app, Grelmicro) else (app,)


def _keepers(uses: tuple[object, ...]) -> list[Provider | LeaseAdapter]:
    """What knows where leases are, each once."""
    found: dict[int, Provider | LeaseAdapter] = {}
    for item in uses:
        for part in item.backends if isinstance(item, Coordination) else [item]:
            if isinstance(part, (Provider, LeaseAdapter)):
                found[id(part)] = part
            elif isinstance(part, LeaseStore) or isinstance(item, Coordination):
                raise SettingsValidationError(
                    f"on_memory(): nothing can take the place of {type(part).__name__}: "
                    "give the app a provider, or a Coordination with a provider or a store"
                )
    return list(found.values())


def _check_closed(resources: Iterable[Shared], remedy: str) -> None:
    for resource in resources:
        resource._leave_the_dead()  # a test that failed may have left it to an event loop that is gone
        if resource.is_open:
            raise OutOfContextError(f"on_memory(): {type(resource).__name__} is open: {remedy}")


def _move(keepers: list[Provider | LeaseAdapter], clock: Clock, back: ExitStack) -> None:
    """Give each store that is used one in memory in its place."""
    places: dict[int, LeaseStore] = {}
    stores = [keeper.store for keeper in keepers]  # before any moves: a provider takes its adapters along
    for keeper, store in zip(keepers, stores, strict=True):
        back.callback(keeper.move_to, store)
        keeper.move_to(places.setdefault(id(store), MemoryProvider(clock=clock).store))


def _begin_anew(tasks: Tasks, clock: Clock, back: ExitStack) -> None:
    """Run them on `clock`, and count from zero."""
    back.callback(partial(setattr, tasks, "_clock", tasks._clock))
    tasks._clock = clock
    for task in tasks.tasks:
        if isinstance(task, IntervalTask):
            back.callback(_count_from(task))
            task.last_fire, task.outcomes = None, no_outcomes()


def _count_from(task: IntervalTask) -> Callable[[], None]:
    """What puts back how often it fired until now."""
    last_fire, outcomes = task.last_fire, task.outcomes

    def put_back() -> None:
        task.last_fire, task.outcomes = last_fire, outcomes

    return put_back


def _end(app: Grelmicro | Coordination, keepers: list[Provider | LeaseAdapter], back: ExitStack) -> None:
    del _clocks[app]
    # What is open keeps its store: better that it stays in memory than that a test reaches for a server.
    _check_closed([app, *keepers], "close it inside the block, also when the test fails")
    back.close()
