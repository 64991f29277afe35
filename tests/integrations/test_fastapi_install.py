"""`install` on FastAPI: what it passes on, and the routes that it refuses."""

import inspect
import re
import signal
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount

import grelmicro_starlette
from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderElection, LockHandle, WouldBlockError
from grelmicro.errors import SettingsValidationError
from grelmicro_fastapi import FenceDep, LeaderDep, LockDep, LocksDep, TaskLockDep, install

A: Any = LockDep("a:{x}")
B: Any = LockDep("b:{y}")


def new() -> Grelmicro:
    return Grelmicro(uses=[Coordination.from_url("memory://")])


def refused(route: str) -> Any:
    """The error about a route, which says what to write instead."""
    return pytest.raises(SettingsValidationError, match=rf"^{route} takes 'a:.*LocksDep\(\"a:{{x}}\", \"b:{{y}}\"\)$")


def start(app: Starlette) -> None:
    with TestClient(app):
        raise AssertionError("must not start")


async def move(x: int, y: int) -> None: ...


async def nested(b: Annotated[LockHandle, B]) -> None: ...


def test_it_takes_what_that_of_starlette_takes() -> None:
    ours, below = inspect.signature(install), inspect.signature(grelmicro_starlette.install)
    assert ours == below


@pytest.mark.parametrize("signals", [True, False])
async def test_signals_are_taken_over_or_not(signals: bool) -> None:
    app, before = FastAPI(), signal.getsignal(signal.SIGTERM)
    install(app, new(), signals=signals)
    async with app.router.lifespan_context(app):
        assert (signal.getsignal(signal.SIGTERM) is not before) is signals


def test_options_are_passed_on() -> None:
    app = FastAPI()
    install(app, new(), retry_after=7)

    @app.get("/")
    async def busy() -> None:
        raise WouldBlockError("lock 'cart' is held by another holder")

    with TestClient(app) as client:
        assert client.get("/").headers["retry-after"] == "7"


def test_refusals_of_ones_own_are_passed_on() -> None:
    app = FastAPI()
    install(app, new(), refusal=lambda connection, problem: PlainTextResponse("mine", problem.status))

    @app.get("/")
    async def busy() -> None:
        raise WouldBlockError("lock 'cart' is held by another holder")

    with TestClient(app) as client:
        answer = client.get("/")
    assert (answer.status_code, answer.text) == (409, "mine")


def test_two_locks_are_refused_where_the_route_is_declared() -> None:
    app = FastAPI()
    install(app, new())
    with refused("GET /{x}/{y}"):

        @app.get("/{x}/{y}")
        async def move(x: int, y: int, a: Annotated[LockHandle, A], b: Annotated[LockHandle, B]) -> None: ...

    with TestClient(app) as client:
        assert client.get("/1/2").status_code == 404


def both_in_one_signature(app: FastAPI) -> None:
    @app.post("/{x}/{y}")
    async def move(x: int, y: int, a: Annotated[LockHandle, A], b: Annotated[LockHandle, B]) -> None: ...


def one_of_the_app(app: FastAPI) -> None:
    app.router.dependencies.append(A)
    app.post("/{x}/{y}", dependencies=[B])(move)


def one_of_the_decorator(app: FastAPI) -> None:
    @app.post("/{x}/{y}", dependencies=[A])
    async def move(x: int, y: int, b: Annotated[LockHandle, B]) -> None: ...


def one_nested(app: FastAPI) -> None:
    @app.post("/{x}/{y}")
    async def move(x: int, y: int, a: Annotated[LockHandle, A], b: Annotated[None, Depends(nested)]) -> None: ...


declared_on_the_app = pytest.mark.parametrize(
    "declare", [both_in_one_signature, one_of_the_app, one_of_the_decorator, one_nested], ids=lambda f: f.__name__
)
Declare = Callable[[FastAPI], None]


@declared_on_the_app
def test_declared_after_install(declare: Declare) -> None:
    app = FastAPI()
    install(app, new())
    with refused("POST /{x}/{y}"):
        declare(app)


