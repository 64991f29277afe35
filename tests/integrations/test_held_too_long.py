"""How long a request holds its lock: `max_hold`, and the lease that a worker which was killed leaves behind."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fastapi import Request
from starlette.testclient import TestClient

from grelmicro.errors import SettingsValidationError
from grelmicro.testing import held_elsewhere
from grelmicro_fastapi import FenceDep, LockDep, LocksDep, TaskLockDep
from grelmicro_starlette import locked
from tests.integrations.asgi import client_of, is_free, new_app

DECLARATIONS: dict[str, Callable[..., Any]] = {
    "LockDep": LockDep,
    "FenceDep": FenceDep,
    "LocksDep": LocksDep,
    "TaskLockDep": TaskLockDep,
    "locked": locked,
}
everywhere = pytest.mark.parametrize("declare", DECLARATIONS.values(), ids=DECLARATIONS)


def handler(declare: Callable[..., Any], work: Callable[[], Any], **settings: Any) -> Callable[..., Any]:
    """A handler that does `work` while it holds `cart`."""
    if declare is locked:

        async def guarded(request: Request) -> Any:
            return await work()

        return locked("cart", **settings)(guarded)

    async def depends(held: Annotated[Any, declare("cart", **settings)]) -> Any:
        return await work()

    return depends


@everywhere
async def test_a_handler_that_hangs_loses_its_lock_at_max_hold(declare: Callable[..., Any]) -> None:
    app, micro = new_app()
    cancelled: list[bool] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    app.add_api_route("/", handler(declare, hang, max_hold=0.2))
    async with client_of(app) as client:
        answer = await client.get("/")
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:grelmicro:lost")
        assert cancelled == [True]
        assert await is_free(micro, "cart")


@everywhere
def test_lease_of_a_request_is_half_as_long(declare: Callable[..., Any]) -> None:
    """What a killed worker leaves held frees itself after that."""
    app, micro = new_app()
    left: list[float] = []

    async def look() -> None:
        for kind in ("lock", "tasklock"):
            record = await micro.coordination.lock_backend.read(f"{kind}:cart")
            if record is not None and record.live:
                left.append(record.remaining)

    app.add_api_route("/renewed", handler(declare, look))
    app.add_api_route("/not-renewed", handler(declare, look, auto_renew=False))
    paths = {"/renewed": 30, "/not-renewed": 60}
    if declare is TaskLockDep:
        del paths["/not-renewed"]  # the minimum hold would refuse it
    with TestClient(app) as client:
        assert [client.get(path).status_code for path in paths] == [200] * len(paths)
    assert [round(seconds, -1) for seconds in left] == list(paths.values())


@everywhere
@pytest.mark.parametrize("wrong", [0, -1, "long"])
def test_bad_limits_are_refused_where_they_are_written(declare: Callable[..., Any], wrong: object) -> None:
    with pytest.raises(SettingsValidationError, match="max_hold"):
        declare("cart", max_hold=wrong)


def test_limit_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREL_LOCK_CART_MAX_HOLD", "0.2")
    app, micro = new_app()
    app.add_api_route("/", handler(LockDep, lambda: asyncio.sleep(60)))
    with TestClient(app) as client:
        assert client.get("/").status_code == 503
        with held_elsewhere(micro, "cart"):
            pass
