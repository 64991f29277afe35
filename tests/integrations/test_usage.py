"""The code that users write first, as they would write it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, TypedDict

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, LeaderRecord, LockHandle, TaskLock
from grelmicro.task import Tasks
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import LeaderDep, LockDep, install
from grelmicro_starlette import exception_handlers, leader_only, lifespan, locked


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/locks.db"


def test_fastapi(store: str) -> None:
    tasks = Tasks()
    micro = Grelmicro(uses=[Coordination.from_url(store), tasks])
    leader = micro.coordination.leaderelection("worker")
    tasks.add_task(leader)
    app = FastAPI()
    install(app, micro)
    expired: list[float] = []

    CartLock = Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=0.5)]

    @app.post("/carts/{cart_id}/checkout")
    async def checkout(cart_id: int, held: CartLock) -> dict[str, int]:
        return {"fence": held.fencing_token}

    @app.post("/reindex")
    async def reindex(term: Annotated[LeaderRecord, LeaderDep(leader)]) -> str:
        return term.holder

    @tasks.every(seconds=60, lock=TaskLock())
    async def expire_carts() -> None:
        expired.append(time.monotonic())

    with TestClient(app) as client:
        fences = [client.post(f"/carts/{cart}/checkout").json()["fence"] for cart in ("042", "42")]
        assert fences[1] == fences[0] + 1
        with held_elsewhere(micro, "cart:42"):
            refusal = client.post("/carts/42/checkout")
        wait_for_leader(leader)
        assert client.post("/reindex").json().startswith(leader.worker)
        assert len(expired) == 1
    assert refusal.status_code == 409
    assert refusal.headers["content-type"] == "application/problem+json"
    assert int(refusal.headers["retry-after"]) >= 1


def test_fastapi_on_a_worker_that_does_not_lead(store: str) -> None:
    leader, other = LeaderElection("worker"), LeaderElection("worker")
    tasks = Tasks(tasks=[leader])
    micro = Grelmicro(uses=[Coordination.from_url(store), tasks])
    app = FastAPI()
    install(app, micro)
    tasks.add_task(other)

    @app.post("/reindex")
    async def reindex(term: Annotated[LeaderRecord, LeaderDep(other)]) -> str:
        raise AssertionError("must not run")

    with TestClient(app) as client:
        wait_for_leader(leader)
        refusal = client.post("/reindex")
    assert refusal.status_code == 503
    assert refusal.json()["type"] == "urn:grelmicro:not-leader"


class State(TypedDict):
    clients: set[str]


def test_starlette(store: str) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(store)])
    leader = LeaderElection("feed", metadata={"url": "http://192.0.2.4:8000"})
    fed: list[bool] = []

    @asynccontextmanager
    async def mine(app: Starlette) -> AsyncIterator[State]:
        assert micro.is_open
        yield {"clients": set()}
        assert micro.is_open

    async def feed() -> None:
        while True:
            fed.append(leader.is_leader())
            await asyncio.sleep(0.01)

    @locked("order:{order_id}", timeout=0.5)
    async def ship(request: Request) -> PlainTextResponse:
        assert request.state.clients == set()
        return PlainTextResponse(str(request.state.lock.fencing_token))

    @leader_only(leader)
    async def rebuild(request: Request) -> PlainTextResponse:
        return PlainTextResponse("done")

    app = Starlette(
        routes=[Route("/orders/{order_id}/ship", ship, methods=["POST"]), Route("/rebuild", rebuild, methods=["POST"])],
        lifespan=lifespan(micro, mine, lead={leader: feed}),
        exception_handlers=exception_handlers(),
    )
    with TestClient(app) as client:
        assert int(client.post("/orders/7/ship").text) > 0
        with held_elsewhere(micro, "order:7"):
            assert client.post("/orders/7/ship").status_code == 409
        wait_for_leader(leader)
        assert client.post("/rebuild").text == "done"
    assert fed
    assert all(fed)


async def test_held_elsewhere_on_the_loop_of_the_app(store: str) -> None:
    micro = Grelmicro(uses=[Coordination.from_url(store)])
    async with micro:
        async with held_elsewhere(micro, "cart:42") as held:
            assert held.valid
            with pytest.raises(TimeoutError):
                await micro.coordination.lock("cart:42").acquire(timeout=0)
        async with held_elsewhere(micro, "cart:42") as held:
            await held.release()
            async with micro.coordination.lock("cart:42"):
                pass


def test_held_elsewhere_without_an_open_app() -> None:
    micro = Grelmicro(uses=[Coordination.from_url("memory://")])
    with pytest.raises(RuntimeError, match="not open"), held_elsewhere(micro, "cart:42"):
        pass


async def test_held_elsewhere_in_the_wrong_form() -> None:
    async with Grelmicro(uses=[Coordination.from_url("memory://")]) as micro:
        with pytest.raises(RuntimeError, match="would wait for itself"), held_elsewhere(micro, "cart:42"):
            pass


def wait_for_leader(leader: LeaderElection) -> None:
    until = time.monotonic() + 10
    while not leader.is_leader():
        assert time.monotonic() < until, "nobody leads"
        time.sleep(0.01)
