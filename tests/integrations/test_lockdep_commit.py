"""A lock outlives the transaction that it guards: which declarations keep updates, and which lose some."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from grelmicro.coordination import LockHandle
from grelmicro.events import Event, listen
from grelmicro_fastapi import LockDep
from tests.integrations.asgi import client_of, new_app

Span = Literal["function", "request"]


class Database:
    """One number, and transactions that see what was committed when they began."""

    def __init__(self) -> None:
        self.number = 0

    async def transaction(self) -> AsyncIterator["Transaction"]:
        """Commits at its end, and that takes a moment."""
        transaction = Transaction(self.number)
        yield transaction
        await asyncio.sleep(0.002)
        self.number = transaction.number


class Transaction:
    """What one request sees and writes."""

    def __init__(self, number: int) -> None:
        self.number = number


def lock_first(app: FastAPI, database: Database, lock: Span, transaction: Span) -> None:
    @app.get("/{item}")
    async def buy(
        item: int,
        held: Annotated[LockHandle, LockDep("item:{item}", timeout=30, scope=lock)],
        inside: Annotated[Transaction, Depends(database.transaction, scope=transaction)],
    ) -> None:
        inside.number += 1


def transaction_first(app: FastAPI, database: Database, lock: Span, transaction: Span) -> None:
    @app.get("/{item}")
    async def buy(
        item: int,
        inside: Annotated[Transaction, Depends(database.transaction, scope=transaction)],
        held: Annotated[LockHandle, LockDep("item:{item}", timeout=30, scope=lock)],
    ) -> None:
        inside.number += 1


async def updates_kept(declare: Callable[..., None], lock: Span, transaction: Span) -> int:
    app, _ = new_app()
    database = Database()
    declare(app, database, lock, transaction)
    async with client_of(app) as client:
        answers = await asyncio.gather(*(client.get("/1", timeout=40) for _ in range(12)))
    assert {answer.status_code for answer in answers} == {200}
    return database.number


@pytest.mark.parametrize(("lock", "transaction"), [("function", "function"), ("request", "request")])
async def test_no_update_is_lost(lock: Span, transaction: Span) -> None:
    assert await updates_kept(lock_first, lock, transaction) == 12


async def test_no_update_is_lost_where_the_lock_stays_longer() -> None:
    assert await updates_kept(lock_first, "request", "function") == 12


@pytest.mark.parametrize(
    ("declare", "lock", "transaction"),
    [
        (lock_first, "function", "request"),
        (transaction_first, "function", "function"),
        (transaction_first, "request", "request"),
        (transaction_first, "function", "request"),
    ],
)
async def test_wrong_way_round_updates_are_lost(declare: Callable[..., None], lock: Span, transaction: Span) -> None:
    """What the documentation warns of is real: this is why the order and the scopes matter."""
    assert await updates_kept(declare, lock, transaction) < 12


class Story:
    """What happens in one request, in order."""

    def __init__(self, scope: Span) -> None:
        self.app, _ = new_app()
        self.steps: list[str] = []
        lock, database = LockDep("item:{item}", scope=scope), Depends(self.transaction, scope=scope)

        @self.app.get("/json/{item}")
        async def json(item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database]) -> int:
            self.steps.append("route")
            return item

        @self.app.get("/plain/{item}")
        def plain(item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database]) -> int:
            self.steps.append("route")
            return item

        @self.app.get("/stream/{item}")
        async def stream(item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database]) -> Response:
            self.steps.append("route")
            return StreamingResponse(self.body(fails=False))

        @self.app.get("/broken/{item}")
        async def broken(item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database]) -> Response:
            self.steps.append("route")
            return StreamingResponse(self.body(fails=True))

        @self.app.get("/background/{item}")
        async def background(
            item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database], tasks: BackgroundTasks
        ) -> None:
            self.steps.append("route")
            tasks.add_task(self.steps.append, "task")

        @self.app.get("/refuses/{item}")
        async def refuses(item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database]) -> None:
            self.steps.append("route")
            raise HTTPException(404)

        @self.app.get("/fails/{item}")
        async def fails(item: int, held: Annotated[LockHandle, lock], inside: Annotated[None, database]) -> None:
            self.steps.append("route")
            raise ZeroDivisionError

    async def transaction(self) -> AsyncIterator[None]:
        self.steps.append("begin")
        try:
            yield
        except BaseException:
            self.steps.append("rollback")
            raise
        self.steps.append("commit")

    async def body(self, *, fails: bool) -> AsyncIterator[str]:
        yield "x"
        if fails:
            raise ZeroDivisionError

    def hear(self, event: Event) -> None:
        if event.kind in ("acquired", "held"):
            self.steps.append({"acquired": "lock", "held": "unlock"}[event.kind])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.steps.append("sent in part")
        elif not message.get("more_body"):
            self.steps.append("and the rest")

    async def tell(self, path: str) -> str:
        scope: Scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
        asked: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        stop = listen(self.hear)
        try:
            async with self.app.router.lifespan_context(self.app):
                with suppress(ZeroDivisionError, BaseExceptionGroup):
                    await asyncio.wait_for(self.app(scope, receive, self.send), 10)
        finally:
            stop()
        return ", ".join(self.steps).replace("sent in part, and the rest", "sent")


def documented() -> Iterator[tuple[str, Span, str]]:
    """What the documentation says of each kind of response: its name, the scope, and the steps."""
    page = (Path(__file__).parents[2] / "docs/integrations/fastapi.md").read_text()
    table = page.partition('| | `scope="function"` | `scope="request"` |\n|---|---|---|\n')[2].partition("\n\n")[0]
    for line in table.splitlines():
        kind, function, request = (cell.strip() for cell in line.strip("|").split("|"))
        yield kind, "function", function
        yield kind, "request", request


PATHS = {
    "JSON": ("/json/1", "/plain/1"),
    "stream": ("/stream/1",),
    "background task": ("/background/1",),
    "the route raises": ("/refuses/1", "/fails/1"),
    "the stream raises": ("/broken/1",),
}


@pytest.mark.parametrize(
    ("path", "scope", "steps"),
    [(path, scope, steps) for kind, scope, steps in documented() for path in PATHS[kind]],
)
async def test_it_goes_as_documented(path: str, scope: Span, steps: str) -> None:
    assert await Story(scope).tell(path) == steps


def test_every_kind_of_response_is_documented() -> None:
    assert [kind for kind, _, _ in documented()] == [kind for kind in PATHS for _ in range(2)]
