"""At SIGTERM and SIGINT leadership is handed over at once, and whatever handled the signal before does its part."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.signals import handing_over

BOTH = [signal.SIGTERM, signal.SIGINT]


class Part:
    """Something that an app hands over."""

    def __init__(self) -> None:
        self.times = 0
        self.hurried = 0

    def hand_over(self) -> None:
        self.times += 1

    def hurry(self) -> None:
        self.hurried += 1

    async def __aenter__(self) -> "Part":
        return self

    async def __aexit__(self, *_: object) -> None:
        return


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Let `handler` handle both signals."""
    before = {number: signal.signal(number, handler) for number in BOTH}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that the handler before ours got."""
    got: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        got.append(number)

    with handled_by(handler):
        yield got


async def send(number: int) -> None:
    """Send a signal to this process, and let the event loop see it."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", BOTH)
async def test_a_signal_is_handed_on(heard: list[int], number: int) -> None:
    part = Part()
    with handing_over(part):
        await send(number)
        assert (part.times, heard) == (1, [number])
        await send(number)
        assert (part.times, heard) == (2, [number, number])


@pytest.mark.parametrize("first", [[], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]])
async def test_a_second_interrupt_hurries_and_no_other_signal_does(heard: list[int], first: list[int]) -> None:
    part = Part()
    with handing_over(part, hurry=part.hurry):
        for number in [*first, signal.SIGINT, signal.SIGTERM]:
            await send(number)
        assert part.hurried == 0
        await send(signal.SIGINT)
        assert part.hurried == 1


async def test_handlers_are_put_back(heard: list[int]) -> None:
    part = Part()
    before = [signal.getsignal(number) for number in BOTH]
    with handing_over(part):
        assert [signal.getsignal(number) for number in BOTH] != before
    assert [signal.getsignal(number) for number in BOTH] == before
    await send(signal.SIGTERM)
    assert (part.times, heard) == (0, [signal.SIGTERM])


async def test_handlers_are_put_back_after_an_error(heard: list[int]) -> None:
    before = [signal.getsignal(number) for number in BOTH]
    with pytest.raises(ValueError, match="inside"), handing_over(Part()):
        raise ValueError("inside")
    assert [signal.getsignal(number) for number in BOTH] == before


@pytest.mark.parametrize("number", BOTH)
async def test_a_handler_of_the_event_loop_is_called_too(number: int) -> None:
    part = Part()
    loop = asyncio.get_running_loop()
    with handled_by(signal.getsignal(number)):
        called: list[int] = []
        loop.add_signal_handler(number, called.append, number)
        try:
            with handing_over(part):
                await send(number)
                await asyncio.sleep(0.05)
            assert (part.times, called) == (1, [number])
        finally:
            loop.remove_signal_handler(number)


async def test_a_signal_that_is_ignored_hands_nothing_over() -> None:
    part = Part()
    with handled_by(signal.SIG_IGN), handing_over(part):
        for number in BOTH:
            await send(number)
    assert part.times == 0


async def test_quit_hands_over_where_somebody_handles_it() -> None:
    """gunicorn sends it to its workers, which handle it, and not always by ending."""
    part = Part()
    called: list[int] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGQUIT, called.append, signal.SIGQUIT)
    try:
        with handing_over(part):
            await send(signal.SIGQUIT)
            await asyncio.sleep(0.05)
        assert (part.times, called) == (1, [signal.SIGQUIT])
    finally:
        loop.remove_signal_handler(signal.SIGQUIT)


async def test_quit_is_left_alone_where_nobody_handles_it() -> None:
    """It makes a core dump."""
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    with handing_over(Part()):
        assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL


async def test_another_handler_that_was_set_meanwhile_stays(heard: list[int]) -> None:
    """It may call ours, although what ours served has ended."""
    part = Part()
    kept: list[Callable[..., object]] = []

    def late(number: int, frame: FrameType | None) -> None:
        kept[0](number, frame)

    with handing_over(part):
        ours = signal.signal(signal.SIGTERM, late)
        assert callable(ours)
        kept.append(ours)
        await send(signal.SIGTERM)
        assert (part.times, heard) == (1, [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is late
    await send(signal.SIGTERM)
    assert (part.times, heard) == (1, [signal.SIGTERM] * 2)


async def test_two_apps_hear_one_signal(heard: list[int]) -> None:
    parts = [Part(), Part()]
    async with Grelmicro(uses=[parts[0]], signals=True), Grelmicro(uses=[parts[1]], signals=True):
        await send(signal.SIGTERM)
    assert ([part.times for part in parts], heard) == ([1, 1], [signal.SIGTERM])


async def test_apps_may_end_in_the_order_in_which_they_began(heard: list[int]) -> None:
    parts = [Part(), Part()]
    apps = [Grelmicro(uses=[part], signals=True) for part in parts]
    for app in apps:
        await app.__aenter__()
    for app in apps:
        await app.__aexit__(None, None, None)
    await send(signal.SIGTERM)
    assert ([part.times for part in parts], heard) == ([0, 0], [signal.SIGTERM])


@pytest.mark.parametrize("number", BOTH)
async def test_nothing_is_handed_over_unless_asked(heard: list[int], number: int) -> None:
    part = Part()
    async with Grelmicro(uses=[part]):
        await send(number)
    assert (part.times, heard) == (0, [number])


def test_in_another_thread_signals_are_left_alone(heard: list[int]) -> None:
    before = [signal.getsignal(number) for number in BOTH]
    seen: list[Any] = []

    async def main() -> None:
        async with Grelmicro(uses=[Part()], signals=True):
            seen.extend(signal.getsignal(number) for number in BOTH)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(10)
    assert seen == before
