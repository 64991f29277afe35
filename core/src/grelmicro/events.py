"""What happened, told to whoever listens: the one place where meters and traces attach."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger("grelmicro")

Kind = Literal[
    "acquired", "refused", "waited", "handed_over", "held", "renewed", "lost", "led", "fired", "outage", "recovered"
]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a lease, a term of leadership, a task or a store."""

    kind: Kind
    name: str
    """The stored name, with its prefix: `lock:cart`, `leader:main`, or a task's name; a store's title for an outage."""
    seconds: float | None = None
    """How long it took or lasted, where that means something."""
    detail: str = ""
    """The error's class for a refusal by a failing store, the outcome of a fired task, the reason of a loss."""
    count: int = 1
    """How often it happened: more than once for the fires of a task that were missed one after the other."""


Listener = Callable[[Event], object]

listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event, on the thread where it happens; returns what stops it.

    A listener must be quick and must not raise: what it raises is logged and goes nowhere else.
    """
    listeners.append(listener)

    def stop() -> None:
        if listener in listeners:
            listeners.remove(listener)

    return stop


def emit(kind: Kind, name: str, seconds: float | None = None, detail: str = "", count: int = 1) -> None:
    """Tell every listener; costs nothing when there is none."""
    if not listeners:
        return
    event = Event(kind, name, seconds, detail, count)
    for listener in tuple(listeners):
        try:
            listener(event)
        except Exception:
            logger.exception("a listener of grelmicro events failed on %s", kind)
