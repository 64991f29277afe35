"""What another worker holds, in the test of an application."""

import asyncio
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock, WouldBlockError
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.providers.memory import MemoryProvider
from grelmicro.testing import MovableClock, held_elsewhere, leads, leads_elsewhere


def new(clock: MovableClock | None = None) -> Grelmicro:
    return Grelmicro(uses=[Coordination(MemoryProvider(clock=clock or MovableClock()))])


async def refused(name: str, kind: str) -> bool:
    """Whether the lock, or task lock, of this name is busy."""
    try:
        if kind == "lock":
            await (await Lock(name).acquire_nowait()).release()
        else:
            async with TaskLock(name, min_hold_duration=1e-6):
                pass
    except WouldBlockError:
        return True
    return False


@pytest.mark.parametrize(
    ("lock", "kind"),
    [("a:1", "lock"), (Lock("a:1"), "lock"), (TaskLock("a:1"), "tasklock")],
    ids=["name", "lock", "task"],
)
async def test_it_is_busy_for_the_block_and_for_nobody_else(lock: Any, kind: str) -> None:
    clock = MovableClock()
    async with new(clock) as micro:
        other = {"lock": "tasklock", "tasklock": "lock"}[kind]
        async with held_elsewhere(micro, lock) as theirs:
            assert (theirs.name, theirs.valid) == ("a:1", True)
            assert await refused("a:1", kind)
            assert not await refused("a:1", other)
            await clock.advance(1)
        assert not await refused("a:1", kind)
        await clock.advance(1)  # what was just taken has its minimum hold

        def in_thread() -> None:
            with held_elsewhere(micro, lock) as theirs:
                assert theirs.valid
                assert asyncio.run_coroutine_threadsafe(refused("a:1", kind), micro.get_loop()).result(30)

        await asyncio.to_thread(in_thread)
        await clock.advance(1)
        assert not await refused("a:1", kind)


async def test_a_task_lock_is_taken_over_after_its_lease() -> None:
    clock = MovableClock()
    async with new(clock) as micro, held_elsewhere(micro, TaskLock("report"), lease_duration=30):
        await clock.advance(29)
        assert await refused("report", "tasklock")
        await clock.advance(2)
        assert not await refused("report", "tasklock")


async def test_a_task_lock_is_waited_for_until_its_minimum_hold_is_over() -> None:
    clock = MovableClock()
    async with new(clock) as micro:
        async with TaskLock("report", min_hold_duration=20):
            pass

        async def take() -> float:
            async with held_elsewhere(micro, TaskLock("report"), timeout=30):
                return clock.now()

        taking = asyncio.create_task(take())
        while not taking.done():
            await clock.advance(1)
        assert 1_020 <= taking.result() <= 1_021


async def test_a_lock_with_a_backend_of_its_own_is_held_there() -> None:
    async with new() as micro, new() as other:
        lock = other.coordination.lock("a")
        async with held_elsewhere(micro, lock):
            assert await lock.locked()
            assert not await micro.coordination.lock("a").locked()


@pytest.mark.parametrize("name", ["a:{x}", "{tenant}:a", "a:{order.item_id}"])
async def test_a_template_is_told_from_a_name(name: str) -> None:
    async with new() as micro:
        with pytest.raises(SettingsValidationError, match="looks like a template: give the name itself, such as 'a:1'"):
            held_elsewhere(micro, name)
        async with held_elsewhere(micro, Lock(name)):
            assert await refused(name, "lock")
        for plain in ('{"id": 1}', "a{}", "a}b{"):
            async with held_elsewhere(micro, plain):
                assert await refused(plain, "lock")


@pytest.mark.parametrize("wrong", [3, None, LeaderElection("feed")], ids=["number", "none", "election"])
def test_something_that_is_no_lock_is_refused(wrong: Any) -> None:
    with pytest.raises(SettingsValidationError, match="takes the name of a lock, a Lock or a TaskLock, not"):
        held_elsewhere(new(), wrong)


@pytest.mark.parametrize("aid", [held_elsewhere, leads, leads_elsewhere], ids=lambda aid: aid.__name__)
async def test_before_the_app_is_entered_it_says_so(aid: Any) -> None:
    micro = new()
    block = aid(micro, "cart" if aid is held_elsewhere else LeaderElection("feed"))
    told = (
        rf"{aid.__name__}\(\): the app is not open: enter it first, with `with TestClient\(app\)` or `async with micro`"
    )
    with pytest.raises(OutOfContextError, match=told):
        async with block:
            pass
    with pytest.raises(OutOfContextError, match=told), block:
        pass
