"""A lease can be taken away from its holder, who learns of it and loses nothing that came after it."""

import asyncio
from typing import Any, cast

import pytest

from grelmicro.coordination import Coordination, LeaderElection, Lock, LockHandle, TaskLock, breaking
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter
from grelmicro.errors import (
    BackendUnavailableError,
    LockLostError,
    LockNotOwnedError,
    OutcomeUnknownError,
    SettingsValidationError,
)
from grelmicro.testing import MovableClock
from tests.helpers.stores import Apply, Fault, refused, reply_lost, request_lost, silence
from tests.helpers.worlds import PATIENCE, World, eventually, pass_by

pytestmark = pytest.mark.usefixtures("nothing_left")


def operator(world: World) -> Coordination:
    """The coordination of another process than the holders'."""
    return Coordination(world.store())


async def test_a_held_lock_is_broken_on_every_store(real_world: World) -> None:
    async with real_world.client() as holder, real_world.client() as waiter, operator(real_world) as ops:
        assert await ops.break_lock("cart") is None, "nobody holds it"
        held = await Lock("cart", backend=holder, worker="web-1", lease_duration=60).acquire()
        assert await ops.break_lock("cart", held.fencing_token - 1) is None
        assert await ops.break_lock("cart", if_fence=held.fencing_token + 1) is None
        waiting = asyncio.create_task(Lock("cart", backend=waiter).acquire(timeout=30))
        await eventually(lambda: waiter.queues.lines, "it waits")
        broken = await ops.break_lock("cart", held.fencing_token)
        assert broken is not None
        assert (broken.worker, broken.fence) == ("web-1", held.fencing_token)
        successor = await asyncio.wait_for(waiting, 10)
        assert successor.fencing_token > held.fencing_token
        with pytest.raises(LockNotOwnedError, match="cannot be extended: it was broken by an operator; stop the"):
            await held.extend()
        assert held.lost
        assert successor.valid
        await successor.extend()
        await successor.release()


async def test_a_broken_block_ends_at_its_next_renewal(world: World, clock: MovableClock) -> None:
    async with world.client() as holder, operator(world) as ops:
        lock = Lock("cart", backend=holder, lease_duration=30, auto_renew=True)
        with pytest.raises(LockLostError, match="it was broken by an operator; stop the guarded work, and find out"):
            async with lock as held:
                assert await ops.break_lock("cart") is not None
                assert held.valid, "it cannot know yet"
                await pass_by(clock, holder, 10.5)
                await asyncio.Event().wait()


async def test_a_holder_in_the_same_process_learns_of_it_at_once(world: World) -> None:
    async with operator(world) as ops:
        lock = ops.lock("cart", auto_renew=True, worker="web-1")
        with pytest.raises(LockLostError, match="it was broken by"):
            async with asyncio.timeout(10), lock:
                assert await ops.break_lock("cart") is not None
                await asyncio.Event().wait()


async def test_the_name_of_the_operator_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with world.client() as holder, operator(world) as ops:
        cast(LockAdapter, ops.lock_backend).worker = "ops-1"
        held = await Lock("cart", backend=holder, worker="web-1").acquire()
        await ops.break_lock("cart")
        with pytest.raises(LockLostError, match="it was broken by ops-1"):
            async with held:
                pass
    assert f"lock:cart was broken: it was held by 'web-1' under fence {held.fencing_token}" in caplog.text
    assert held.token not in caplog.text


async def test_the_fence_rises_before_anybody_else_acquires_it(world: World) -> None:
    async with world.client() as holder, operator(world) as ops:
        held = await Lock("cart", backend=holder).acquire()
        await ops.break_lock("cart")
        record = await holder.read("lock:cart")
        assert record is not None
        assert (record.holder, record.fence > held.fencing_token) == ("", True)
        again = await Lock("cart", backend=holder).acquire(timeout=0)
        assert again.fencing_token > record.fence
        with pytest.raises(LockLostError, match="broken"):
            async with held:
                pass
        await again.release()


