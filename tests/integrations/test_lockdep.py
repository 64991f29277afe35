"""`LockDep`: which lock a request holds, and what FastAPI makes of it."""

import asyncio
from collections.abc import AsyncIterator
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from fastapi import APIRouter, Cookie, Depends, FastAPI, Header, Path, Query, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LockHandle
from grelmicro.errors import OutOfContextError, SettingsValidationError
from grelmicro.testing.aids import held_elsewhere
from grelmicro_fastapi import LockDep, install
from tests.integrations.asgi import client_of, new_app

CartLock = Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=0.1)]


class Color(Enum):
    RED = "red"


def lock_name(app: FastAPI, url: str, **options: Any) -> str:
    with TestClient(app) as client:
        answer = client.get(url, **options)
    assert answer.status_code == 200, answer.text
    return str(answer.json())


def test_number_in_the_path() -> None:
    app, _ = new_app()

    @app.get("/carts/{cart_id}")
    async def show(cart_id: int, held: CartLock) -> str:
        assert held.valid
        return held.name

    assert lock_name(app, "/carts/42") == lock_name(app, "/carts/042") == "cart:42"


def test_text_in_the_path_is_escaped() -> None:
    app, _ = new_app()

    @app.get("/move/{x}/{y}")
    async def move(x: str, y: str, held: Annotated[LockHandle, LockDep("move:{x}:{y}")]) -> str:
        return held.name

    assert lock_name(app, "/move/1%3A2/3") == "move:1%3A2:3"
    assert lock_name(app, "/move/1/2%3A3") == "move:1:2%3A3"


@pytest.mark.parametrize(
    ("url", "headers", "name"),
    [
        ("/find?q=a&n=07", {}, "find:a:7:none"),
        ("/find?q=a", {}, "find:a:1:none"),
        ("/find", {"x-shop": "Berlin"}, "find:=none:1:Berlin"),
    ],
)
def test_query_and_header(url: str, headers: dict[str, str], name: str) -> None:
    app, _ = new_app()

    @app.get("/find")
    async def find(
        held: Annotated[LockHandle, LockDep("find:{query}:{n}:{x_shop}")],
        query: Annotated[str | None, Query(alias="q")] = None,
        n: int = 1,
        x_shop: Annotated[str, Header()] = "none",
    ) -> str:
        return held.name

    assert lock_name(app, url, headers=headers) == name


def test_cookie_enum_and_uuid() -> None:
    app, _ = new_app()

    @app.get("/{color}/{key}")
    async def show(
        color: Color,
        key: UUID,
        held: Annotated[LockHandle, LockDep("paint:{color}:{key}:{who}")],
        who: Annotated[str, Cookie()] = "nobody",
    ) -> str:
        return held.name

    key = UUID(int=10)
    assert lock_name(app, f"/red/{str(key).upper()}") == f"paint:red:{key}:nobody"
    with TestClient(app, cookies={"who": "me"}) as client:
        assert client.get(f"/red/{key}").json() == f"paint:red:{key}:me"


def test_parameter_of_a_dependency() -> None:
    """The handler takes a cart, and the dependency that loads it takes its number."""
    app, _ = new_app()

    async def load(cart_id: int) -> dict[str, int]:
        return {"id": cart_id}

    @app.get("/carts/{cart_id}")
    async def show(held: CartLock, cart: Annotated[dict[str, int], Depends(load)]) -> str:
        return f"{held.name} {cart['id']}"

    assert lock_name(app, "/carts/042") == "cart:42 42"


def test_what_the_handler_receives_counts_before_what_a_dependency_receives() -> None:
    app, _ = new_app()

    async def load(cart_id: str) -> str:
        return cart_id

    @app.get("/carts/{cart_id}")
    async def show(text: Annotated[str, Depends(load)], cart_id: int, held: CartLock) -> str:
        return f"{held.name} {text}"

    assert lock_name(app, "/carts/042") == "cart:42 042"


def test_parameter_of_a_prefix_that_nobody_takes() -> None:
    app, _ = new_app()
    router = APIRouter(prefix="/shops/{shop}")

    @router.get("/stock/{item}")
    async def show(item: int, held: Annotated[LockHandle, LockDep("stock:{shop}:{item}")]) -> str:
        return held.name

    app.include_router(router, prefix="/v1")
    assert lock_name(app, "/v1/shops/Nord/stock/007") == "stock:Nord:7"
    assert lock_name(app, "/v1/shops/007/stock/7") == "stock:007:7"


