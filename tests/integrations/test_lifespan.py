"""`lifespan`: what is open when, whatever fails, and elected work beside the app."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.errors import SettingsValidationError
from grelmicro.task import Tasks
from grelmicro_starlette import lifespan
from tests.helpers.worlds import eventually


class State(TypedDict):
    clients: set[str]


class Witness:
    """Part of an app: notes when it is opened and closed."""

    def __init__(self, seen: list[str], *, fails: bool = False) -> None:
        self.seen = seen
        self.fails = fails

    async def __aenter__(self) -> None:
        if self.fails:
            raise ConnectionError("no store")
        self.seen.append("micro opened")

    async def __aexit__(self, *error: object) -> None:
        self.seen.append("micro closed")


UserLifespan = Callable[[Starlette], AbstractAsyncContextManager[State]]


def user(micro: Grelmicro, seen: list[str], *, fails_at: str = "") -> UserLifespan:
    @asynccontextmanager
    async def mine(app: Starlette) -> AsyncIterator[State]:
        seen.append(f"mine starts, micro open: {micro.is_open}")
        if fails_at == "start":
            raise ValueError("cannot start")
        yield {"clients": {"one"}}
        seen.append(f"mine ends, micro open: {micro.is_open}")
        if fails_at == "stop":
            raise ValueError("cannot stop")

    return mine


def new(seen: list[str], *, fails: bool = False) -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://"), Witness(seen, fails=fails)])


async def state_of(request: Request) -> PlainTextResponse:
    micro = request.scope["state"]["grelmicro"]
    return PlainTextResponse(f"{request.scope['state'].get('clients')} {micro.is_open}")


WHOLE = ["micro opened", "mine starts, micro open: True", "mine ends, micro open: True", "micro closed"]


def test_opens_first_closes_last_and_keeps_the_state() -> None:
    seen: list[str] = []
    micro = new(seen)
    app = Starlette(routes=[Route("/", state_of)], lifespan=lifespan(micro, user(micro, seen)))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.get("/").text == "{'one'} True"
    assert seen == WHOLE * 2
    assert not micro.is_open


def test_needs_no_lifespan_of_the_user() -> None:
    micro = new([])
    with TestClient(Starlette(routes=[Route("/", state_of)], lifespan=lifespan(micro))) as client:
        assert client.get("/").text == "None True"


def test_failing_start_of_the_user_closes_and_is_raised() -> None:
    seen: list[str] = []
    micro = new(seen)
    app = Starlette(lifespan=lifespan(micro, user(micro, seen, fails_at="start")))
    with pytest.raises(ValueError, match="cannot start"), TestClient(app):
        pass
    assert seen == ["micro opened", "mine starts, micro open: True", "micro closed"]
    assert not micro.is_open


def test_failing_stop_of_the_user_closes_and_is_raised() -> None:
    seen: list[str] = []
    micro = new(seen)
    app = Starlette(lifespan=lifespan(micro, user(micro, seen, fails_at="stop")))
    with pytest.raises(ValueError, match="cannot stop"), TestClient(app):
        pass
    assert seen == WHOLE
    assert not micro.is_open


def test_user_does_not_start_when_ours_cannot() -> None:
    seen: list[str] = []
    micro = new(seen, fails=True)
    app = Starlette(lifespan=lifespan(micro, user(micro, seen)))
    with pytest.raises(ConnectionError, match="no store"), TestClient(app):
        pass
    assert seen == []


async def test_elected_work_runs_between_start_and_end_of_the_user() -> None:
    seen: list[str] = []
    micro = new(seen)
    leader = LeaderElection("feed")

    async def feed() -> None:
        seen.append("feed begins")
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(f"feed ends, leading: {leader.is_running()}")

    async with lifespan(micro, user(micro, seen), lead={leader: feed})(Starlette()):
        await eventually(lambda: "feed begins" in seen, "the work begins")
        assert leader.is_leader()
    assert seen == [*WHOLE[:2], "feed begins", "feed ends, leading: True", *WHOLE[2:]]
    assert not leader.is_running()
    assert not leader.is_leader()


async def test_election_is_free_again_at_the_end() -> None:
    micro = new([])
    first, second = LeaderElection("feed"), LeaderElection("feed")
    async with micro:
        async with lifespan(micro, lead={first: asyncio.Event().wait})(Starlette()):
            await eventually(first.is_leader, "the first leads")
        async with lifespan(micro, lead={second: asyncio.Event().wait})(Starlette()):
            await eventually(second.is_leader, "the second leads", 2.0)


async def test_election_of_tasks_is_left_to_them() -> None:
    leader = LeaderElection("feed")
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    done = asyncio.Event()

    async def feed() -> None:
        done.set()

    async with lifespan(micro, lead={leader: feed})(Starlette()):
        await asyncio.wait_for(done.wait(), 10)
        assert leader.is_leader()
    assert not leader.is_running()


async def test_failing_work_is_told_and_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    leader = LeaderElection("feed", retry_interval=0.01)
    runs: list[int] = []

    async def feed() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError("broken feed")
        await asyncio.sleep(60)

    async with lifespan(new([]), lead={leader: feed})(Starlette()):
        await eventually(lambda: len(runs) == 3, "the third run")
    failures = [record for record in caplog.records if "feed" in record.message and record.levelno == logging.ERROR]
    assert len(failures) == 2
    assert "begins anew" in failures[0].message
    assert failures[0].exc_info is not None


async def test_work_whose_await_was_cancelled_is_told_and_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    leader = LeaderElection("feed", retry_interval=0.01)
    runs: list[int] = []

    async def feed() -> None:
        runs.append(1)
        inner = asyncio.create_task(asyncio.sleep(60))
        if len(runs) < 3:
            asyncio.get_running_loop().call_soon(inner.cancel)
        try:
            await inner
        finally:
            inner.cancel()

    async with lifespan(new([]), lead={leader: feed})(Starlette()):
        await eventually(lambda: len(runs) == 3, "the third run")
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failures) == 2
    assert all("begins anew" in record.message and record.exc_info is not None for record in failures)


async def test_work_that_returned_leaves_the_role_to_another_worker() -> None:
    first, second = LeaderElection("feed", retry_interval=0.05), LeaderElection("feed", retry_interval=0.05)
    began: list[str] = []

    async def once() -> None:
        await asyncio.sleep(0.01)

    async def keep() -> None:
        began.append("second")
        await second.wait_lose_leader()

    micro = new([])
    async with lifespan(micro, lead={first: once})(Starlette()):
        await eventually(lambda: not first.is_running(), "the first one has left")
        async with lifespan(micro, lead={second: keep})(Starlette()):
            await eventually(lambda: bool(began), "the work of the second")
            assert second.is_leader()


async def test_an_election_of_tasks_is_kept_when_the_work_returned() -> None:
    leader = LeaderElection("feed")
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[leader])])
    done = asyncio.Event()

    async def once() -> None:
        done.set()

    async with lifespan(micro, lead={leader: once})(Starlette()):
        await done.wait()
        await asyncio.sleep(0.05)
        assert leader.is_leader()


@pytest.mark.parametrize("on", [True, False])
async def test_signal_hands_leadership_over_before_the_end(on: bool) -> None:
    """The server's own handler is called, too, and is in place again afterwards."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    server = signal.getsignal(signal.SIGTERM)
    elected, in_tasks = LeaderElection("feed"), LeaderElection("jobs")
    micro = Grelmicro(uses=[Coordination.from_url("memory://"), Tasks(tasks=[in_tasks])])
    try:
        async with lifespan(micro, lead={elected: asyncio.Event().wait}, signals=on)(Starlette()):
            await eventually(lambda: elected.is_leader() and in_tasks.is_leader(), "both lead")
            signal.raise_signal(signal.SIGTERM)
            assert told == [signal.SIGTERM]
            if on:
                await eventually(lambda: not (elected.is_running() or in_tasks.is_running()), "both resign")
            else:
                await asyncio.sleep(0.05)
                assert elected.is_leader()
                assert in_tasks.is_leader()
            assert micro.is_open
        assert signal.getsignal(signal.SIGTERM) is server
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_second_interrupt_cuts_short_how_the_work_of_the_leader_ends() -> None:
    ended: list[bool] = []
    leader = LeaderElection("feed")

    async def feed() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(leader.is_leader())

    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        async with lifespan(Grelmicro(uses=[Coordination.from_url("memory://")]), lead={leader: feed})(Starlette()):
            await eventually(leader.is_leader, "it leads")
            await asyncio.sleep(0.05)
            signal.raise_signal(signal.SIGINT)
            await eventually(lambda: not leader.is_leader(), "it resigns")
            await asyncio.sleep(0.05)
            assert not ended
            signal.raise_signal(signal.SIGINT)
            await eventually(lambda: ended == [False], "it has ended")
            await eventually(lambda: not leader.is_running(), "the lease is given back")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("leader", "work", "text"),
    [(LeaderElection("feed"), 5, "not int for LeaderElection"), ("feed", asyncio.sleep, "function for str")],
)
def test_lead_has_a_coroutine_function_for_each_election(leader: Any, work: Any, text: str) -> None:
    with pytest.raises(SettingsValidationError, match=text):
        lifespan(Grelmicro(), lead={leader: work})


async def test_elected_work_ends_before_the_app_in_a_cancelled_scope(tmp_path: Path) -> None:
    """Such as that of a server or a test client, which cancels each await of the end."""
    seen: list[str] = []
    url = f"sqlite:///{tmp_path}/locks.db"
    leader = LeaderElection("feed")

    async def feed() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            seen.append("work ended")

    micro = Grelmicro(uses=[Coordination.from_url(url), Witness(seen)])

    async def serve() -> None:
        async with lifespan(micro, lead={leader: feed}, signals=False)(Starlette()):
            await leader.wait_for_leader()
            await asyncio.sleep(0.01)
            group.cancel_scope.cancel()
            await asyncio.sleep(3600)

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
    assert seen == ["micro opened", "work ended", "micro closed"]
    async with Grelmicro(uses=[Coordination.from_url(url)]) as other:
        assert await other.coordination.holder_of("feed", kind="leader") is None
