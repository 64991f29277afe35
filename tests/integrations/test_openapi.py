"""The OpenAPI document: as it is without the dependencies, but for the refusals."""

import copy
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, Path, WebSocket
from fastapi.openapi.models import OpenAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection
from grelmicro_fastapi import FenceDep, LeaderDep, LockDep, LocksDep, TaskLockDep, install

Document = dict[str, Any]
Refusals = Mapping[tuple[str, str], tuple[int, ...]]

BOTH = (409, 503)
PROBLEM = "#/components/schemas/CoordinationProblem"

lock: Any = LockDep("cart:{cart_id}")
term: Any = LeaderDep(LeaderElection("worker"))


def new() -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")])


def shop(app: FastAPI, lock: Any, term: Any) -> None:
    """Routes of every kind."""

    async def load(cart_id: Annotated[int, Path(gt=0)], held: Annotated[object, lock]) -> int:
        return cart_id

    async def load_more(cart: Annotated[int, Depends(load)], q: str | None = None) -> int:
        return cart

    @app.get("/free/{cart_id}")
    async def free(cart_id: int) -> int:
        return cart_id

    @app.get("/carts/{cart_id}")
    async def show(cart_id: Annotated[int, Path(description="The cart")], held: Annotated[object, lock]) -> int:
        return cart_id

    @app.put("/carts/{cart_id}", dependencies=[lock])
    async def put(cart_id: int, body: dict[str, int]) -> int:
        return cart_id

    @app.delete("/carts/{cart_id}", dependencies=[lock], status_code=204)
    async def delete(cart_id: int) -> None: ...

    @app.get("/nested/{cart_id}", operation_id="nested")
    async def nested(cart: Annotated[int, Depends(load_more)]) -> int:
        return cart

    @app.post("/reindex")
    async def reindex(led: Annotated[object, term]) -> str:
        return "done"

    @app.post("/both/{cart_id}", dependencies=[term, lock])
    async def both(cart_id: int) -> str:
        return "done"

    inner = APIRouter(prefix="/inner", dependencies=[lock])

    @inner.get("/{cart_id}")
    async def inside(cart_id: int, shop: Annotated[str, Header()]) -> int:
        return cart_id

    outer = APIRouter(prefix="/outer")
    outer.include_router(inner, tags=["inner"])

    @outer.get("/free")
    async def outside() -> int:
        return 1

    app.include_router(outer, prefix="/v1")
    app.include_router(outer, prefix="/v2", dependencies=[term])

    @app.websocket("/ws/{cart_id}")
    async def talk(websocket: WebSocket, cart_id: int, held: Annotated[object, lock]) -> None: ...

    @app.get("/hidden/{cart_id}", include_in_schema=False)
    async def hidden(cart_id: int, held: Annotated[object, lock]) -> None: ...


SHOP: Refusals = {
    ("/carts/{cart_id}", "get"): BOTH,
    ("/carts/{cart_id}", "put"): BOTH,
    ("/carts/{cart_id}", "delete"): BOTH,
    ("/nested/{cart_id}", "get"): BOTH,
    ("/reindex", "post"): (503,),
    ("/both/{cart_id}", "post"): BOTH,
    ("/v1/outer/inner/{cart_id}", "get"): BOTH,
    ("/v2/outer/inner/{cart_id}", "get"): BOTH,
    ("/v2/outer/free", "get"): (503,),
}


async def nothing() -> None: ...


def documents(**options: Any) -> tuple[Document, Document]:
    """Of the same shop with dependencies that do nothing, and with those of this package."""
    plain, app = FastAPI(**options), FastAPI(**options)
    shop(plain, Depends(nothing), Depends(nothing))
    shop(app, lock, term)
    install(app, new())
    return plain.openapi(), app.openapi()


def without(document: Document, refusals: Refusals) -> Document:
    """The document after these responses, each of which must be there, were taken out."""
    document = copy.deepcopy(document)
    for (path, method), statuses in refusals.items():
        for status in statuses:
            response = document["paths"][path][method]["responses"].pop(str(status))
            assert response["content"] == {"application/problem+json": {"schema": {"$ref": PROBLEM}}}
            assert response["headers"]["Retry-After"]["schema"] == {"type": "integer"}
    schemas = document["components"]["schemas"]
    assert set(schemas.pop("CoordinationProblem")["properties"]) == {"type", "title", "status", "detail"}
    return document