def test_lock_of_a_router_and_of_a_route() -> None:
    """`dependencies=` takes it, too; then the handler does not see it."""
    app, micro = new_app()
    router = APIRouter(prefix="/carts", dependencies=[LockDep("cart:{cart_id}", timeout=0)])

    @router.get("/{cart_id}")
    async def show(cart_id: int) -> str:
        return "shown"

    @app.get("/others/{cart_id}", dependencies=[LockDep("other:{cart_id}", timeout=0)])
    async def other(cart_id: int) -> str:
        return "shown"

    app.include_router(router)
    with TestClient(app) as client:
        for path, name in (("/carts", "cart:42"), ("/others", "other:42")):
            assert client.get(f"{path}/42").json() == "shown"
            with held_elsewhere(micro, name):
                assert client.get(f"{path}/042").status_code == 409


def test_constrained_parameter_is_refused_as_without_a_lock() -> None:
    def build(*dependencies: Any) -> FastAPI:
        app, _ = new_app()

        @app.get("/carts/{cart_id}", dependencies=dependencies)
        async def show(cart_id: Annotated[int, Path(gt=0)]) -> str:
            return "shown"

        return app

    answers = []
    for dependencies in ([], [LockDep("cart:{cart_id}")]):
        with TestClient(build(*dependencies)) as client:
            answers.append([(client.get(url).status_code, client.get(url).json()) for url in ("/carts/0", "/carts/x")])
    assert answers[0] == answers[1]
    assert [status for status, _ in answers[0]] == [422, 422]


def test_field_that_nobody_takes_is_told() -> None:
    app, _ = new_app()

    @app.get("/carts/{number}")
    async def show(number: int, held: CartLock) -> str:
        return held.name

    with TestClient(app) as client, pytest.raises(SettingsValidationError) as told:
        client.get("/carts/42")
    assert "takes no path, query, header, cookie or body parameter 'cart_id'" in str(told.value)
    assert str(told.value).endswith("it takes number")


def test_field_that_is_the_result_of_a_dependency_is_told() -> None:
    """What the handler receives cannot be known, and something else must not be locked in its place."""
    app, _ = new_app()

    async def parse(cart_id: str) -> int:
        return int(cart_id)

    @app.get("/carts/{cart_id}")
    async def show(cart_id: Annotated[int, Depends(parse)], held: CartLock) -> str:
        return held.name

    with TestClient(app) as client, pytest.raises(SettingsValidationError, match="is the result of a dependency"):
        client.get("/carts/042")


def test_parameter_with_another_name_in_the_path() -> None:
    app, _ = new_app()

    @app.get("/carts/{id}")
    async def show(cart_id: Annotated[int, Path(alias="id")], held: CartLock) -> str:
        return held.name

    assert lock_name(app, "/carts/042") == "cart:42"


def test_lifespan_that_did_not_run_is_told() -> None:
    app, _ = new_app()

    @app.get("/carts/{cart_id}")
    async def show(cart_id: int, held: CartLock) -> str:
        return held.name

    root = FastAPI()
    root.mount("/sub", app)
    with TestClient(root) as client, pytest.raises(OutOfContextError, match="root app alone"):
        client.get("/sub/carts/42")


def test_equal_ones_are_one() -> None:
    one, other = LockDep("a:{x}", timeout=2), LockDep("a:{x}", timeout=2.0)
    assert one == other
    assert hash(one.dependency) == hash(other.dependency)
    assert one != LockDep("a:{x}", timeout=3)
    assert one != LockDep("a:{y}", timeout=2)
    assert one != LockDep("a:{x}", timeout=2, lease_duration=7)
    assert one != LockDep("a:{x}", timeout=2, scope="request")


def test_one_handle_for_a_name_within_a_request() -> None:
    app, micro = new_app()

    async def helper(held: Annotated[LockHandle, LockDep("a:{x}", timeout=1)]) -> LockHandle:
        return held

    @app.get("/{x}")
    async def show(
        x: int,
        first: Annotated[LockHandle, LockDep("a:{x}", timeout=1)],
        from_helper: Annotated[LockHandle, Depends(helper)],
        patient: Annotated[LockHandle, LockDep("a:{x}", timeout=2)],
        longer: Annotated[LockHandle, LockDep("a:{x}", timeout=1, scope="request")],
    ) -> int:
        return len({id(held) for held in (first, from_helper, patient, longer)})

    with TestClient(app) as client:
        assert client.get("/1").json() == 1
        with held_elsewhere(micro, "a:1", timeout=0):
            pass


