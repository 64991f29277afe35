"""The leases of several locks last while the others are waited for; losing one is losing all."""

import asyncio
import gc

import pytest

from grelmicro import lifecycle
from grelmicro.coordination import (
    BackendUnavailableError,
    LockHandle,
    LockLostError,
    LockNotOwnedError,
    LockTimeoutError,
    MultiLock,
    MultiLockHandle,
    OutcomeUnknownError,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.coordination.wait import PATIENCE
from grelmicro.testing.clock import MovableClock
from tests.helpers.stores import Apply, late, refused, silence
from tests.helpers.worlds import World, eventually, pass_by
from tests.unit.test_multilock import free, locks


async def waiting_for_b(client: LockAdapter, other: LockAdapter, multi: MultiLock) -> asyncio.Task[MultiLockHandle]:
    """Have `multi` wait for a hint of `b`, which `other` holds, with `a` in hand."""
    waiting = asyncio.create_task(multi.acquire())

    def waits() -> bool:
        line = client.queues.lines.get("lock:b")
        return line is not None and line.offer is not None and len(client.renewer) > 0

    await eventually(waits, "it waits")
    return waiting


@pytest.mark.parametrize("auto_renew", [False, True])
async def test_a_lease_lasts_while_the_others_are_waited_for(
    world: World, clock: MovableClock, auto_renew: bool
) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        theirs = await locks(other, "b")[0].acquire()
        multi = MultiLock(*locks(client, "a", "b", lease_duration=9, auto_renew=auto_renew))
        waiting = await waiting_for_b(client, other, multi)
        await pass_by(clock, client, 100)
        assert await free(other, "a") == []
        await theirs.release()
        held = await waiting
        assert held.valid
        assert held.expires_in > 4.5, "a good part of it is left"
        assert store.calls["renew"] == 0, "which takes no request, as a rule"
        assert len(client.renewer) == (2 if auto_renew else 0)
        await pass_by(clock, client, 12)
        assert held.valid == auto_renew, "afterwards their own settings count"
        if auto_renew:
            await held.release()


async def test_a_lease_that_became_short_is_renewed_at_the_end(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        theirs = await locks(other, "b")[0].acquire()
        waiting = await waiting_for_b(client, other, MultiLock(*locks(client, "a", "b", lease_duration=9)))
        store.break_down(refused, "renew_many")
        await pass_by(clock, client, 7)
        await theirs.release()
        held = await waiting
        assert held.expires_in > 8
        assert store.calls["renew"] == 1


@pytest.mark.parametrize("timeout", [None, 8.0, 7.0 + PATIENCE / 2])
async def test_a_lease_that_cannot_be_renewed_at_the_end_is_given_back(
    world: World, clock: MovableClock, timeout: float | None
) -> None:
    """It is only unknown whether it was if the store had the time to answer."""
    store = world.troubled()
    async with LockAdapter(store) as client, world.client() as other:
        theirs = await locks(other, "b")[0].acquire()
        multi = MultiLock(*locks(client, "a", "b", lease_duration=9))
        waiting = asyncio.create_task(multi.acquire(timeout=timeout))
        await eventually(lambda: "lock:b" in client.queues.lines, "it waits")
        store.break_down(refused, "renew_many")
        store.break_down(silence if timeout else refused, "renew")
        await pass_by(clock, client, 7)
        await theirs.release()
        if timeout is None:
            with pytest.raises(BackendUnavailableError):
                await waiting
        else:
            await eventually(lambda: store.calls["renew"], "it asks")
            await clock.advance(1.5)
            store.heal()
            with pytest.raises(OutcomeUnknownError if timeout == 8 else LockTimeoutError) as caught:
                await waiting
            assert str(caught.value) == (
                "lock 'a': the store did not renew it in time while others were taken, and all are given back: "
                "check the store, or give a longer timeout"
                if timeout == 8
                else "lock 'a': others were taken just before the end of 7.25 s, which left no time to renew it, and "
                "all are given back: try again later, or give a longer timeout"
            )
        await eventually(lambda: not client._background, "they are given back")
        assert await free(other, "a", "b") == ["a", "b"]


async def test_a_lease_is_not_kept_alive_beyond_its_max_hold(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        await locks(other, "b")[0].acquire()
        multi = MultiLock(*locks(client, "a", lease_duration=9, max_hold=20), *locks(client, "b"))
        waiting = await waiting_for_b(client, other, multi)
        await pass_by(clock, client, 19)
        assert not waiting.done()
        await pass_by(clock, client, 3)
        with pytest.raises(LockLostError) as caught:
            await waiting
        assert str(caught.value) == (
            "lock 'a' was lost while others were taken with it, and all are given back: it was held for max_hold; "
            "try again, and use a longer max_hold if this happens often"
        )
        assert not client.queues.lines
        await pass_by(clock, client, 10)
        assert await free(other, "a") == ["a"]


async def test_a_loss_while_others_are_waited_for_ends_the_wait(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        theirs = await locks(other, "c")[0].acquire()
        given = locks(client, "a", "b", "c", lease_duration=9)
        waiting = asyncio.create_task(MultiLock(*given).acquire())
        await eventually(lambda: "lock:c" in client.queues.lines, "it waits")
        (mine,) = (handle for handle in given[0]._held.values())
        assert await other.release(mine.lease)
        await pass_by(clock, client, 4)
        with pytest.raises(LockLostError, match="lock 'a' was lost .*: it expired or was taken over"):
            await waiting
        assert waiting.cancelling() == 0
        assert not client.queues.lines
        await eventually(lambda: not client._background, "they are given back")
        assert await free(other, "a", "b") == ["a", "b"]
        assert not any(lock._held for lock in given)
        await theirs.release()
        assert await free(other, "c") == ["c"]


async def test_a_loss_that_nobody_noticed_is_no_grant(world: World, clock: MovableClock) -> None:
    """The process was paused while it waited for the last answer."""
    store = world.troubled()

    async def pause(apply: Apply) -> object:
        answer = await apply()
        clock._now += 20
        return answer

    async with LockAdapter(store) as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", lease_duration=9), *locks(client, "b", "c"))
        store.suffer("acquire", late(), late(), pause)
        with pytest.raises(LockLostError, match="lock 'a' was lost .*: its lease ran out"):
            await multi.acquire()
        await eventually(lambda: not client._background, "they are given back")
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]


@pytest.mark.parametrize("through", ["the object", "its handle"])
async def test_a_loss_of_one_cancels_the_block(world: World, clock: MovableClock, through: str) -> None:
    async with world.client() as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b", "c", lease_duration=9, auto_renew=True))
        began: asyncio.Future[LockHandle] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            async with multi if through == "the object" else await multi.acquire() as held:
                began.set_result(held.handles[1])
                try:
                    await asyncio.sleep(1000)
                finally:
                    assert held.lost
                    assert not held.valid
                    with pytest.raises(LockLostError, match="lock 'b' cannot be used"):
                        held.raise_if_lost()

        working = asyncio.create_task(work())
        assert await other.release((await began).lease)
        await pass_by(clock, client, 4)
        with pytest.raises(LockLostError, match="lock 'b' cannot be kept until its block ended"):
            await working
        assert working.cancelling() == 0
        assert await free(other, "a", "b", "c") == ["a", "b", "c"], "the others are given back"
        assert len(client.renewer) == 0


async def test_losing_another_one_does_not_disturb_the_cleanup(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        multi = MultiLock(*locks(client, "a", "b", lease_duration=9, auto_renew=True))
        began: asyncio.Future[MultiLockHandle] = asyncio.get_running_loop().create_future()
        cleaning, clean = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            async with multi as held:
                began.set_result(held)
                try:
                    await asyncio.sleep(1000)
                finally:
                    cleaning.set()
                    await clean.wait()

        working = asyncio.create_task(work())
        first, second = (await began).handles
        first.lose("a test said so")
        await cleaning.wait()
        second.lose("a test said so")
        await asyncio.sleep(0)
        clean.set()
        with pytest.raises(LockLostError) as caught:
            await working
        assert len(caught.value.__notes__) == 1, "both are told"
        assert working.cancelling() == 0
        await other.release(first.lease)


async def test_someone_elses_cancellation_is_not_taken_for_a_loss(world: World) -> None:
    async with world.client() as client, world.client() as other:
        await locks(other, "b")[0].acquire()
        given = locks(client, "a", "b", lease_duration=9)
        waiting = asyncio.create_task(MultiLock(*given).acquire())
        await eventually(lambda: "lock:b" in client.queues.lines, "it waits")
        (mine,) = given[0]._held.values()
        mine.lose("a test said so")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()


async def test_without_renewal_a_loss_is_told_at_the_end(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        multi = MultiLock(*locks(client, "a"), *locks(client, "b", lease_duration=9))
        with pytest.raises(LockLostError, match="lock 'b' .*: its lease ran out"):
            async with multi:
                await clock.advance(10)
        assert await free(other, "a", "b") == ["a", "b"]
        with pytest.raises(ValueError, match="the work failed") as failed:
            async with multi:
                await clock.advance(10)
                raise ValueError("the work failed")
        assert ["lock 'b'" in note for note in failed.value.__notes__] == [True]
        assert await free(other, "a", "b") == ["a", "b"]


async def test_a_release_gives_back_the_others_of_one_that_was_lost(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        held = await MultiLock(*locks(client, "a", "c"), *locks(client, "b", lease_duration=9)).acquire()
        await clock.advance(10)
        assert held.lost
        with pytest.raises(LockNotOwnedError, match="lock 'b' cannot be released: it expired or was taken over"):
            await held.release()
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]


async def test_one_that_the_block_gave_back_is_not_missed(world: World) -> None:
    async with world.client() as client, world.client() as other:
        async with MultiLock(*locks(client, "a", "b")) as held:
            await held.handles[0].release()
            assert not held.valid
            assert not held.lost
            assert not held.released
            assert await free(other, "a", "b") == ["a"]
        assert held.released
        assert await free(other, "a", "b") == ["a", "b"]


async def test_what_is_dropped_is_not_renewed(world: World, clock: MovableClock) -> None:
    async with world.client() as client:

        async def leave() -> None:
            await MultiLock(*locks(client, "a", "b", lease_duration=9, auto_renew=True)).acquire()

        await asyncio.create_task(leave())
        gc.collect()
        await pass_by(clock, client, 10)
        assert await free(client, "a", "b") == ["a", "b"]


async def test_they_are_left_held_for_a_while(world: World, clock: MovableClock) -> None:
    async with world.client() as client, world.client() as other:
        held = await MultiLock(*locks(client, "a", "b", auto_renew=True)).acquire()
        assert await held.shorten(5)
        assert held.released
        await eventually(lambda: not client._background, "the store knows")
        await clock.advance(4)
        assert await free(other, "a", "b") == []
        await clock.advance(2)
        assert await free(other, "a", "b") == ["a", "b"]


async def test_what_a_fork_inherits_is_lost(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as one process can tell."""
    async with world.client() as client, world.client() as other:
        held = await MultiLock(*locks(client, "a", "b", auto_renew=True)).acquire()
        with monkeypatch.context() as child:
            child.setattr(lifecycle, "generation", lifecycle.Generation())
            assert held.lost
            with pytest.raises(LockLostError, match="inherited through a fork"):
                held.raise_if_lost()
            with pytest.raises(LockNotOwnedError, match="inherited through a fork"):
                await held.release()
        assert await free(other, "a", "b") == []


async def test_closing_the_backend_ends_it(world: World) -> None:
    client = world.client()
    async with client:
        held = await MultiLock(*locks(client, "a", "b", auto_renew=True)).acquire()
    assert held.lost
    with pytest.raises(LockNotOwnedError, match="its backend was closed"):
        await held.release()
