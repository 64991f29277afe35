"""`LockDep`: names from the body of a request, as the handler receives it."""

from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID, uuid4

import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, File, Form, UploadFile, WebSocket
from fastapi.testclient import TestClient
from pydantic import AfterValidator, BaseModel, Field, RootModel, field_validator
from starlette.websockets import WebSocketDisconnect

from grelmicro.coordination import LockHandle
from grelmicro.errors import SettingsValidationError
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import LockDep
from tests.integrations.asgi import new_app


class Address(BaseModel):
    zip_code: str


class Order(BaseModel):
    item_id: Annotated[int, Field(gt=0)]
    sku: str = "none"
    address: Address | None = None

    @field_validator("sku")
    @classmethod
    def _upper(cls, value: str) -> str:
        return value.upper()


OrderLock = Annotated[LockHandle, LockDep("order:{order.item_id}", timeout=0.1)]
SkuLock = Annotated[LockHandle, LockDep("sku:{sku}", timeout=0.1)]


def as_text(content: bytes) -> str:
    return content.decode()


def posted(app: FastAPI, **content: Any) -> Any:
    with TestClient(app) as client:
        answer = client.post("/orders", **content)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_field_of_the_body() -> None:
    app, micro = new_app()

    @app.post("/orders")
    async def place(order: Order, held: OrderLock) -> str:
        return f"{held.name} {order.item_id}"

    assert posted(app, json={"item_id": "042"}) == "order:42 42"
    with TestClient(app) as client, held_elsewhere(micro, "order:42"):
        assert client.post("/orders", json={"item_id": 42}).status_code == 409


def test_validated_nested_and_missing_fields() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(
        order: Order, held: Annotated[LockHandle, LockDep("order:{order.sku}:{order.address.zip_code}")]
    ) -> str:
        return held.name

    assert posted(app, json={"item_id": 1, "sku": "a-1", "address": {"zip_code": "10 1"}}) == "order:A-1:10%201"
    assert posted(app, json={"item_id": 1}) == "order:none:=none"


def test_body_that_may_be_missing() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(held: OrderLock, order: Order | None = None) -> str:
        return held.name

    assert posted(app) == "order:=none"
    assert posted(app, json={"item_id": 7}) == "order:7"


def test_embedded_body() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(order: Annotated[Order, Body(embed=True)], held: OrderLock) -> str:
        return held.name

    assert posted(app, json={"order": {"item_id": 7}}) == "order:7"


def test_several_parts_of_the_body() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(
        order: Order,
        quantity: Annotated[int, Body()],
        address: Address,
        held: Annotated[LockHandle, LockDep("order:{order.item_id}:{quantity}:{shop}:{address.zip_code}")],
        shop: Annotated[str, Body(alias="the-shop")] = "main",
    ) -> str:
        return held.name

    body = {"order": {"item_id": 7}, "quantity": "02", "address": {"zip_code": "1"}}
    assert posted(app, json=body) == "order:7:2:main:1"
    assert posted(app, json={**body, "the-shop": "Nord"}) == "order:7:2:Nord:1"


def test_another_part_that_only_a_dependency_takes() -> None:
    """Whether the body is one value or has one for each part depends on all who take something of it."""
    app, _ = new_app()

    async def audit(reason: Annotated[str, Body()]) -> str:
        return reason

    @app.post("/orders", dependencies=[Depends(audit)])
    async def place(order: Order, held: OrderLock) -> str:
        return held.name

    router = APIRouter()

    @router.post("/included")
    async def included(order: Order, held: OrderLock) -> str:
        return held.name

    app.include_router(router, dependencies=[Depends(audit)])
    assert posted(app, json={"order": {"item_id": 7}, "reason": "stock"}) == "order:7"
    with TestClient(app) as client:
        assert client.post("/included", json={"order": {"item_id": 7}, "reason": "stock"}).json() == "order:7"
        assert client.post("/included", json={"item_id": 7}).status_code == 422


def test_model_that_a_dependency_takes() -> None:
    app, _ = new_app()

    async def checked(order: Order) -> Order:
        return order

    @app.post("/orders")
    async def place(checked: Annotated[Order, Depends(checked)], held: OrderLock) -> str:
        return held.name

    assert posted(app, json={"item_id": 7}) == "order:7"


def test_plain_value() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(sku: Annotated[str, Body()], held: SkuLock) -> str:
        return held.name

    assert posted(app, json="A 1") == "sku:A 1"


