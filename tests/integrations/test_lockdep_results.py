"""Names from the results of dependencies: `LockDep("user:{user.id}", user=Depends(current_user))`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, cast

import pytest
from fastapi import Depends, FastAPI, Header, HTTPException, Security, WebSocket
from fastapi.security import SecurityScopes
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from grelmicro.coordination import LockHandle, MultiLockHandle
from grelmicro.errors import SettingsValidationError
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import FenceDep, LockDep, LocksDep, TaskLockDep
from tests.integrations.asgi import new_app

calls: list[str] = []


@dataclass
class User:
    id: int
    team: str


async def current_user(x_user: Annotated[int, Header()]) -> User:
    calls.append(f"user {x_user}")
    return User(x_user, "blue")


async def nothing() -> dict[str, int]:
    return {}


UserLock = Annotated[LockHandle, LockDep("user:{user.id}", timeout=0.1, user=Depends(current_user))]


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def get(app: FastAPI, url: str = "/1", **options: Any) -> Any:
    with TestClient(app, headers={"x-user": "07"}) as client:
        answer = client.get(url, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_handler_and_lock_get_one_result() -> None:
    app, micro = new_app()

    @app.get("/{cart_id}")
    async def show(cart_id: int, held: UserLock, user: Annotated[User, Depends(current_user)]) -> str:
        return f"{held.name} {user.id}"

    assert get(app) == "user:7 7"
    assert calls == ["user 7"]
    with TestClient(app) as client, held_elsewhere(micro, "user:7"):
        assert client.get("/1", headers={"x-user": "7"}).status_code == 409


def test_result_and_parameters_side_by_side() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(
        cart_id: int,
        held: Annotated[
            LockHandle,
            LockDep("{user.team}:{user.id}:{cart_id}:{who}", user=Depends(current_user), who=Depends(nothing)),
        ],
    ) -> None: ...

    @app.get("/good/{cart_id}")
    async def good(
        cart_id: int,
        held: Annotated[LockHandle, LockDep("{user.team}:{user.id}:{cart_id}", user=Depends(current_user))],
    ) -> str:
        return held.name

    assert get(app, "/good/042") == "blue:7:42"
    with pytest.raises(SettingsValidationError, match=r"\{who\}, whose value is dict and no text or number"):
        get(app)


def test_result_counts_before_a_parameter_of_the_same_name() -> None:
    app, _ = new_app()

    async def owner(cart_id: int) -> str:
        return f"owner of {cart_id}"

    @app.get("/{cart_id}")
    async def show(cart_id: int, held: Annotated[LockHandle, LockDep("cart:{cart_id}", cart_id=Depends(owner))]) -> str:
        return held.name

    assert get(app, "/042") == "cart:owner of 42"


def test_dependency_that_yields_surrounds_the_lock() -> None:
    app, micro = new_app()
    steps: list[str] = []

    async def session() -> AsyncIterator[str]:
        steps.append("begin")
        yield "s1"
        steps.append("end")

    @app.get("/{cart_id}")
    async def show(
        cart_id: int,
        held: Annotated[LockHandle, LockDep("s:{session}", scope="request", session=Depends(session))],
    ) -> str:
        steps.append(held.name)
        return held.name

    assert get(app) == "s:s1"
    assert steps == ["begin", "s:s1", "end"]


def test_lock_cannot_outlive_what_names_it() -> None:
    async def session() -> AsyncIterator[str]:
        yield "s1"

    app, _ = new_app()
    with pytest.raises(Exception, match=r"LockDep 's:\{session\}'.* has a scope of \"request\""):

        @app.get("/{cart_id}")
        async def show(
            held: Annotated[
                LockHandle, LockDep("s:{session}", scope="request", session=Depends(session, scope="function"))
            ],
        ) -> None: ...


def test_refusal_of_the_dependency_comes_before_the_lock() -> None:
    async def nobody() -> str:
        raise HTTPException(401)

    app, micro = new_app()

    @app.get("/{cart_id}", dependencies=[LockDep("user:{user}", timeout=0, user=Depends(nobody))])
    async def show(cart_id: int) -> None: ...

    with TestClient(app) as client:
        assert client.get("/1").status_code == 401


def test_bad_parameter_of_the_dependency_is_refused_by_fastapi() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(cart_id: int, held: UserLock) -> None: ...

    with TestClient(app) as client:
        answer = client.get("/x", headers={"x-user": "me"})
    assert answer.status_code == 422
    assert [problem["loc"] for problem in answer.json()["detail"]] == [["header", "x-user"], ["path", "cart_id"]]


def test_security() -> None:
    async def user(scopes: SecurityScopes) -> str:
        return "+".join(scopes.scopes)

    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(
        cart_id: int, held: Annotated[LockHandle, LockDep("user:{user}", user=Security(user, scopes=["read", "buy"]))]
    ) -> str:
        return held.name

    assert get(app) == "user:read+buy"


def test_all_of_them_take_results() -> None:
    app, _ = new_app()
    user = Depends(current_user)

    @app.get("/fence")
    async def fence(fence: Annotated[int, FenceDep("user:{user.id}", user=user)]) -> int:
        return fence

    @app.get("/locks")
    async def locks(held: Annotated[MultiLockHandle, LocksDep("u:{user.id}", "t:{user.team}", user=user)]) -> str:
        return held.name

    @app.get("/task")
    async def task(held: Annotated[LockHandle, TaskLockDep("report:{user.id}", user=user)]) -> str:
        return held.name

    assert get(app, "/fence") == 1
    assert get(app, "/locks") == "t:blue, u:7"
    assert get(app, "/task") == "report:7"


def test_websocket() -> None:
    app, _ = new_app()

    @app.websocket("/{cart_id}")
    async def follow(websocket: WebSocket, cart_id: int, held: UserLock) -> None:
        await websocket.accept()
        await websocket.send_text(held.name)

    with TestClient(app) as client:
        with client.websocket_connect("/1", headers={"x-user": "7"}) as socket:
            assert socket.receive_text() == "user:7"
        with pytest.raises(WebSocketDisconnect) as refusal, client.websocket_connect("/1"):
            pass
        assert refusal.value.code == 1008


def test_equal_declarations_are_equal() -> None:
    def declared(**options: Any) -> Any:
        return LockDep("user:{user.id}", **options)

    one = declared(user=Depends(current_user)).dependency
    assert one == declared(user=Depends(current_user)).dependency
    assert hash(one) == hash(declared(user=Depends(current_user)).dependency)
    for other in (
        declared(user=Depends(nothing)),
        declared(),
        declared(user=Depends(current_user, use_cache=False)),
        declared(user=Depends(current_user, scope="function")),
        declared(user=Security(current_user, scopes=["a"])),
    ):
        assert one != other.dependency


def test_what_it_depends_on_can_be_overridden() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(cart_id: int, held: UserLock, user: Annotated[User, Depends(current_user)]) -> str:
        return f"{held.name} {user.id}"

    app.dependency_overrides[current_user] = lambda: User(1, "red")
    assert get(app) == "user:1 1"


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: LockDep("user:{user.id}", usr=Depends(current_user)), "'usr' is neither a setting nor a field"),
        (lambda: LockDep("user", user=Depends(current_user)), "whose fields are none"),
        (lambda: LockDep("user:{user.id}", user=current_user), "'user' should be a dependency with what it depends"),
        (lambda: LockDep("user:{user.id}", user=Depends()), "user=Depends"),
        (lambda: LockDep("user:{user.id}", user=None), "'user' should be a dependency"),
        (lambda: LockDep("a:{timeout}", timeout=Depends(current_user)), "'timeout' means something else here"),
        (lambda: LockDep("a:{scope}", scope=Depends(current_user)), "'scope' means something else here"),
        (lambda: LockDep("a:{connection}", connection=Depends(current_user)), "'connection' means something else"),
        (lambda: TaskLockDep("a:{b}", timeout=5), "'timeout' is neither a setting nor a field"),
        (lambda: LocksDep("a:{b}", "b:{c}", d=Depends(current_user)), "whose fields are b, c"),
        (lambda: LocksDep(), "needs a name"),
        (lambda: LockDep("a", scope=cast(Any, "handler")), "scope should be 'function' or 'request'"),
    ],
)
def test_wrong_keywords_are_refused_where_they_are_written(declare: Any, told: str) -> None:
    with pytest.raises(SettingsValidationError, match=told):
        declare()


def test_result_that_was_not_handed_over_is_told() -> None:
    app, _ = new_app()

    @app.get("/{cart_id}")
    async def show(
        user: Annotated[User, Depends(current_user)], held: Annotated[LockHandle, LockDep("user:{user.id}")]
    ) -> None: ...

    with pytest.raises(SettingsValidationError, match=r"is the result of a dependency: .* user=Depends\(\.\.\.\)"):
        get(app)


def test_a_field_that_the_result_does_not_have_is_told() -> None:
    app, _ = new_app()

    @app.get("/object")
    async def wrong(held: Annotated[LockHandle, LockDep("u:{user.uid}", user=Depends(current_user))]) -> None: ...

    @app.get("/mapping")
    async def mapping(held: Annotated[LockHandle, LockDep("u:{user.uid}", user=Depends(nothing))]) -> None: ...

    with pytest.raises(SettingsValidationError, match="User has no 'uid'"):
        get(app, "/object")
    with pytest.raises(SettingsValidationError, match=r"mapping without \{user\.uid\}"):
        get(app, "/mapping")
