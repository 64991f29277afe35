"""Hints by a watch of Kubernetes: what wakes whom, how it goes on, and what it costs."""

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import pytest

from grelmicro.backends.hints import ANSWER_LIMIT, LONGEST_PAUSE, OPENING_LIMIT, TEST_INTERVAL, Hints
from grelmicro.backends.kubernetes.cluster import Cluster
from grelmicro.backends.kubernetes.feed import RECENT, SHORTEST_WATCH, KubernetesFeed
from grelmicro.backends.kubernetes.names import hints_name
from grelmicro.backends.kubernetes.record import labels, selector
from grelmicro.backends.kubernetes.requests import Answer, Gone, Requests
from grelmicro.errors import BackendUnavailableError
from grelmicro.leases.outage import Outage
from grelmicro.testing import MovableClock
from tests.helpers.worlds import eventually

Body = dict[str, Any]
Event = tuple[int, Body]

PREFIX = "shop"
ECHO = hints_name(PREFIX)


class Shelf(Requests):
    """The Leases of a namespace, as the API server keeps and tells them; and its ways not to.

    All requests are counted by their kind.
    """

    def __init__(self) -> None:
        super().__init__(Cluster.at("default"))
        self.calls: Counter[str] = Counter()
        self.asked: list[tuple[str, ...]] = []
        self.objects: dict[str, Body] = {}
        self.silent = False  # watches begin, and tell nothing
        self.forbidden: set[str] = set()
        self.ends_at_once = False  # each watch, just when it begins
        self.end: Exception | None = None  # of such a watch; None: in order
        self.oldest = 0  # the first version from which one can still watch
        self.told_at_once: Body | None = None  # what happens just when a watch begins
        self._versions = count(100)
        self._log: list[Event] = []
        self._watches: set[asyncio.Queue[Body | Exception | None]] = set()

    # As the API server does it

    async def read(self, name: str, what: str, *, urgent: bool = False) -> Answer:
        await self._request("get")
        body = self.objects.get(name)
        return Answer(404, {}, None) if body is None else Answer(200, copy.deepcopy(body), None)

    async def create(self, body: Body, what: str, *, urgent: bool = False) -> Answer:
        await self._request("create")
        if body["metadata"]["name"] in self.objects:
            return Answer(409, {}, None)
        return Answer(201, self.change("ADDED", body), None)

    async def replace(self, name: str, body: Body, what: str, *, urgent: bool = False) -> Answer:
        await self._request("update")
        known = self.objects.get(name)
        if known is None:
            return Answer(404, {}, None)
        if known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            return Answer(409, {}, None)
        return Answer(200, self.change("MODIFIED", body), None)

    async def list(self, selector: str, what: str, *, limit: int, token: str = "") -> Answer:
        await self._request("list", selector, str(limit))
        return Answer(200, {"metadata": {"resourceVersion": self.version}, "items": []}, None)

    async def watch(
        self, selector: str, resource_version: str, started: Callable[[], None] | None = None
    ) -> AsyncGenerator[Body, None]:
        await self._request("watch", selector, resource_version)
        if self.ends_at_once:
            if self.end is not None:
                raise self.end
            return
        if int(resource_version) < self.oldest:
            raise Gone("it is too old")
        queue: asyncio.Queue[Body | Exception | None] = asyncio.Queue()
        for version, event in self._log:
            if version > int(resource_version) and not self.silent:
                queue.put_nowait(event)
        self._watches.add(queue)
        try:
            if started is not None:
                started()
            if self.told_at_once is not None:
                self.change("MODIFIED", self.told_at_once)
            while (told := await queue.get()) is not None:
                if isinstance(told, Exception):
                    raise told
                yield told
        finally:
            self._watches.discard(queue)

    # What happens to it

    @property
    def version(self) -> str:
        return str(self._log[-1][0] if self._log else 99)

    def change(self, kind: str, body: Body) -> Body:
        """Write `body`, and tell it."""
        version = next(self._versions)
        body = copy.deepcopy(body)
        body["metadata"]["resourceVersion"] = str(version)
        self.objects[body["metadata"]["name"]] = body
        if kind == "DELETED":
            del self.objects[body["metadata"]["name"]]
        event: Body = {"type": kind, "object": body}
        if kind != "BOOKMARK":
            self._log.append((version, event))
        if not self.silent:
            self.tell(event)
        return body

    def put(self, name: str, holder: str, seconds: int = 60, kind: str = "MODIFIED") -> None:
        """Somebody writes a record."""
        spec = {"holderIdentity": holder, "leaseDurationSeconds": seconds}
        self.change(kind, {"metadata": {"name": name, "labels": labels(PREFIX)}, "spec": spec})

    def tell(self, event: Body | Exception | None) -> None:
        """Tell it to each watch; None ends it in order, an exception breaks it."""
        for queue in self._watches:
            queue.put_nowait(event)

    async def _request(self, kind: str, *details: str) -> None:
        self.calls[kind] += 1
        self.asked.append((kind, *details))
        await asyncio.sleep(0)
        if kind in self.forbidden:
            raise BackendUnavailableError(f"may not {kind} leases.coordination.k8s.io in the namespace default")