def test_bytes_are_no_name() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(
        request_id: Annotated[bytes, Body(media_type="text/plain")],
        held: Annotated[LockHandle, LockDep("{request_id}!")],
    ) -> str:
        return held.name

    with TestClient(app) as client, pytest.raises(SettingsValidationError, match=r"\{request_id\}.*is bytes"):
        client.post("/orders", content=b"abc", headers={"content-type": "text/plain"})


def test_root_model_mapping_and_dataclass() -> None:
    app, _ = new_app()

    class Sku(RootModel[str]): ...

    @dataclass
    class Parcel:
        weight: int

    @app.post("/root")
    async def root(sku: Sku, held: Annotated[LockHandle, LockDep("sku:{sku.root}")]) -> str:
        return held.name

    @app.post("/mapping")
    async def mapping(order: dict[str, Any], held: OrderLock) -> str:
        return held.name

    @app.post("/dataclass")
    async def parcel(parcel: Parcel, held: Annotated[LockHandle, LockDep("parcel:{parcel.weight}")]) -> str:
        return held.name

    with TestClient(app) as client:
        assert client.post("/root", json="A1").json() == "sku:A1"
        assert client.post("/mapping", json={"item_id": "x"}).json() == "order:x"
        assert client.post("/dataclass", json={"weight": "04"}).json() == "parcel:4"
        missing = client.post("/mapping", json={"other": 1})
        assert (missing.status_code, missing.json()["detail"][0]["loc"]) == (422, ["body", "item_id"])


def test_form_model() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(order: Annotated[Order, Form()], held: OrderLock) -> str:
        return f"{held.name} {order.sku}"

    assert posted(app, data={"item_id": "07", "sku": "a"}) == "order:7 A"


def test_fields_of_a_form() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(
        sku: Annotated[str, Form()],
        held: Annotated[LockHandle, LockDep("sku:{sku}:{count}")],
        count: Annotated[int, Form()] = 1,
    ) -> str:
        return held.name

    assert posted(app, data={"sku": "A 1", "count": "02"}) == "sku:A%201:2"
    assert posted(app, data={"sku": "A 1"}) == "sku:A%201:1"


@pytest.mark.parametrize("size", [10, 2_000_000], ids=["in memory", "on disk"])
def test_files_are_left_to_the_handler(size: int) -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(
        sku: Annotated[str, Form()],
        whole: Annotated[bytes, File()],
        part: UploadFile,
        held: Annotated[LockHandle, LockDep("sku:{sku}:{digest}")],
        digest: Annotated[bytes, File(), AfterValidator(as_text)],
    ) -> str:
        return f"{held.name} {len(whole)} {len(await part.read())} {digest!s}"

    files = {"whole": b"x" * size, "part": b"y" * size, "digest": b"d"}
    assert posted(app, data={"sku": "A"}, files=files) == f"sku:A:d {size} {size} d"


def test_field_that_the_model_does_not_have_is_told() -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(order: Order, held: Annotated[LockHandle, LockDep("order:{order.itm_id}")]) -> None: ...

    with (
        TestClient(app) as client,
        pytest.raises(SettingsValidationError, match=r"\{order\.itm_id\}, but Order has no 'itm_id'"),
    ):
        client.post("/orders", json={"item_id": 1})


@pytest.mark.parametrize("field", ["order", "order.address", "order.model_dump"])
def test_what_is_no_text_is_told(field: str) -> None:
    app, _ = new_app()

    @app.post("/orders")
    async def place(order: Order, held: Annotated[LockHandle, LockDep(f"order:{{{field}}}")]) -> None: ...

    with TestClient(app) as client, pytest.raises(SettingsValidationError, match="no text or number: name a field"):
        client.post("/orders", json={"item_id": 1, "address": {"zip_code": "1"}})


def test_value_that_is_new_in_each_conversion_stays_a_name() -> None:
    """It cannot be the handler's, but then nobody else's either."""
    app, _ = new_app()

    class Job(BaseModel):
        key: UUID = Field(default_factory=uuid4)

    @app.post("/orders")
    async def place(job: Job, held: Annotated[LockHandle, LockDep("job:{job.key}")]) -> str:
        return held.name

    given = UUID(int=1)
    assert posted(app, json={"key": str(given)}) == f"job:{given}"
    assert posted(app, json={}).startswith("job:")


def test_websocket_has_no_body() -> None:
    app, _ = new_app()

    @app.websocket("/orders")
    async def follow(websocket: WebSocket, order: Order, held: OrderLock) -> None:
        raise AssertionError("must not run")

    with TestClient(app) as client:
        with pytest.raises(WebSocketDisconnect) as refusal, client.websocket_connect("/orders"):
            pass
        assert refusal.value.code == 1008
