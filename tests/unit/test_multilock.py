"""Several locks as one: what it takes, in which order, and what its handle tells."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from grelmicro import Grelmicro
from grelmicro.coordination import (
    Coordination,
    Lock,
    LockNotOwnedError,
    LockReentrantError,
    LockTimeoutError,
    MultiLock,
    TaskLock,
)
from grelmicro.coordination.adapters import LockAdapter
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.events import Event, listen
from tests.helpers.scripts import script
from tests.helpers.worlds import REAL_KINDS, World

LONG = 3600.0


def locks(client: LockAdapter, *names: str, **settings: Any) -> list[Lock]:
    """A lock of each name."""
    return [Lock(name, backend=client, **{"lease_duration": LONG, **settings}) for name in names]


async def free(client: LockAdapter, *names: str) -> list[str]:
    """Those of `names` that nobody holds."""
    return [name for name in names if not await Lock(name, backend=client).locked()]


async def test_the_block_holds_all_of_them(real_world: World) -> None:
    async with real_world.client() as client, real_world.client() as other:
        async with MultiLock(*locks(client, "b", "c", "a")) as held:
            assert held.valid
            assert await free(other, "a", "b", "c") == []
            assert [handle.name for handle in held.handles] == ["b", "c", "a"]
        assert await free(other, "a", "b", "c") == ["a", "b", "c"]


async def test_a_handle_guards_a_block_and_is_released_once(world: World) -> None:
    async with world.client() as client:
        multi = MultiLock(*locks(client, "b", "a"))
        async with await multi.acquire(timeout=5) as held:
            assert (held.valid, held.lost, held.released) == (True, False, False)
            held.raise_if_lost()
        assert (held.valid, held.lost, held.released, held.expires_in) == (False, False, True, 0.0)
        assert await free(client, "a", "b") == ["a", "b"]
        with pytest.raises(LockNotOwnedError) as caught:
            await held.release()
        assert str(caught.value) == "locks 'a, b' are released already: acquire them again"


async def test_the_shortest_lease_is_told(world: World) -> None:
    async with world.client() as client:
        short, long = locks(client, "b", lease_duration=10)[0], locks(client, "a")[0]
        async with MultiLock(long, short) as held:
            assert 9 < held.expires_in <= 10


async def test_they_are_taken_in_the_order_of_their_names_and_given_back_in_the_opposite(world: World) -> None:
    events: list[Event] = []
    stop = listen(events.append)
    try:
        async with world.client() as client, MultiLock(*locks(client, "b", "c", "a")):
            pass
    finally:
        stop()
    assert [(event.kind, event.name) for event in events if event.kind in ("acquired", "held", "refused")] == [
        ("acquired", "lock:a"),
        ("acquired", "lock:b"),
        ("acquired", "lock:c"),
        ("held", "lock:c"),
        ("held", "lock:b"),
        ("held", "lock:a"),
    ]


@pytest.mark.parametrize("orders", [("abc", "cba"), ("abc", "bca", "cab", "acb"), ("ab", "bc", "ca")])
async def test_opposite_orders_never_wait_for_each_other(matrix_world: World, orders: tuple[str, ...]) -> None:
    inside: set[str] = set()
    rounds = 0

    async def work(client: LockAdapter, order: str) -> None:
        nonlocal rounds
        multi = MultiLock(*locks(client, *order))
        for _ in range(5):
            async with await multi.acquire(timeout=50):
                assert not inside & set(order)
                inside.update(order)
                await asyncio.sleep(0.001)
                inside.difference_update(order)
                rounds += 1

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(matrix_world.client()) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            for number in range(3 * len(orders)):
                group.create_task(work(clients[number % 2], orders[number % len(orders)]))
        assert await free(clients[0], *"abc") == list("abc")
    assert rounds == 5 * 3 * len(orders)


OPPOSITE = """
import asyncio, sys
from grelmicro.coordination import Coordination, Lock, MultiLock

async def main(url, namespace, order):
    async with Coordination.from_url(url, namespace=namespace).lock_backend as backend:
        multi = MultiLock(*(Lock(name, backend=backend, lease_duration=3600) for name in order))
        print("open", flush=True)
        sys.stdin.readline()
        for _ in range(30):
            async with await multi.acquire(timeout=25):
                await asyncio.sleep(0)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("real_world", [kind for kind in REAL_KINDS if kind != "memory"], indirect=True)
async def test_processes_with_opposite_orders_never_wait_for_each_other(real_world: World, namespace: str) -> None:
    url = real_world.url or f"sqlite:///{real_world.path}"

    def run() -> None:
        with script(OPPOSITE, url, namespace, "abc") as one, script(OPPOSITE, url, namespace, "cba") as two:
            for process in (one, two):
                assert process.hear() == "open"
            for process in (one, two):
                process.tell()
            assert [process.end() for process in (one, two)] == [(0, "", ""), (0, "", "")]

    await asyncio.to_thread(run)


async def test_what_another_one_holds_is_waited_for(real_world: World) -> None:
    async with real_world.client() as client, real_world.client() as other:
        theirs = await locks(other, "b")[0].acquire()
        waiting = asyncio.create_task(MultiLock(*locks(client, "c", "b", "a")).acquire())
        while await free(other, "a"):
            await asyncio.sleep(0.002)
        assert await free(other, "c") == ["c"], "it is not its turn yet"
        await theirs.release()
        held = await asyncio.wait_for(waiting, 20)
        assert held.valid
        await held.release()


