"""A bad body gets the answer that it gets without a lock."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fastapi import Body, Depends, FastAPI, Form, Header
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from grelmicro.coordination import LockHandle
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import LockDep
from tests.integrations.asgi import new_app


class Address(BaseModel):
    zip_code: str


class Order(BaseModel):
    item_id: Annotated[int, Field(gt=0)]
    sku: str = "none"
    address: Address | None = None


OrderLock = Annotated[LockHandle, LockDep("order:{order.item_id}", timeout=0.1)]


def build(make: Callable[[FastAPI, list[Any]], None], *dependencies: Any) -> FastAPI:
    app, _ = new_app()
    make(app, list(dependencies))
    return app


async def audited(x_reason: Annotated[int, Header()], x_note: Annotated[int, Header()]) -> int:
    return x_reason


def json_route(app: FastAPI, dependencies: list[Any]) -> None:
    @app.post("/orders", dependencies=[*dependencies, Depends(audited)])
    async def place(order: Order, page: int) -> str:
        return "placed"


def parts_route(app: FastAPI, dependencies: list[Any]) -> None:
    @app.post("/orders", dependencies=[*dependencies, Depends(audited)])
    async def place(order: Order, sku: Annotated[int, Body()], page: int = 1) -> str:
        return "placed"


def form_route(app: FastAPI, dependencies: list[Any]) -> None:
    @app.post("/orders", dependencies=dependencies)
    async def place(order: Annotated[Order, Form()], page: int = 1) -> str:
        return "placed"


BODIES: list[dict[str, Any]] = [
    {"json": {"item_id": 0, "address": 3}},
    {"json": {"order": {"item_id": 0}}},
    {"json": {"order": {"item_id": 1}, "sku": "x"}},
    {"json": [1]},
    {"json": None},
    {"content": b""},
    {"content": b"{", "headers": {"content-type": "application/json"}},
    {"content": b'{"item_id": 1}', "headers": {"content-type": "text/plain"}},
    {"data": {"item_id": "x", "sku": "y"}},
]


@pytest.mark.parametrize("make", [json_route, parts_route, form_route])
@pytest.mark.parametrize("content", BODIES, ids=repr)
def test_bad_body_is_refused_as_without_a_lock(
    make: Callable[[FastAPI, list[Any]], None], content: dict[str, Any]
) -> None:
    answers = []
    for dependencies in ([], [LockDep("order:{order.item_id}")]):
        with TestClient(build(make, *dependencies)) as client:
            answer = client.post("/orders", **content)
            answers.append((answer.status_code, answer.json()))
    assert answers[0] == answers[1]
    assert answers[0][0] == 422


def test_lock_is_not_taken_for_a_request_that_is_refused_anyhow() -> None:
    app, micro = new_app()

    @app.post("/orders")
    async def place(order: Order, held: OrderLock) -> str:
        return held.name

    with TestClient(app) as client, held_elsewhere(micro, "order:1"):
        assert client.post("/orders", json={"item_id": 1, "sku": 3}).status_code == 422