class Memory:
    """What a process knows of the records."""

    def __init__(self) -> None:
        self.known: dict[str, Body] = {}

    def learn(self, body: Body, /, *, deleted: bool = False) -> Body | None:
        name = body["metadata"]["name"]
        before = self.known.pop(name, None)
        if not deleted:
            self.known[name] = body
        return before


class Process:
    """A process that waits."""

    def __init__(self, shelf: Shelf, clock: MovableClock) -> None:
        self.memory = Memory()
        self.feed = KubernetesFeed(shelf, self.memory.learn, PREFIX, clock)
        self.hints = Hints(self.feed, clock, Outage("the store", logging.getLogger("grelmicro.coordination")))


@asynccontextmanager
async def opened(shelf: Shelf, clock: MovableClock) -> AsyncIterator[Process]:
    process = Process(shelf, clock)
    starting = asyncio.create_task(process.hints.start())
    while not starting.done():
        await asyncio.sleep(0.002)
        if shelf.silent or shelf.forbidden or shelf.ends_at_once:
            await clock.advance(OPENING_LIMIT)
    try:
        yield process
    finally:
        await process.hints.close()


@pytest.fixture
def shelf(nothing_left: None) -> Shelf:
    return Shelf()


async def is_woken(process: Process, cause: Callable[[], object], topic: str = "cart") -> bool:
    """Whether who waits for `topic` is woken by `cause`, and before anybody who waits for another one."""
    async with process.hints.watch(topic) as waiter, process.hints.watch("another") as bystander:
        waiting = asyncio.create_task(waiter.wait(1_000.0))
        standing_by = asyncio.create_task(bystander.wait(1_000.0))
        try:
            await asyncio.sleep(0)
            cause()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not standing_by.done()
            return waiting.done()
        finally:
            waiting.cancel()
            standing_by.cancel()
            await asyncio.wait([waiting, standing_by])


async def test_what_frees_a_record_wakes_who_waits_for_it(shelf: Shelf, clock: MovableClock) -> None:
    shelf.put("cart", "a", kind="ADDED")
    async with opened(shelf, clock) as process:
        shelf.put("cart", "a")
        assert await is_woken(process, lambda: shelf.put("cart", ""))
        assert await is_woken(process, lambda: shelf.change("MODIFIED", {"metadata": {"name": "cart"}, "spec": {}}))
        assert await is_woken(process, lambda: shelf.change("MODIFIED", {"metadata": {"name": "cart"}}))
        shelf.put("cart", "b")
        assert await is_woken(process, lambda: shelf.put("cart", "b", kind="DELETED"))
        assert await is_woken(process, lambda: shelf.put("cart", "", kind="ADDED"))