def references(part: Any) -> Iterator[str]:
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if key == "$ref":
            yield value
        yield from references(value)


def test_only_the_refusals_are_added() -> None:
    plain, ours = documents()
    assert ours != plain
    assert without(ours, SHOP) == plain


@pytest.mark.parametrize(
    "dependency",
    [LockDep("a:{x}"), LocksDep("a:{x}", "b:{y}"), FenceDep("a:{x}"), TaskLockDep("a:{x}")],
    ids=["LockDep", "LocksDep", "FenceDep", "TaskLockDep"],
)
def test_each_dependency_that_takes_something_is_refused_alike(dependency: Any) -> None:
    plain, app = FastAPI(), FastAPI()
    for each, dependencies in ((plain, []), (app, [dependency])):

        @each.get("/{x}/{y}", dependencies=dependencies)
        async def show(x: int, y: int) -> int:
            return x

    install(app, new())
    assert without(app.openapi(), {("/{x}/{y}", "get"): BOTH}) == plain.openapi()


def test_app_wide_dependency_counts() -> None:
    plain, app = FastAPI(), FastAPI(dependencies=[term])
    for each in (plain, app):

        @each.get("/")
        async def show() -> int:
            return 1

    install(app, new())
    document = app.openapi()
    assert list(document["paths"]["/"]["get"]["responses"]) == ["200", "503"]
    assert document["components"].keys() == {"schemas"}
    del document["paths"]["/"]["get"]["responses"]["503"], document["components"]
    assert document == plain.openapi()


def test_document_is_valid() -> None:
    _, ours = documents()
    OpenAPI.model_validate(ours)
    schemas = ours["components"]["schemas"]
    found = set(references(ours))
    assert PROBLEM in found
    assert {reference.removeprefix("#/components/schemas/") for reference in found} <= schemas.keys()


def test_app_that_has_no_such_routes_is_documented_as_before() -> None:
    plain, app = FastAPI(), FastAPI()
    for each in (plain, app):

        @each.get("/{number}")
        async def show(number: int) -> int:
            return number

    install(app, new())
    assert app.openapi() == plain.openapi()


def test_order_and_number_of_installs_do_not_matter() -> None:
    before, after = FastAPI(), FastAPI()
    micro = new()
    install(before, micro)
    shop(before, lock, term)
    shop(after, lock, term)
    install(after, micro)
    install(after, micro)
    assert before.openapi() == after.openapi()
    assert without(after.openapi(), SHOP) == documents()[0]


def test_document_made_before_install_is_completed() -> None:
    app = FastAPI()
    shop(app, lock, term)
    assert "409" not in app.openapi()["paths"]["/carts/{cart_id}"]["get"]["responses"]
    install(app, new())
    assert app.openapi() == documents()[1]


def test_served_document_is_the_same_every_time() -> None:
    app = FastAPI()
    install(app, new())
    shop(app, lock, term)
    exported, method = copy.deepcopy(app.openapi()), app.openapi
    for _ in range(2):
        with TestClient(app) as client:
            assert [client.get("/openapi.json").json() for _ in range(2)] == [exported] * 2
            assert client.get("/docs").status_code == 200
    assert app.openapi is method


@pytest.mark.parametrize(
    ("declared", "kept"),
    [
        ({409: {"description": "Mine"}}, {"409": "Mine"}),
        ({"409": {"description": "Mine"}, 503: {"description": "Mine, too"}}, {"409": "Mine", "503": "Mine, too"}),
        ({"4XX": {"description": "Mine"}}, {"4XX": "Mine"}),
        ({"default": {"description": "Mine"}}, {"default": "Mine"}),
    ],
)
def test_declared_responses_stay(declared: dict[int | str, dict[str, Any]], kept: dict[str, str]) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[LockDep("cart")], responses=declared)
    async def show() -> int:
        return 1

    install(app, new())
    responses = app.openapi()["paths"]["/"]["get"]["responses"]
    assert {status: responses[status]["description"] for status in kept} == kept
    assert all("content" not in responses[status] for status in kept)
    covered = {"409", "503"} if "default" in kept else {"409"} if "4XX" in kept else kept.keys() & {"409", "503"}
    assert responses.keys() == {"200"} | kept.keys() | ({"409", "503"} - covered)


