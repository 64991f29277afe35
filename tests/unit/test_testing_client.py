"""The aids with a test client, which serves the application on an event loop in another thread."""

from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, Lock, TaskLock
from grelmicro.task import IntervalTask, Tasks
from grelmicro.testing import MovableClock, held_elsewhere, leads, leads_elsewhere, on_memory
from grelmicro_starlette import install, leader_only, locked

leader = LeaderElection("reports")
tasks = Tasks(tasks=[leader])
micro = Grelmicro(uses=[Coordination.from_url("redis://127.0.0.1:1/0"), tasks])


@tasks.every(seconds=60, lock=TaskLock(), name="tick")
async def tick() -> None: ...


@locked("cart:{cart_id}", timeout=5)
async def checkout(request: Request) -> Response:
    return Response("paid")


@leader_only(leader)
async def report(request: Request) -> Response:
    return Response("sent")


async def count(request: Request) -> Response:
    async with Lock("visits") as held:
        return JSONResponse(held.fencing_token)


app = Starlette(routes=[Route("/carts/{cart_id}", checkout), Route("/report", report), Route("/count", count)])
install(app, micro)


def test_each_test_has_a_store_of_its_own() -> None:
    for _ in range(2):
        with on_memory(micro), TestClient(app) as client:
            assert [client.get("/count").json() for _ in range(3)] == [1, 2, 3]


def test_a_busy_lock_is_refused_when_the_test_lets_the_time_pass() -> None:
    clock = MovableClock()
    with on_memory(micro, clock=clock), TestClient(app) as client, ThreadPoolExecutor(1) as another:
        with held_elsewhere(micro, "cart:42"):
            answer = another.submit(client.get, "/carts/42")
            until = monotonic() + 20
            while not answer.done():
                assert monotonic() < until
                clock.from_thread.advance(1)
        assert answer.result().status_code == 409
        assert client.get("/carts/42").text == "paid"


def test_leaders() -> None:
    with on_memory(micro), TestClient(app) as client:
        with leads(micro, leader):
            assert client.get("/report").text == "sent"
            with leads_elsewhere(micro, leader):
                assert client.get("/report").status_code == 503
        with leads(micro, leader):
            assert client.get("/report").text == "sent"


def test_tasks_and_leases_live_by_the_clock_of_the_test() -> None:
    clock = MovableClock()
    task = tasks.tasks[1]
    assert isinstance(task, IntervalTask)
    with on_memory(micro, clock=clock), TestClient(app):
        clock.from_thread.advance(3 * 60 + 1)
        assert task.outcomes["success"] == 4
        assert leader.is_leader()
        with leads_elsewhere(micro, leader, lease_duration=15):
            clock.from_thread.advance(16)
            assert leader.is_leader()
    assert task.outcomes["success"] == 0


def test_a_failing_test_leaves_the_app_closed() -> None:
    with pytest.raises(LookupError), on_memory(micro), TestClient(app), leads_elsewhere(micro, leader):
        raise LookupError
    assert not micro.is_open
    with on_memory(micro), TestClient(app) as client:
        assert client.get("/count").json() == 1