def test_shared_lock_stays_as_long_as_the_longest_scope() -> None:
    app, micro = new_app()
    seen: list[str] = []

    async def session(held: Annotated[LockHandle, LockDep("a:{x}")]) -> AsyncIterator[LockHandle]:
        yield held
        seen.append(f"response sent, held: {held.valid}")

    async def work(held: Annotated[LockHandle, LockDep("a:{x}")]) -> AsyncIterator[LockHandle]:
        yield held
        seen.append(f"handler done, held: {held.valid}")

    @app.get("/{x}")
    async def show(
        x: int,
        first: Annotated[LockHandle, Depends(work, scope="function")],
        second: Annotated[LockHandle, LockDep("a:{x}", scope="request")],
    ) -> None: ...

    with TestClient(app) as client:
        client.get("/1")
    assert seen == ["handler done, held: True"]


def test_settings_come_from_the_environment_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_CART_LEASE_DURATION", "7")
    monkeypatch.setenv("GREL_LOCK_AUTO_RENEW", "false")
    app, _ = new_app()

    @app.get("/carts/{cart_id}")
    async def show(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}")]) -> list[object]:
        return [held.name, round(held.expires_in), held.renewed_automatically]

    @app.get("/given/{cart_id}")
    async def given(
        cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", lease_duration=9, auto_renew=True)]
    ) -> list[object]:
        return [held.name, round(held.expires_in), held.renewed_automatically]

    with TestClient(app) as client:
        assert client.get("/carts/42").json() == ["cart:42", 7, False]
        assert client.get("/given/42").json() == ["cart:42", 9, True]


def test_renews_by_default() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(cart_id: int, held: CartLock) -> bool:
        return held.renewed_automatically

    with TestClient(app) as client:
        assert client.get("/1").json() is True


@pytest.mark.parametrize("settings", [{"timeout": -1}, {"lease_duration": 0}, {"timeout": "soon"}])
def test_bad_settings_are_refused_where_they_are_written(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsValidationError):
        LockDep("cart:{cart_id}", **settings)


def test_websocket() -> None:
    app, micro = new_app()

    @app.websocket("/carts/{cart_id}")
    async def follow(websocket: WebSocket, cart_id: int, held: CartLock) -> None:
        await websocket.accept()
        await websocket.send_text(held.name)
        await websocket.receive_text()

    with TestClient(app) as client:
        with client.websocket_connect("/carts/042") as socket:
            assert socket.receive_text() == "cart:42"
            with pytest.raises(TimeoutError), held_elsewhere(micro, "cart:42", timeout=0.05):
                pass
            socket.send_text("done")
        with held_elsewhere(micro, "cart:42", timeout=2):
            pass


def test_websocket_with_a_parameter_that_is_not_valid() -> None:
    app, _ = new_app()

    @app.websocket("/carts/{cart_id}")
    async def follow(websocket: WebSocket, cart_id: int, held: CartLock) -> None:
        raise AssertionError("must not run")

    with TestClient(app) as client:
        with pytest.raises(WebSocketDisconnect) as refusal, client.websocket_connect("/carts/x"):
            pass
        assert refusal.value.code == 1008


def test_dependency_can_be_overridden() -> None:
    app, micro = new_app()

    @app.get("/carts/{cart_id}")
    async def show(cart_id: int, held: CartLock) -> str:
        return str(held)

    app.dependency_overrides[LockDep("cart:{cart_id}", timeout=0.1).dependency] = lambda: "no lock"
    with TestClient(app) as client, held_elsewhere(micro, "cart:42"):
        assert client.get("/carts/42").json() == "no lock"


def test_two_apps_in_one_process_keep_to_their_own() -> None:
    first, first_micro = new_app()
    second, _ = new_app()
    for app in (first, second):

        @app.get("/carts/{cart_id}")
        async def show(cart_id: int, held: CartLock) -> str:
            return held.name

    with TestClient(first) as client, TestClient(second) as other, held_elsewhere(first_micro, "cart:42"):
        assert client.get("/carts/42").status_code == 409
        assert other.get("/carts/42").status_code == 200


async def test_lock_in_the_store_serves_all_workers(tmp_path: Any) -> None:
    """Two apps on one file stand for two workers."""
    url = f"sqlite:///{tmp_path}/locks.db"
    apps = []
    running, most = 0, 0
    for _ in range(2):
        app = FastAPI()
        install(app, Grelmicro(uses=[Coordination.from_url(url)]))

        @app.get("/carts/{cart_id}")
        async def show(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", timeout=30)]) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return held.fencing_token

        apps.append(app)
    async with client_of(apps[0]) as one, client_of(apps[1]) as other:
        answers = await asyncio.gather(*(client.get("/carts/1") for client in (one, other) * 10))
    fences = sorted(answer.json() for answer in answers)
    assert most == 1
    assert fences == list(range(fences[0], fences[0] + 20))
