"""`readiness`: the probe answers at once, whatever the store does, and tells nothing that is not its business."""

import asyncio
import json
import time
from collections.abc import Callable
from time import monotonic
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.backends.memory import MemoryStore
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro.errors import BackendUnavailableError, OutOfContextError, SettingsValidationError
from grelmicro.task import Tasks
from grelmicro.testing import MovableClock
from grelmicro_starlette import install, lifespan, readiness
from tests.helpers.stores import Apply, Fault, TroubledStore, refused, request_lost, silence
from tests.integrations.asgi import client_of
from tests.servers.redis import RedisServer

FAST: dict[str, float] = {"interval": 0.2}
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def closes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a silent store never confirms is not waited for at the end."""
    monkeypatch.setattr("grelmicro.coordination.adapters.DRAIN_LIMIT", 0.05)


class Probed:
    """An app with a probe, on a store that has the trouble it is told to have."""

    def __init__(
        self, coordination: Coordination | None = None, leader: LeaderElection | None = None, **settings: Any
    ) -> None:
        self.store = TroubledStore(MemoryStore())
        self.tasks = Tasks()
        self.micro = Grelmicro(uses=[coordination or Coordination(self.store), self.tasks])
        self.leader = leader or LeaderElection("feed", worker="web-1", retry_interval=0.1)
        self.app = FastAPI()
        settings = {"leaders": [self.leader], **FAST, **settings}
        self.app.add_api_route("/ready", readiness(self.micro, **settings))
        install(self.app, self.micro)


async def ask(client: httpx2.AsyncClient, *, within: float = 2.0) -> httpx2.Response:
    """The answer of the probe, which has to come soon."""
    async with asyncio.timeout(within):
        return await client.get("/ready")


async def answers(client: httpx2.AsyncClient, right: Callable[[httpx2.Response], bool]) -> httpx2.Response:
    """The answer of the probe as soon as it is right."""
    until = monotonic() + PATIENCE
    while not right(answer := await ask(client)):
        assert monotonic() < until, answer.text
        await asyncio.sleep(0.02)
    return answer


def is_ready(answer: httpx2.Response) -> bool:
    return answer.status_code == 200


def says(status: str) -> Callable[[httpx2.Response], bool]:
    return lambda answer: answer.status_code == 503 and answer.json()["store"]["status"] == status


async def test_a_worker_that_leads_is_ready() -> None:
    it = Probed()
    it.tasks.add_task(it.leader)
    async with client_of(it.app) as client:
        answer = await ask(client)
        assert answer.status_code == 200
        document = answer.json()
        assert document["status"] == "ready"
        assert document["store"]["status"] == "good"
        assert document["store"]["error"] == ""
        assert 0 <= document["store"]["age"] < PATIENCE
        assert document["elections"]["feed"]["status"] == "good"
        assert document["elections"]["feed"]["leads"] is True
        assert 0 <= document["elections"]["feed"]["age"] < PATIENCE


async def test_a_worker_that_does_not_lead_is_ready_all_the_same() -> None:
    it = Probed()
    it.tasks.add_task(it.leader)
    other = LeaderElection("feed", backend=it.micro.coordination.election_backend)
    async with it.micro.coordination:
        service = asyncio.create_task(other())
        await other.wait_for_leader()
        async with client_of(it.app) as client:
            answer = await ask(client)
            assert (answer.status_code, answer.json()["elections"]["feed"]["leads"]) == (200, False)
        service.cancel()
        await asyncio.wait({service})


async def test_an_election_that_nobody_started_is_not_ready() -> None:
    it = Probed()
    async with client_of(it.app) as client:
        answer = await answers(client, lambda answer: answer.json()["store"]["status"] == "good")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "1"
    document = answer.json()
    assert {key: document[key] for key in ("type", "title", "status", "detail")} == {
        "type": "urn:grelmicro:not-ready",
        "title": "Not ready",
        "status": 503,
        "detail": "election 'feed': stopped",
    }
    assert document["elections"] == {"feed": {"status": "stopped", "leads": False, "age": None}}


async def test_an_overdue_task_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grelmicro.testing.clock.WORK_LIMIT", 0.05)
    clock = MovableClock()
    tasks = Tasks(clock=clock, shutdown_timeout=0.0)
    it = Probed(leaders=[], tasks=tasks)
    tasks.every(seconds=20, name="job")(asyncio.Event().wait)
    async with client_of(it.app) as client, tasks:
        await answers(client, is_ready)
        await clock.advance(65.0)
        answer = await ask(client)
    assert answer.status_code == 503
    assert answer.json()["detail"] == "task 'job': overdue for 45 s"
    assert answer.json()["overdue"] == {"job": 45.0}


async def test_a_worker_whose_leadership_was_handed_over_is_not_ready() -> None:
    it = Probed()
    it.tasks.add_task(it.leader)
    async with client_of(it.app) as client:
        await answers(client, is_ready)
        it.micro.hand_over()
        answer = await answers(client, lambda answer: not is_ready(answer))
    assert answer.json()["detail"] == "election 'feed': stopped"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [refused, request_lost, silence])
async def test_a_store_in_trouble_is_told_at_once_and_its_recovery_too(fault: Fault) -> None:
    it = Probed(leaders=[])
    async with client_of(it.app) as client:
        await answers(client, is_ready)
        it.store.break_down(fault)
        answer = await answers(client, says("failing"))
        assert answer.json()["detail"] == "store: failing"
        it.store.heal()
        await answers(client, is_ready)


async def test_a_look_that_hangs_makes_it_stale_and_the_probe_answers() -> None:
    held = asyncio.Event()

    async def unmoved(apply: Apply) -> object:
        while not held.is_set():
            try:
                await held.wait()
            except asyncio.CancelledError:
                continue
        return await apply()

    it = Probed(leaders=[])
    async with client_of(it.app) as client:
        await answers(client, is_ready)
        it.store.break_down(unmoved)
        try:
            await answers(client, says("stale"))
        finally:
            it.store.heal()
            held.set()
        await answers(client, is_ready)


@pytest.mark.slow
async def test_a_store_that_never_answered_is_told_at_once() -> None:
    it = Probed(leaders=[])
    it.store.break_down(silence)
    async with client_of(it.app) as client:
        answer = await ask(client)
        assert answer.status_code == 503
        assert answer.json()["store"]["status"] in ("unknown", "failing")
        it.store.heal()
        await answers(client, is_ready)


def block(seconds: float) -> None:
    """Let nothing else run on the event loop."""
    time.sleep(seconds)


async def test_an_event_loop_that_was_blocked_is_stale_until_the_next_look() -> None:
    it = Probed(leaders=[], interval=0.2)
    async with client_of(it.app) as client:
        await answers(client, is_ready)
        it.store.break_down(silence)  # as a store is that has not been asked yet
        block(0.8)
        assert says("stale")(await ask(client))
        it.store.heal()
        await answers(client, is_ready)


async def test_before_the_start_and_after_the_end_it_is_not_ready() -> None:
    it = Probed(leaders=[])
    transport = httpx2.ASGITransport(it.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as outside:
        assert says("unknown")(await ask(outside))
        for _ in range(2):
            async with client_of(it.app) as client:
                await answers(client, is_ready)
            assert says("unknown")(await ask(outside))


async def test_a_server_that_is_stopped_and_goes_on(start_redis: Callable[..., RedisServer]) -> None:
    """A real one, which neither refuses connections nor answers on those that it has."""
    server = start_redis(requirepass="hush-hush")
    leader = LeaderElection(
        "feed", worker="web-1", lease_duration=3, renew_deadline=2, backend_timeout=1, retry_interval=0.1
    )
    it = Probed(Coordination.from_url(server.url), leader, interval=0.5)
    it.tasks.add_task(it.leader)
    async with client_of(it.app) as client:
        seen = [await answers(client, is_ready)]
        server.pause()
        seen.append(await answers(client, says("failing")))
        seen.append(await answers(client, lambda answer: answer.json()["elections"]["feed"]["leads"] is False))
        server.resume()
        seen.append(await answers(client, is_ready))
    for answer in seen:
        assert "hush-hush" not in answer.text
        assert str(server.port) not in answer.text
        assert "web-1" not in answer.text


@pytest.mark.slow
async def test_nothing_secret_is_told() -> None:
    async def chatty(apply: Apply) -> object:
        raise BackendUnavailableError("redis://:hush-hush@cache:6379 is held by web-1:task:0123")

    it = Probed()
    it.tasks.add_task(it.leader)
    async with client_of(it.app) as client:
        await answers(client, is_ready)
        it.store.break_down(chatty)
        answer = await answers(client, says("failing"))
        it.store.heal()
    assert answer.json()["store"]["error"] == "BackendUnavailableError"
    assert not [word for word in ("hush-hush", "cache", "web-1") if word in answer.text]


def test_it_is_a_route_of_both_frameworks() -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    ready = readiness(micro)
    fastapi = FastAPI()
    fastapi.add_route("/ready", ready)
    install(fastapi, micro)
    for app in (fastapi, Starlette(routes=[Route("/ready", ready)], lifespan=lifespan(micro))):
        with TestClient(app) as client:
            assert client.get("/ready").status_code == 200
            assert client.head("/ready").status_code == 200
    json.dumps(fastapi.openapi())


async def test_many_probes_cost_the_store_nothing() -> None:
    it = Probed(leaders=[], interval=5.0)
    async with client_of(it.app) as client:
        await answers(client, is_ready)
        for _ in range(50):
            await ask(client)
    assert it.store.calls["acquire"] == 1


def test_what_cannot_be_checked_is_told() -> None:
    with pytest.raises(OutOfContextError, match="no coordination"):
        readiness(Grelmicro())
    with pytest.raises(SettingsValidationError, match="stale_after"):
        readiness(Grelmicro(uses=[Coordination.from_url("memory://")]), interval=5, stale_after=6)
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    with TestClient(Starlette(lifespan=lifespan(micro))), pytest.raises(OutOfContextError, match="before"):
        readiness(micro)