@pytest.mark.parametrize("timeout", [0, 0.1])
async def test_a_refusal_names_the_lock_and_leaves_nothing_held(real_world: World, timeout: float) -> None:
    async with real_world.client() as client, real_world.client() as other:
        multi = MultiLock(*locks(client, "a", "b", "c"))
        async with locks(other, "b")[0]:
            with pytest.raises(LockTimeoutError, match=r"[Ll]ock 'b' is held by another holder") as caught:
                await multi.acquire(timeout=timeout)
            assert await free(other, "a", "c") == ["a", "c"], "at once"
            assert timeout or 3000 < (caught.value.retry_after or 0) <= LONG
        async with await multi.acquire(timeout=5):
            pass


async def test_the_timeout_is_for_all_of_them(real_world: World) -> None:
    """The second one is waited for no longer than the first one left."""
    async with real_world.client() as client, real_world.client() as other:
        first, _ = await locks(other, "a")[0].acquire(), await locks(other, "b")[0].acquire()
        waiting = asyncio.create_task(MultiLock(*locks(client, "a", "b")).acquire(timeout=1))
        await asyncio.sleep(0.3)
        await first.release()
        with pytest.raises(LockTimeoutError, match=r"lock 'b' .* was not released within 0\.\d{1,3} s"):
            await waiting
        assert await free(other, "a") == ["a"]


async def test_equal_names_are_one_lock(world: World) -> None:
    async with world.client() as client:
        first, second, again = *locks(client, "b", "a"), locks(client, "b", lease_duration=1.0)[0]
        multi = MultiLock(first, second, first, again)
        assert multi.name == "a, b"
        async with multi as held:
            assert [handle.name for handle in held.handles] == ["b", "a", "b", "b"]
            assert len({id(handle) for handle in held.handles}) == 2
            assert held.expires_in > 1, "with the settings of the first one"


async def test_equal_names_at_two_stores_are_refused(world: World) -> None:
    async with world.client() as client, world.client() as other:
        with pytest.raises(SettingsValidationError) as caught:
            await MultiLock(*locks(client, "a"), *locks(other, "a")).acquire()
        assert str(caught.value) == (
            "MultiLock has two locks named 'a' with different backends, of which it would take one: "
            "give the other one another name, or use it by itself"
        )
        assert await free(client, "a") == ["a"]


async def test_what_the_task_holds_already_is_refused_before_anything_is_taken(world: World) -> None:
    store = world.troubled()
    async with LockAdapter(store) as client:
        first, last = locks(client, "a", "z")
        await last.acquire()
        asked = store.calls["acquire"]
        for multi in (MultiLock(first, last), MultiLock(first, *locks(client, "z"), last)):
            with pytest.raises(LockReentrantError, match="Lock 'z' is held by this task or thread already"):
                await multi.acquire()
        assert store.calls["acquire"] == asked
        await last.release()
        both = MultiLock(first, last)
        async with both:
            with pytest.raises(LockReentrantError):
                await both.acquire()
            with pytest.raises(LockReentrantError):
                await first.acquire()
        async with both:
            pass


@pytest.mark.parametrize("given", [(), ("cart",), ([],), (TaskLock("report"),), (Lock("cart"), None)])
def test_what_is_no_lock_is_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(SettingsValidationError, match=r"MultiLock\(Lock\('a'\), Lock\('b'\)\)"):
        MultiLock(*given)


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "soon"])
async def test_a_wrong_timeout_is_refused(world: World, timeout: Any) -> None:
    async with world.client() as client:
        with pytest.raises(SettingsValidationError, match="timeout"):
            await MultiLock(*locks(client, "a")).acquire(timeout=timeout)


async def test_a_block_that_was_not_entered_cannot_be_left(world: World) -> None:
    async with world.client() as client:
        with pytest.raises(LockNotOwnedError, match="MultiLock 'a' cannot be released at the end of its block"):
            await MultiLock(*locks(client, "a")).__aexit__(None, None, None)


async def test_the_apps_backend_is_found_at_each_use() -> None:
    multi = MultiLock(Lock("a"), Lock("b"))
    with pytest.raises(OutOfContextError, match="Lock 'a'"):
        await multi.acquire()
    async with Grelmicro(uses=[Coordination.from_url("memory://")]), multi as held:
        assert held.valid


async def test_who_asks_holds_them_also_where_another_task_does_the_work(world: World) -> None:
    async with world.client() as client:
        lock, *_ = given = locks(client, "a", "b")
        held = await asyncio.wait_for(asyncio.shield(MultiLock(*given).acquire()), 5)
        with pytest.raises(LockReentrantError):
            await lock.acquire()
        await lock.release()
        await asyncio.create_task(held.release())
        assert held.released
        await lock.acquire()


async def test_tasks_share_one_object(world: World) -> None:
    most = inside = 0

    async def work(multi: MultiLock) -> None:
        nonlocal inside, most
        async with multi as held:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            assert held.valid
            inside -= 1

    async with world.client() as client:
        multi = MultiLock(*locks(client, "a", "b"))
        await asyncio.gather(*(work(multi) for _ in range(10)))
        assert most == 1
        assert await free(client, "a", "b") == ["a", "b"]
