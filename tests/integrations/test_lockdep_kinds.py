"""A value of a kind that is no name: the client's mistake where its data chose the kind, else the route's."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import pytest
from fastapi import Body, Depends, FastAPI, Form, Query
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict, Field, Json, JsonValue, SecretStr

from grelmicro.coordination import LockHandle
from grelmicro.errors import SettingsValidationError
from grelmicro_fastapi import LockDep
from tests.integrations.asgi import new_app

T = TypeVar("T")


class Cat(BaseModel):
    lives: int
    toys: list[str] = []


class Dog(BaseModel):
    bark: str


@dataclass
class Parcel:
    content: Any
    labels: list[str]


class Box(BaseModel, Generic[T]):
    content: T


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    size: int = 1


class Model(BaseModel):
    d: dict[str, Any] = Field(default={}, alias="the-d")
    anything: Any = None
    thing: object = None
    value: JsonValue = None
    text: Json[Any] = None
    several: int | list[int] | None = None
    pet: Cat | Dog | None = None
    cats: dict[str, Cat] = {}
    parcel: Parcel | None = None
    box: Box[Any] | None = None
    more: Open = Open()
    tags: list[str] = []
    tags_or_none: list[str] | None = None
    dog: Dog | None = None
    secret: SecretStr | None = None


def app_with(field: str) -> FastAPI:
    app, _ = new_app()

    @app.post("/m", dependencies=[LockDep(f"m:{{{field}}}")])
    async def of_model(m: Model) -> None: ...

    return app


@pytest.mark.parametrize(
    ("field", "body", "problem"),
    [
        ("m.d.k", {"the-d": {"k": {"z": 1}}}, ("string_type", ["the-d", "k"], {"z": 1})),
        ("m.d.k", {"the-d": {"k": [1]}}, ("string_type", ["the-d", "k"], [1])),
        ("m.d.k", {"the-d": {}}, ("missing", ["the-d", "k"], {})),
        ("m.d.k.z", {"the-d": {"k": {}}}, ("missing", ["the-d", "k", "z"], {})),
        ("m.d.k.z", {"the-d": {"k": 5}}, ("missing", ["the-d", "k", "z"], 5)),
        ("m.d.k.upper", {"the-d": {"k": "x"}}, ("string_type", ["the-d", "k", "upper"], None)),
        ("m.anything", {"anything": {"z": 1}}, ("string_type", ["anything"], {"z": 1})),
        ("m.thing", {"thing": [1]}, ("string_type", ["thing"], [1])),
        ("m.value", {"value": {"z": 1}}, ("string_type", ["value"], {"z": 1})),
        ("m.text", {"text": "[1]"}, ("string_type", ["text"], [1])),
        ("m.several", {"several": [1]}, ("string_type", ["several"], [1])),
        ("m.pet.bark", {"pet": {"lives": 7}}, ("missing", ["pet", "bark"], {"lives": 7, "toys": []})),
        ("m.parcel.content", {"parcel": {"content": [1], "labels": []}}, ("string_type", ["parcel", "content"], [1])),
        ("m.box.content", {"box": {"content": [1]}}, ("string_type", ["box", "content"], [1])),
        ("m.more.key", {"more": {"key": [1]}}, ("string_type", ["more", "key"], [1])),
        ("m.more.key", {"more": {}}, ("missing", ["more", "key"], {"size": 1})),
    ],
)
def test_what_the_client_chose_is_the_clients_mistake(
    field: str, body: dict[str, Any], problem: tuple[str, list[str], Any]
) -> None:
    kind, loc, shown = problem
    with TestClient(app_with(field)) as client:
        answer = client.post("/m", json=body)
    message = {"string_type": "Input should be a valid string", "missing": "Field required"}[kind]
    assert answer.status_code == 422
    assert answer.json() == {"detail": [{"type": kind, "loc": ["body", *loc], "msg": message, "input": shown}]}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("m", {}),
        ("m.tags", {}),
        ("m.tags_or_none", {"tags_or_none": []}),
        ("m.dog", {"dog": {"bark": "x"}}),
        ("m.dog.lives", {"dog": {"bark": "x"}}),
        ("m.pet.toys", {"pet": {"lives": 7}}),
        ("m.cats.tom.toys", {"cats": {"tom": {"lives": 7}}}),
        ("m.parcel.labels", {"parcel": {"content": 1, "labels": []}}),
        ("m.d", {}),
        ("m.model_dump", {}),
        ("m.more.model_dump", {}),
        ("m.secret", {"secret": "s"}),
        ("m.secret.get_secret_value", {"secret": "s"}),
    ],
)
def test_what_was_declared_is_the_routes_mistake(field: str, body: dict[str, Any]) -> None:
    with TestClient(app_with(field)) as client, pytest.raises(SettingsValidationError, match=field):
        client.post("/m", json=body)


@pytest.mark.parametrize("field", ["m.dog.bark", "m.several", "m.d", "m.anything.x.y"])
def test_none_is_a_name_still(field: str) -> None:
    app, _ = new_app()

    @app.post("/m", dependencies=[LockDep(f"m:{{{field}}}")])
    async def of_model(m: Annotated[Model | None, Body()] = None) -> None: ...

    with TestClient(app) as client:
        assert client.post("/m").status_code == 200


def test_plain_parameters() -> None:
    app, _ = new_app()
    DLock = Annotated[LockHandle, LockDep("d:{d}")]

    @app.post("/body")
    async def body(d: Annotated[Any, Body()], held: DLock) -> str:
        return held.name

    @app.post("/embedded")
    async def embedded(d: Annotated[Any, Body(embed=True)], held: DLock) -> str:
        return held.name

    @app.post("/form")
    async def form(d: Annotated[Any, Form()], held: DLock) -> str:
        return held.name

    @app.post("/query")
    async def query(held: DLock, d: Annotated[int | list[int], Query(alias="the-d")] = 1) -> str:
        return held.name

    @app.post("/queries")
    async def queries(q: Annotated[Open, Query()], held: Annotated[LockHandle, LockDep("d:{q.tag}")]) -> str:
        return held.name

    with TestClient(app) as client:
        answers = [
            client.post("/body", json={"z": 1}),
            client.post("/body", content=b"\xff", headers={"content-type": "text/plain"}),
            client.post("/embedded", json={"d": {"z": 1}}),
            client.post("/form", files={"d": b"\xff"}),
            client.post("/query?the-d=1&the-d=2"),
            client.post("/queries"),
        ]
        assert client.post("/body", json="x").json() == "d:x"
    assert [answer.status_code for answer in answers] == [422] * 6
    assert [(answer.json()["detail"][0]["loc"], answer.json()["detail"][0]["input"]) for answer in answers] == [
        (["body"], {"z": 1}),
        (["body"], None),
        (["body", "d"], {"z": 1}),
        (["body", "d"], None),
        (["query", "the-d"], [1, 2]),
        (["query", "tag"], {"size": 1}),
    ]


def test_result_of_a_dependency_is_not_the_clients() -> None:
    app, _ = new_app()

    def user() -> dict[str, Any]:
        return {"name": ["a"]}

    @app.post("/users", dependencies=[LockDep("user:{user.name}", user=Depends(user))])
    async def edit(user: Annotated[dict[str, Any], Body()]) -> None: ...

    with TestClient(app) as client, pytest.raises(SettingsValidationError, match=r"\{user\.name\}.*list"):
        client.post("/users", json={})