def test_later_route_of_the_same_path_is_the_one_that_is_documented() -> None:
    """FastAPI serves the first and documents the last, which has no lock here."""
    app = FastAPI()

    @app.get("/", dependencies=[LockDep("cart")], operation_id="first")
    async def first() -> int:
        return 1

    @app.get("/", operation_id="last")
    async def last() -> int:
        return 1

    install(app, new())
    assert list(app.openapi()["paths"]["/"]["get"]["responses"]) == ["200"]


def test_route_that_is_not_documented_says_nothing_of_one_that_is() -> None:
    app = FastAPI()

    @app.get("/")
    async def first() -> int:
        return 1

    @app.get("/", dependencies=[LockDep("cart")], include_in_schema=False)
    async def hidden() -> int:
        return 1

    install(app, new())
    assert list(app.openapi()["paths"]["/"]["get"]["responses"]) == ["200"]


def test_route_that_is_added_later_shows_when_fastapi_shows_it() -> None:
    plain, app = FastAPI(), FastAPI()
    install(app, new())
    for each, dependencies in ((plain, []), (app, [lock])):

        @each.get("/first/{cart_id}", dependencies=dependencies)
        async def first(cart_id: int) -> int:
            return cart_id

        each.openapi()

        @each.get("/second/{cart_id}", dependencies=dependencies)
        async def second(cart_id: int) -> int:
            return cart_id

    refusals = {(path, "get"): BOTH for path in plain.openapi()["paths"]}
    assert without(app.openapi(), refusals) == plain.openapi()


def test_mounted_app_documents_its_own() -> None:
    """A document tells of one app; that of a mounted one has refusals when it was installed there."""
    micro = new()
    root, below, bare = FastAPI(), FastAPI(), FastAPI()
    for app in (root, below, bare):

        @app.get("/carts/{cart_id}", dependencies=[lock])
        async def show(cart_id: int) -> int:
            return cart_id

    root.mount("/below", below)
    root.mount("/bare", bare)
    install(below, micro)
    install(root, micro)
    refused = {"200", "409", "422", "503"}
    expected = [(root, "/openapi.json", refused), (below, "/below/openapi.json", refused)]
    with TestClient(root) as client:
        for app, path, statuses in [*expected, (bare, "/bare/openapi.json", {"200", "422"})]:
            served = client.get(path).json()
            assert list(served["paths"]) == ["/carts/{cart_id}"]
            assert served["paths"]["/carts/{cart_id}"]["get"]["responses"].keys() == statuses
            assert served["paths"] == app.openapi()["paths"]


@pytest.mark.parametrize("before", [True, False], ids=["replaced before", "replaced after"])
def test_document_of_ones_own_gets_them_too(before: bool) -> None:
    app = FastAPI()

    @app.get("/", dependencies=[LockDep("cart")])
    async def show() -> int:
        return 1

    def mine() -> Document:
        if not app.openapi_schema:
            app.openapi_schema = get_openapi(title="Mine", version="2", routes=app.routes)
        return app.openapi_schema

    if before:
        app.openapi = mine  # type: ignore[method-assign]
    install(app, new())
    app.openapi = app.openapi if before else mine  # type: ignore[method-assign]
    with TestClient(app) as client:
        served = client.get("/openapi.json").json()
    assert served["info"] == {"title": "Mine", "version": "2"}
    assert list(served["paths"]["/"]["get"]["responses"]) == ["200", "409", "503"]


def test_refusals_that_the_app_makes_itself_are_listed_without_content() -> None:
    plain, app = FastAPI(), FastAPI()
    for each, dependencies in ((plain, []), (app, [lock])):

        @each.get("/{cart_id}", dependencies=dependencies)
        async def show(cart_id: int) -> int:
            return cart_id

    install(app, new(), refusal=lambda connection, problem: PlainTextResponse(problem.title))
    document = copy.deepcopy(app.openapi())
    responses = document["paths"]["/{cart_id}"]["get"]["responses"]
    assert [responses.pop(str(status)).keys() for status in BOTH] == [{"description"}] * 2
    assert document == plain.openapi()


def test_app_without_a_document() -> None:
    app = FastAPI(openapi_url=None)
    install(app, new())
    shop(app, lock, term)
    with TestClient(app) as client:
        assert client.get("/openapi.json").status_code == 404
        assert client.get("/carts/1").json() == 1
