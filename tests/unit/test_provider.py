"""A provider opens what it gives, and a subclass may give backends of its own."""

import asyncio
from collections.abc import Callable

import pytest

from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LeaderElection, Lock
from grelmicro.coordination.adapters import LeaderElectionAdapter, LockAdapter, ScheduleAdapter
from grelmicro.coordination.provider import Provider
from grelmicro.errors import OutcomeUnknownError, OutOfContextError
from grelmicro.providers.memory import MemoryProvider
from tests.helpers.stores import TroubledStore, reply_lost

pytestmark = pytest.mark.usefixtures("nothing_left")


class Own(MemoryProvider):
    """A provider whose backends are of classes of its own."""

    class Locks(LockAdapter): ...

    class Elections(LeaderElectionAdapter): ...

    class Schedules(ScheduleAdapter): ...

    def lock(self) -> LockAdapter:
        return self.Locks(self.store)

    def leaderelection(self) -> LeaderElectionAdapter:
        return self.Elections(self.store)

    def schedule(self) -> ScheduleAdapter:
        return self.Schedules(self.store)


@pytest.mark.parametrize(
    "coordination",
    [
        lambda: Coordination(Own()),
        lambda: Coordination(Own),
        lambda: Coordination(lock=Own, election=Own(), schedule=Own()),
    ],
)
def test_backends_of_a_subclass_are_its_own(coordination: Callable[[], Coordination]) -> None:
    built = coordination()
    assert isinstance(built.lock_backend, Own.Locks)
    assert isinstance(built.election_backend, Own.Elections)
    assert isinstance(built.schedule_backend, Own.Schedules)


async def test_backends_that_were_given_before_and_after_it_was_opened_are_open() -> None:
    provider = MemoryProvider()
    before = Lock("cart", backend=provider.lock())
    async with provider:
        async with before as held:
            assert held.valid
            assert await Lock("cart", backend=provider.lock()).locked()
        assert await provider.schedule().claim("report", 1.0)
        leader = LeaderElection("feed", backend=provider.leaderelection())
        election = asyncio.create_task(leader())
        await asyncio.wait_for(leader.wait_for_leader(), 10)
        election.cancel()
        await asyncio.wait({election})
    with pytest.raises(OutOfContextError, match="is not open"):
        await before.acquire()


async def test_what_ended_unknown_is_undone_before_the_provider_is_closed() -> None:
    store = TroubledStore(MemoryStore())
    async with Provider(store) as provider:
        store.suffer("acquire", reply_lost)
        with pytest.raises(OutcomeUnknownError):
            await Lock("cart", backend=provider.lock()).acquire(timeout=0)
    async with provider:
        assert not await Lock("cart", backend=provider.lock()).locked()