@declared_on_the_app
def test_declared_before_install(declare: Declare) -> None:
    app = FastAPI()
    declare(app)
    context = app.router.lifespan_context
    with refused("POST /{x}/{y}"):
        install(app, new())
    assert app.router.lifespan_context is context, "a refusal changes nothing"


def in_a_router(app: FastAPI) -> None:
    router = APIRouter(dependencies=[A])
    router.post("/{x}/{y}", dependencies=[B])(move)
    app.include_router(router, prefix="/in")


def at_the_inclusion(app: FastAPI) -> None:
    router = APIRouter()
    router.post("/{x}/{y}", dependencies=[B])(move)
    app.include_router(router, prefix="/in", dependencies=[A])


def two_routers_deep(app: FastAPI) -> None:
    inner, outer = APIRouter(prefix="/{x}", dependencies=[B]), APIRouter(dependencies=[A])
    inner.post("/{y}")(move)
    outer.include_router(inner)
    app.include_router(outer, prefix="/in")


def below_a_mount(app: FastAPI) -> None:
    below = FastAPI(dependencies=[A])
    below.post("/{x}/{y}", dependencies=[B])(move)
    app.mount("/in", below)


def below_a_mounted_router(app: FastAPI) -> None:
    below = FastAPI(dependencies=[A])
    below.post("/{y}", dependencies=[B])(move)
    app.router.routes.append(Mount("/in", routes=[Mount("/{x}", app=below)]))


elsewhere = pytest.mark.parametrize(
    "declare",
    [in_a_router, at_the_inclusion, two_routers_deep, below_a_mount, below_a_mounted_router],
    ids=lambda f: f.__name__,
)


@elsewhere
def test_declared_elsewhere_before_install(declare: Declare) -> None:
    app = FastAPI()
    declare(app)
    with refused("POST /in/{x}/{y}"):
        install(app, new())


@elsewhere
def test_declared_elsewhere_after_install_is_refused_at_the_start(declare: Declare) -> None:
    app, micro = FastAPI(), new()
    install(app, micro)
    declare(app)
    with refused("POST /in/{x}/{y}"):
        start(app)
    assert not micro.is_open


def test_websocket_is_refused_at_the_start() -> None:
    app = FastAPI()
    install(app, new())

    @app.websocket("/{x}/{y}")
    async def talk(
        websocket: WebSocket, x: int, y: int, a: Annotated[LockHandle, A], b: Annotated[LockHandle, B]
    ) -> None: ...

    with refused("websocket /{x}/{y}"):
        start(app)


def test_one_lock_however_often_it_is_declared_is_fine() -> None:
    app = FastAPI(dependencies=[A])
    install(app, new())
    router = APIRouter(dependencies=[LockDep("a:{x}", timeout=1), FenceDep("a:{x}")])

    async def helper(held: Annotated[LockHandle, LockDep("a:{x}", scope="request")]) -> None: ...

    @router.get("/{x}")
    async def show(
        x: int, a: Annotated[LockHandle, A], nested: Annotated[None, Depends(helper)], led: str = "no"
    ) -> str:
        return a.name

    app.include_router(router)
    with TestClient(app) as client:
        assert client.get("/1").json() == "a:1"


@pytest.mark.parametrize("beside", [LeaderDep(LeaderElection("worker")), TaskLockDep("b:{y}")], ids=["term", "task"])
def test_what_does_not_wait_is_fine_beside_a_lock(beside: Any) -> None:
    app = FastAPI()
    install(app, new())
    app.get("/{x}/{y}", dependencies=[beside, A])(move)
    assert [route for route in app.routes if getattr(route, "endpoint", None) is move]


def test_remedy_is_accepted() -> None:
    app = FastAPI()
    install(app, new())
    app.get("/{x}/{y}", dependencies=[LocksDep("a:{x}", "b:{y}")])(move)
    with TestClient(app) as client:
        assert client.get("/1/2").status_code == 200


