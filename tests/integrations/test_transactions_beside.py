"""What is logged at the start of routes whose transactions are not inside their locks."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Security, WebSocket
from fastapi.testclient import TestClient

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination
from grelmicro_fastapi import FenceDep, LockDep, LocksDep, TaskLockDep, install
from tests.integrations.asgi import new_app

LOCK: Any = LockDep("a:{x}")
LONG: Any = LockDep("a:{x}", scope="request")


def session() -> Iterator[str]:
    yield "session"


async def async_session() -> AsyncIterator[str]:
    yield "session"


class Pool:
    def __call__(self) -> Iterator[str]:
        yield "session"

    def session(self) -> Iterator[str]:
        yield "session"

    async def async_session(self, size: int = 1) -> AsyncIterator[str]:
        yield "session"


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def inner() -> AsyncIterator[str]:
        async for each in function():
            yield each

    return inner


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def inner() -> Any:
        return function()

    return inner


def settings() -> str:
    return "settings"


class Paging:
    def __init__(self, page: int = 0) -> None:
        self.page = page

    def __iter__(self) -> Iterator[int]:
        yield self.page


async def repository(database: Annotated[str, Depends(session)]) -> str:
    return database


async def current_user(database: Annotated[str, Depends(session)]) -> str:
    return "ada"


async def work(x: int) -> None: ...


def told(app: FastAPI, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged of this at the start."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "grelmicro.fastapi"), TestClient(app):
        pass
    return [record.getMessage() for record in caplog.records if record.name == "grelmicro.fastapi"]


def of_route(caplog: pytest.LogCaptureFixture, *dependencies: Any) -> list[str]:
    app, _ = new_app()
    app.get("/{x}", dependencies=dependencies)(work)
    return told(app, caplog)


SCOPE = 'give both one scope, like Depends(session, scope="function")'
ORDER = "declare the lock first"


@pytest.mark.parametrize("lock", [LOCK, FenceDep("a:{x}"), LocksDep("a:{x}", "b:{x}")], ids=["lock", "fence", "locks"])
@pytest.mark.parametrize(
    ("dependency", "name"),
    [
        (session, "session"),
        (async_session, "async_session"),
        (Pool(), "Pool"),
        (Pool().session, "Pool.session"),
        (partial(Pool().async_session, size=2), "Pool.async_session"),
        (traced(async_session), "async_session"),
        (passed_on(session), "session"),
        (repository, "session"),
    ],
    ids=["sync", "async", "call", "method", "partial", "wrapped", "passed on", "nested"],
)
def test_longer_than_the_lock(dependency: Any, name: str, lock: Any, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = of_route(caplog, lock, Depends(dependency))
    assert line.startswith(f"GET /{{x}}: {name} is not inside ")
    assert "'a:{x}'" in line
    assert "if it commits at its end" in line
    assert line.endswith(f': give both one scope, like Depends({name}, scope="function")')


@pytest.mark.parametrize(
    ("dependencies", "remedy"),
    [
        ([Depends(session), LOCK], f"{ORDER}, and {SCOPE}"),
        ([Depends(session, scope="function"), LOCK], ORDER),
        ([Depends(session), LONG], ORDER),
        ([Depends(session, scope="function"), LONG], ORDER),
        ([Depends(repository), LONG], ORDER),
        ([LOCK, Security(session)], SCOPE),
        ([LOCK, Depends(session, use_cache=False)], SCOPE),
        ([LOCK, Depends(session, scope="request"), FenceDep("a:{x}")], SCOPE),
        (
            [LockDep("a:{user}", scope="request", user=Depends(current_user)), Depends(session)],
            "let the lock find its name without session",
        ),
    ],
)
def test_remedy(dependencies: Any, remedy: str, caplog: pytest.LogCaptureFixture) -> None:
    (line,) = of_route(caplog, *dependencies)
    assert line.endswith(f": {remedy}")


@pytest.mark.parametrize(
    "dependencies",
    [
        [LOCK, Depends(session, scope="function")],
        [LONG, Depends(session)],
        [LONG, Depends(repository)],
        [LONG, Depends(session, scope="function")],
        [LOCK, LONG, Depends(session)],
        [LOCK, Depends(settings), Depends(Paging)],
        [Depends(settings), LOCK],
        [Depends(session)],
        [TaskLockDep("t:{x}"), LOCK],
        [TaskLockDep("t:{x}", scope="request"), LOCK],
        [TaskLockDep("t:{x}"), Depends(session)],
        [LockDep("a:{user}", user=Depends(current_user))],
    ],
)
def test_nothing_is_said(dependencies: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert of_route(caplog, *dependencies) == []


def test_one_line_names_all_of_a_route(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = of_route(caplog, Depends(async_session, scope="function"), LOCK, Depends(session), Depends(repository))
    assert line.startswith("GET /{x}: async_session, session is not inside")
    assert line.endswith(f": {ORDER}, and {SCOPE}")


def test_every_kind_of_route(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI(dependencies=[Depends(session)])
    install(app, Grelmicro(uses=[Coordination.from_url("memory://")]))
    router, below = APIRouter(prefix="/in", dependencies=[LOCK]), FastAPI()
    router.post("/{x}")(work)
    app.include_router(router)
    below.put("/{x}", dependencies=[LOCK, Depends(session)])(work)
    app.mount("/below", below)

    @app.websocket("/{x}")
    async def talk(websocket: WebSocket, x: int, held: Annotated[Any, LOCK]) -> None: ...

    @app.get("/{x}")
    async def show(x: int, held: Annotated[Any, LOCK]) -> None: ...

    lines = told(app, caplog)
    assert sorted(line.partition(": ")[0] for line in lines) == [
        "GET /{x}",
        "POST /in/{x}",
        "PUT /below/{x}",
        "websocket /{x}",
    ]
    assert told(app, caplog) == lines, "once at each start"


def test_many_routes_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = new_app()
    for number in range(13):
        app.get(f"/{number}/{{x}}", dependencies=[LOCK, Depends(session)])(work)
    lines = told(app, caplog)
    assert len(lines) == 11
    assert lines[-1] == "3 more routes have dependencies that are not inside their locks"