async def test_a_task_lock_and_a_role_are_broken_too(world: World, clock: MovableClock) -> None:
    store = world.store()
    async with LockAdapter(store) as holder, operator(world) as ops:
        task = TaskLock("report", backend=holder, min_hold_duration=20, auto_renew=True)
        with pytest.raises(LockLostError, match="it was broken by"):
            async with task:
                assert await ops.break_lock("report", kind="tasklock") is not None
        assert not await task.locked()
        leader = LeaderElection("feed", backend=LeaderElectionAdapter(store), worker="web-1", retry_jitter=0.0)
        service = asyncio.create_task(leader())
        await eventually(leader.is_leader, "it leads")
        fence = leader.guard().fence
        lost = asyncio.create_task(leader.wait_lose_leader())
        broken = await ops.break_lock("feed", fence, kind="leader")
        assert broken is not None
        assert (broken.worker, broken.fence) == ("web-1", fence)
        async with asyncio.timeout(PATIENCE):
            while not (lost.done() and leader.is_leader()):
                await clock.advance(0.5)
                await asyncio.sleep(0.01)  # for the store to answer
        assert leader.guard().fence > fence
        service.cancel()
        await asyncio.wait({service, lost})


async def test_a_role_that_was_broken_is_told_in_the_log(
    world: World, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with operator(world) as ops:
        leader = ops.leaderelection("feed", retry_jitter=0.0)
        service = asyncio.create_task(leader())
        await eventually(leader.is_leader, "it leads")
        await ops.break_lock("feed", kind="leader")
        async with asyncio.timeout(PATIENCE):
            while "it was broken by an operator" not in caplog.text:
                await clock.advance(0.5)
                await asyncio.sleep(0.01)
        service.cancel()
        await asyncio.wait({service})


async def test_a_lock_that_changed_hands_meanwhile_is_left_alone(world: World) -> None:
    """The holder that the operator saw gives it back, and another one acquires it, just before it is broken."""
    store = world.troubled()
    async with world.client() as holder, Coordination(store) as ops:
        first = await Lock("cart", backend=holder).acquire()
        second: list[LockHandle] = []

        async def overtaken(apply: Apply) -> object:
            await first.release()
            second.append(await Lock("cart", backend=holder).acquire())
            return await apply()

        store.suffer("release", overtaken)
        assert await ops.break_lock("cart") is None
        assert second[0].valid
        await second[0].extend()
        await second[0].release()


async def test_a_holder_that_renews_meanwhile_loses_it(world: World) -> None:
    store = world.troubled()
    async with world.client() as holder, Coordination(store) as ops:
        held = await Lock("cart", backend=holder).acquire()

        async def overtaken(apply: Apply) -> object:
            await held.extend()
            return await apply()

        store.suffer("release", overtaken)
        assert await ops.break_lock("cart") is not None
        with pytest.raises(LockNotOwnedError, match="broken"):
            await held.extend()


@pytest.mark.parametrize("fault", [reply_lost, request_lost])
async def test_a_release_without_an_answer_is_cleared_up(world: World, clock: MovableClock, fault: Fault) -> None:
    store = world.troubled()
    async with world.client() as holder, Coordination(store) as ops:
        held = await Lock("cart", backend=holder).acquire()
        store.suffer("release", fault)
        breaking = asyncio.create_task(ops.break_lock("cart"))
        await eventually(lambda: store.calls["release"], "the release was sent")
        while not breaking.done():
            await clock.advance(0.1)
            await asyncio.sleep(0.005)
        broken = await breaking
        assert broken is not None
        assert broken.fence == held.fencing_token
        with pytest.raises(LockLostError, match="broken"):
            async with held:
                pass


async def test_a_store_that_stays_silent_or_fails_is_told(
    world: World, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaking, "BREAK_LIMIT", 0.0)
    store = world.troubled()
    async with world.client() as holder, Coordination(store) as ops:
        held = await Lock("cart", backend=holder).acquire()
        store.break_down(request_lost, "release")
        with pytest.raises(OutcomeUnknownError):
            await ops.break_lock("cart")
        store.break_down(refused, "read")
        with pytest.raises(BackendUnavailableError):
            await ops.break_lock("cart")
        store.heal()
        async with asyncio.timeout(10):
            while (record := await holder.read("lock:cart")) is not None and record.granted_to(held.token):
                await clock.advance(0.5)  # it is repeated in the background
        with pytest.raises(LockNotOwnedError):
            await held.extend()


async def test_what_becomes_of_the_note_changes_nothing(world: World) -> None:
    store = world.troubled()
    async with world.client() as holder, Coordination(store) as ops:
        for fault in (refused, request_lost, reply_lost):
            held = await Lock("cart", backend=holder).acquire()
            store.suffer("acquire", fault)
            assert await ops.break_lock("cart") is not None
            with pytest.raises(LockLostError, match="taken over|broken"):
                async with held:
                    pass


async def test_a_reason_that_cannot_be_read_delays_the_loss_by_little(world: World, clock: MovableClock) -> None:
    store = world.troubled()
    async with LockAdapter(store) as holder, operator(world) as ops:
        held = await Lock("cart", backend=holder).acquire()
        await ops.break_lock("cart")
        store.break_down(silence, "read")
        extending = asyncio.create_task(held.extend())
        await eventually(lambda: not held.valid, "it is not valid, whatever the reason")
        await clock.advance(1.1)
        with pytest.raises(LockNotOwnedError, match="it expired or was taken over"):
            await extending
        store.heal()


async def test_a_lease_that_ran_out_was_not_broken(world: World, clock: MovableClock) -> None:
    async with world.client() as holder, operator(world) as ops:
        held = await Lock("cart", backend=holder, lease_duration=5).acquire()
        await ops.break_lock("cart")
        other = await Lock("cart", backend=holder, lease_duration=5).acquire()
        await clock.advance(6.0)
        for handle in (held, other):
            with pytest.raises(LockLostError, match="its lease ran out"):
                handle.raise_if_lost()


async def test_what_is_no_name_kind_or_fence_is_refused(world: World) -> None:
    async with operator(world) as ops:
        with pytest.raises(
            SettingsValidationError, match=r"break_lock\(\): if_fence should be a fencing token, not str"
        ):
            await ops.break_lock("cart", cast(Any, "7"))
        with pytest.raises(SettingsValidationError, match="kind should be one of"):
            await ops.break_lock("cart", kind=cast(Any, "schedule"))
        with pytest.raises(SettingsValidationError, match=r"break_lock\(\): name is empty"):
            await ops.break_lock("")


async def test_a_free_record_stays_free(world: World) -> None:
    async with world.client() as client, operator(world) as ops:
        held = await Lock("cart", backend=client).acquire()
        await held.release()
        record = await client.read("lock:cart")
        assert await ops.break_lock("cart") is None
        after = await client.read("lock:cart")
        assert record is not None
        assert after is not None
        assert after.fence == record.fence


async def test_a_loss_is_told_although_its_reason_is_not_read(world: World, clock: MovableClock) -> None:
    """The caller is cancelled, or the backend closed, while it is looked for."""
    store = world.troubled()
    async with operator(world) as ops:
        async with LockAdapter(store) as holder:
            extended = await Lock("cart", backend=holder).acquire()
            renewed = await Lock("shelf", backend=holder, auto_renew=True).acquire()
            for name in ("cart", "shelf"):
                await ops.break_lock(name)
            store.break_down(silence, "read")
            extending = asyncio.create_task(extended.extend())
            holder.renewer.renew_now("lock:shelf")
            await eventually(lambda: not extended.valid and not renewed.valid, "both are lost")
            extending.cancel()
            await asyncio.wait({extending})
            assert extending.cancelled()
            assert extended.why_lost() == "it expired or was taken over"
        assert renewed.why_lost() == "it expired or was taken over"
        store.heal()