@pytest.mark.parametrize("others", [(A, LocksDep("a:{x}", "b:{y}")), (LocksDep("a:{x}", "b:{y}"), FenceDep("b:{y}"))])
def test_some_locks_at_once_and_another_one_are_two(others: tuple[Any, Any]) -> None:
    app = FastAPI()
    install(app, new())
    with refused("GET /{x}/{y}"):
        app.get("/{x}/{y}", dependencies=others)(move)


@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ((A, LocksDep("a:{x}", "b:{y}")), '\'a:{x}\', which is part of LocksDep("a:{x}", "b:{y}")'),
        ((LocksDep("a:{x}", "b:{y}"), A, B), "'a:{x}' and 'b:{y}', which is part of LocksDep(\"a:{x}\", \"b:{y}\")"),
        ((LocksDep("a:{x}", "b:{y}"), LocksDep("b:{y}", "a:{x}")), "'b:{y}', 'a:{x}', which is part of LocksDep"),
    ],
)
def test_what_is_held_with_others_is_to_be_left_out(others: tuple[Any, ...], advice: str) -> None:
    app = FastAPI(dependencies=others[:1])
    install(app, new())
    with pytest.raises(SettingsValidationError, match=re.escape(f"; leave out the dependency on {advice}")):
        app.get("/{x}/{y}", dependencies=others[1:])(move)


def test_two_locks_of_two_routes_are_fine() -> None:
    app = FastAPI()
    install(app, new())
    app.get("/a/{x}", dependencies=[A])(move)
    app.get("/b/{y}", dependencies=[B])(move)
    with TestClient(app) as client:
        assert client.get("/a/1?y=1").status_code == 200


@pytest.mark.parametrize("scope", ["function", "request"])
def test_lock_of_the_decorator_has_its_scope(scope: Any) -> None:
    app, micro = FastAPI(), new()
    install(app, micro)

    @app.get("/{x}", dependencies=[LockDep("a:{x}", scope=scope)])
    async def show(x: int) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            yield str(await micro.coordination.lock(f"a:{x}").locked())

        return StreamingResponse(parts())

    with TestClient(app) as client:
        assert client.get("/1").text == str(scope == "request")


def test_route_class_of_the_app_is_kept() -> None:
    class Mine(APIRoute):
        def get_route_handler(self) -> Any:
            handle = super().get_route_handler()

            async def handled(request: Request) -> Response:
                response = await handle(request)
                response.headers["x-mine"] = "yes"
                return response

            return handled

    app = FastAPI()
    app.router.route_class = Mine
    install(app, new())
    install(app, app.state.grelmicro)

    @app.get("/{x}", dependencies=[A])
    async def show(x: int) -> str:
        return "shown"

    (route,) = (route for route in app.routes if isinstance(route, Mine))
    assert [kind.__name__ for kind in type(route).__mro__[:4]] == ["Mine", "CheckedRoute", "Mine", "APIRoute"]
    with refused("GET /{x}/{y}"):
        app.get("/{x}/{y}", dependencies=[A, B])(move)
    with TestClient(app) as client:
        assert client.get("/1").headers["x-mine"] == "yes"


def test_starlette_app_is_installed_as_one() -> None:
    async def show(request: Request) -> Response:
        return PlainTextResponse(str(micro.is_open))

    app, micro = Starlette(), new()
    install(app, micro)
    app.add_route("/", show)
    with TestClient(app) as client:
        assert client.get("/").text == "True"


@pytest.mark.parametrize("wrong", [(new(), FastAPI()), (FastAPI(), Coordination), (None, new())])
def test_what_it_takes_is_told(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(SettingsValidationError, match=r"install\(app, micro\)"):
        install(*wrong)


def test_depends_around_a_dependency_is_told() -> None:
    app = FastAPI()
    for dependency in (LockDep("a:{x}"), LeaderDep(LeaderElection("worker"))):
        with pytest.raises(SettingsValidationError, match=r"without Depends\(\)"):

            @app.get("/{x}")
            async def show(x: int, held: Annotated[object, Depends(dependency)]) -> None: ...

        with pytest.raises(SettingsValidationError, match=r"without Depends\(\)"):
            app.get("/{x}", dependencies=[Depends(dependency)])(move)