async def test_a_record_that_ends_sooner_wakes_who_waits_and_a_renewal_wakes_nobody(
    shelf: Shelf, clock: MovableClock
) -> None:
    async with opened(shelf, clock) as process:
        shelf.put("cart", "a", 60)
        await asyncio.sleep(0.01)
        for holder, seconds in (("a", 60), ("a", 60), ("b", 60), ("b", 90)):
            assert not await is_woken(process, lambda: shelf.put("cart", holder, seconds))  # noqa: B023
        assert await is_woken(process, lambda: shelf.put("cart", "b", 89))
        assert not await is_woken(process, lambda: shelf.put("cart", "b", 89))


async def test_a_record_of_which_nothing_was_known_wakes_in_doubt(shelf: Shelf, clock: MovableClock) -> None:
    shelf.put("cart", "a", 60)
    async with opened(shelf, clock) as process:
        assert await is_woken(process, lambda: shelf.put("cart", "a", 60))
        assert not await is_woken(process, lambda: shelf.put("cart", "a", 60))


async def test_what_was_seen_is_known_before_anybody_is_woken(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        waiting = asyncio.create_task(waiter.wait(1_000.0))
        await asyncio.sleep(0)
        shelf.put("cart", "")
        await asyncio.wait_for(waiting, 5.0)
        assert process.memory.known["cart"]["metadata"]["resourceVersion"] == shelf.version
        shelf.put("cart", "", kind="DELETED")
        await asyncio.wait_for(waiter.wait(1_000.0), 5.0)
        assert "cart" not in process.memory.known
    assert ECHO not in process.memory.known, "it is no record"


async def test_it_begins_cheaply_and_watches_only_its_own(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock):
        assert shelf.asked[:2] == [("list", "", "1"), ("watch", selector(PREFIX), "99")]
        assert shelf.calls == Counter(list=1, watch=1, get=1, create=1)


async def test_a_watch_that_the_server_ends_in_order_goes_on_where_it_was(
    shelf: Shelf, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        for _ in range(5):
            shelf.put("other", "a")
            await clock.advance(300.0)
            shelf.silent = True
            shelf.put("cart", "")  # while there is no watch
            shelf.silent = False
            waiting = asyncio.create_task(waiter.wait(1_000.0))
            await asyncio.sleep(0)
            shelf.tell(None)
            assert await asyncio.wait_for(waiting, 5.0)
            assert waiter.pushes
        assert shelf.calls["list"] == 1
    assert caplog.text == ""


async def test_a_bookmark_is_where_a_watch_goes_on(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process:
        await clock.advance(SHORTEST_WATCH)
        shelf.tell({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "5000"}}})
        shelf.tell(None)
        await eventually(lambda: shelf.calls["watch"] == 2, "it watches again")
        assert shelf.asked[-1] == ("watch", selector(PREFIX), "5000")
        assert process.memory.known == {}


async def test_what_was_missed_when_the_server_forgot_it_is_looked_for(
    shelf: Shelf, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        await clock.advance(300.0)
        shelf.silent = True
        shelf.put("cart", "")
        shelf.silent, shelf.oldest = False, int(shelf.version)
        waiting = asyncio.create_task(waiter.wait(10_000.0))
        await asyncio.sleep(0)
        shelf.tell(None)
        assert await asyncio.wait_for(waiting, 5.0)
        assert shelf.calls["list"] == 2
        assert waiter.pushes
    assert caplog.text == "", "that is how Kubernetes works"


async def test_a_version_that_is_gone_in_the_middle_of_a_watch_begins_it_anew(
    shelf: Shelf, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        await clock.advance(300.0)
        shelf.tell(Gone("it is too old"))
        assert await asyncio.wait_for(waiter.wait(10_000.0), 5.0)
        assert shelf.calls["list"] == 2
        assert waiter.pushes
    assert caplog.text == ""


@pytest.mark.parametrize("end", [None, Gone("it is too old"), BackendUnavailableError("refused")], ids=str)
async def test_a_server_that_ends_every_watch_at_once_is_not_stormed(
    shelf: Shelf, clock: MovableClock, caplog: pytest.LogCaptureFixture, end: Exception | None
) -> None:
    shelf.ends_at_once, shelf.end = True, end
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        assert not waiter.pushes
        begun = shelf.calls.total()
        for _ in range(300):
            await clock.advance(1.0)
            await asyncio.sleep(0)
        assert shelf.calls.total() - begun < 2 * 300 / LONGEST_PAUSE + 20, shelf.calls
        assert caplog.text.count("they poll meanwhile") == 1
        shelf.ends_at_once = False
        await clock.advance(LONGEST_PAUSE)
        await eventually(lambda: waiter.pushes, "it is trusted")


@pytest.mark.parametrize("verb", ["list", "watch", "get", "create"])
async def test_without_a_right_everybody_polls_until_it_is_granted(
    shelf: Shelf, clock: MovableClock, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    shelf.forbidden = {verb}
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        for _ in range(10):
            assert not waiter.pushes
            await clock.advance(LONGEST_PAUSE)
            await asyncio.sleep(0.002)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert f"may not {verb} leases.coordination.k8s.io in the namespace default" in warnings[0]
        shelf.forbidden = set()
        await clock.advance(LONGEST_PAUSE)
        await eventually(lambda: waiter.pushes, "it is trusted")


async def test_a_watch_that_cannot_begin_is_not_tested(shelf: Shelf, clock: MovableClock) -> None:
    shelf.forbidden = {"watch"}
    async with opened(shelf, clock):
        assert shelf.calls["create"] == shelf.calls["update"] == 0
        assert shelf.calls["get"] <= 1, "whether the server answers at all"


async def test_a_watch_that_tells_nothing_is_not_trusted(
    shelf: Shelf, clock: MovableClock, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.silent = True
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        for _ in range(20):
            await clock.advance(ANSWER_LIMIT)
            assert not waiter.pushes
        assert caplog.text.count("they poll meanwhile") == 1


async def test_a_watch_that_falls_silent_is_found_out_while_somebody_waits(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        await eventually(lambda: waiter.pushes, "it is trusted")
        for _ in range(10):
            shelf.put("other", "a")
            await clock.advance(10.0)
        shelf.silent = True
        shelf.put("cart", "")
        waiting = asyncio.create_task(waiter.wait(1_000.0))
        await asyncio.sleep(0)
        for _ in range(round(RECENT + TEST_INTERVAL + ANSWER_LIMIT) + 1):
            await clock.advance(1.0)
        assert await asyncio.wait_for(waiting, 5.0), "and asks for itself"
        assert not waiter.pushes


async def test_a_lively_watch_needs_no_tests_of_its_own(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        before = shelf.calls.copy()
        for _ in range(100):
            shelf.put("cart", "a")
            await clock.advance(2.0)
        assert waiter.pushes
        assert shelf.calls == before


async def test_the_first_test_after_a_break_is_not_spared(shelf: Shelf, clock: MovableClock) -> None:
    """What comes by chance does not show that a change is told when it is made."""
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        for turn in range(3):
            written = shelf.calls["update"]
            shelf.tell(ConnectionResetError("reset"))
            await asyncio.sleep(0.01)
            shelf.told_at_once = {"metadata": {"name": f"other-{turn}"}}
            await clock.advance(1.0)
            await eventually(lambda: waiter.pushes, "it is trusted")
            assert shelf.calls["update"] == written + 1


async def test_a_watch_that_goes_on_needs_no_test_and_wakes_nobody(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        waiting = asyncio.create_task(waiter.wait(10_000.0))
        before = shelf.calls.copy()
        for _ in range(10):
            shelf.put("other", "a")
            await clock.advance(RECENT)
            shelf.tell(None)
            await asyncio.sleep(0.01)
        assert shelf.calls - before == Counter(watch=10)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_quiet_watches_are_tested_together(shelf: Shelf, clock: MovableClock) -> None:
    """However many processes wait, few of them write."""
    async with AsyncExitStack() as stack:
        processes = [await stack.enter_async_context(opened(shelf, clock)) for _ in range(50)]
        waiters = [await stack.enter_async_context(process.hints.watch("cart")) for process in processes]
        before = shelf.calls.copy()
        seconds = 600
        for _ in range(seconds):
            await clock.advance(1.0)
        assert all(waiter.pushes for waiter in waiters)
        spent = shelf.calls - before
        assert set(spent) <= {"update", "get"}
        assert spent.total() <= 2 * seconds / RECENT, spent


async def test_many_that_test_at_once_do_not_fight(shelf: Shelf, clock: MovableClock) -> None:
    async with AsyncExitStack() as stack:
        opening = [opened(shelf, clock) for _ in range(50)]
        processes = await asyncio.gather(*(stack.enter_async_context(each) for each in opening))
        await eventually(lambda: all(process.hints.trusted for process in processes), "all are trusted")
        assert shelf.calls["update"] + shelf.calls["create"] <= 100, shelf.calls
        before = shelf.calls.copy()
        for process in processes:
            await stack.enter_async_context(process.hints.watch("cart"))
        shelf.tell(ConnectionResetError("reset"))
        await asyncio.sleep(0.01)
        await clock.advance(1.0)
        await eventually(lambda: all(process.hints.trusted for process in processes), "all are trusted")
        spent = shelf.calls - before
        assert spent["list"] == spent["watch"] == spent["get"] == 50
        assert spent["update"] <= 50, "each tries once: the change of another one is as good"


async def test_the_lease_for_tests_keeps_what_others_wrote_into_it(shelf: Shelf, clock: MovableClock) -> None:
    foreign = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": ECHO, "uid": "1", "labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {"holderIdentity": "somebody", "leaseDurationSeconds": 1},
    }
    shelf.change("ADDED", foreign)
    async with opened(shelf, clock) as process:
        assert process.hints.trusted
        written = shelf.objects[ECHO]
        assert written["metadata"]["uid"] == "1"
        assert written["metadata"]["labels"] == {"team": "a", **labels(PREFIX)}, "without ours it would not be watched"
        assert written["metadata"]["annotations"]["note"] == "b"
        assert written["spec"] == foreign["spec"]


async def test_the_lease_for_tests_looks_sensible_and_does_not_grow(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart"):
        first = copy.deepcopy(shelf.objects[ECHO])
        assert first["kind"] == "Lease"
        assert first["apiVersion"] == "coordination.k8s.io/v1"
        assert first["spec"] == {}, "nobody holds it"
        assert "Nobody ever holds it" in first["metadata"]["annotations"]["kubernetes.io/description"]
        written = shelf.calls["update"]
        for _ in range(10):
            await clock.advance(TEST_INTERVAL)
            await asyncio.sleep(0.01)
        assert shelf.calls["update"] - written == 10
        last = shelf.objects[ECHO]
        assert set(last["metadata"]["annotations"]) == set(first["metadata"]["annotations"])
        assert last["metadata"]["annotations"] != first["metadata"]["annotations"], "else nothing would be told"


async def test_the_lease_for_tests_may_be_deleted(shelf: Shelf, clock: MovableClock) -> None:
    async with opened(shelf, clock) as process, process.hints.watch("cart") as waiter:
        shelf.change("DELETED", {"metadata": {"name": ECHO}})
        for _ in range(4):
            await clock.advance(TEST_INTERVAL)
            await asyncio.sleep(0.01)
        assert waiter.pushes
        assert ECHO in shelf.objects
        del shelf.objects[ECHO]
        deleted = {"type": "DELETED", "object": {"metadata": {"name": ECHO, "resourceVersion": shelf.version}}}
        asyncio.get_running_loop().call_later(0.02, shelf.tell, deleted)  # only after the next test has begun
        await clock.advance(TEST_INTERVAL)
        await asyncio.sleep(0.05)
        assert waiter.pushes
        await clock.advance(TEST_INTERVAL)
        await clock.advance(TEST_INTERVAL)
        await eventually(lambda: ECHO in shelf.objects, "it is made again")
        assert shelf.calls["watch"] == 1, "the watch was never in doubt"
