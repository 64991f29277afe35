"""The sample `starlette_leader`: its board, and its workers on a real server."""

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
import pytest

from sample_apps.starlette_leader.board import Board
from sample_apps.workers import Workers
from tests.helpers.worlds import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

shared = pytest.mark.xdist_group("leader_sample")
"""Of what uses the same workers: one process starts them for all."""

WORKERS = 2

# Each connection that is new comes to any worker; a stream that does not end by itself would hold the server up.
OPTIONS = ("--timeout-keep-alive", "0", "--timeout-graceful-shutdown", "100")

PRICES = {"BREW": 41.0, "KITE": 128.0}


def terms(board: Board) -> dict[int, dict[str, Any]]:
    found: Any = board.seen()["terms"]
    return {term["fence"]: term for term in found}


def shares(board: Board) -> dict[str, dict[str, Any]]:
    found: Any = board.seen()["shares"]
    return {share["symbol"]: share for share in found}


def test_board_refuses_what_an_older_term_publishes(tmp_path: Path) -> None:
    board = Board(tmp_path / "board.db")
    assert board.publish(7, 100, PRICES)
    assert board.publish(7, 100, {"BREW": 42.0})
    assert board.publish(8, 200, {"BREW": 43.0})
    assert not board.publish(7, 100, {"BREW": 44.0})
    assert {symbol: share["price"] for symbol, share in shares(board).items()} == {"BREW": 43.0, "KITE": 128.0}
    assert [(term["fence"], term["worker"], term["refused"]) for term in terms(board).values()] == [
        (8, 200, 0),
        (7, 100, 1),
    ]


def test_board_refuses_a_late_purchase(tmp_path: Path) -> None:
    board = Board(tmp_path / "board.db")
    assert board.owned("BREW") is None
    board.publish(1, 100, PRICES)
    assert board.own("BREW", 1, 7)
    assert board.own("BREW", 2, 7)
    assert not board.own("BREW", 9, 6)
    assert not board.own("nothing", 1, 7)
    assert (board.owned("BREW"), board.owned("KITE")) == (2, 0)


@asynccontextmanager
async def client_of(server: Workers) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that makes a new connection for each request, once the server answers."""
    limits = httpx2.Limits(max_keepalive_connections=0)
    async with httpx2.AsyncClient(
        base_url=server.url, timeout=60, limits=limits, trust_env=False, verify=False
    ) as client:

        async def answers() -> bool:
            try:
                return (await client.get("/")).is_success
            except httpx2.TransportError:
                return False

        while not await answers():
            assert server.alive(), server.log
            await asyncio.sleep(0.05)
        yield client


@pytest.fixture(scope="module")
def server() -> Iterator[Workers]:
    """Workers that several tests use, and none of them ends."""
    with Workers("starlette_leader", WORKERS, "sqlite:///locks.db", {}, options=OPTIONS) as server:
        yield server


async def news(lines: AsyncIterator[str]) -> dict[str, Any]:
    """The next message of an event stream."""
    async for line in lines:
        if line.startswith("data: "):
            message: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return message
    raise EOFError("the stream ended")


async def now(client: httpx2.AsyncClient) -> dict[str, Any]:
    """What some worker says."""
    async with client.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return await news(response.aiter_lines())


@shared
async def test_every_worker_tells_of_one_leader_and_of_its_prices(server: Workers) -> None:
    said: dict[int, dict[str, Any]] = {}
    async with client_of(server) as client:
        while len(said) < WORKERS:
            message = await now(client)
            if message["terms"]:
                said[message["worker"]] = message
    assert len({message["term"]["fence"] for message in said.values()}) == 1
    assert {message["terms"][0]["fence"] for message in said.values()} == {message["term"]["fence"]}
    assert [worker for worker, message in said.items() if message["leads"]] == [message["terms"][0]["worker"]]
    assert len(message["shares"]) == 3


@shared
async def test_only_the_leader_asks_out_of_turn(server: Workers) -> None:
    async with client_of(server) as client:
        answers: dict[int, httpx2.Response] = {}
        while len(answers) < 2:
            answer = await client.post("/refresh")
            answers[answer.status_code] = answer
        newest = (await now(client))["terms"][0]
    assert answers[200].json() == {"worker": newest["worker"], "term": newest["fence"], "published": True}
    assert answers[503].json()["type"] == "urn:grelmicro:not-leader"
    assert int(answers[503].headers["retry-after"]) >= 1


@shared
async def test_purchases_on_all_workers_take_turns(server: Workers) -> None:
    async with client_of(server) as client:
        assert (await client.post("/shares/nothing/buy")).status_code == 404
        answers: list[httpx2.Response] = []
        while len({answer.json()["worker"] for answer in answers}) < 2:  # one that is quick may take all at once
            answers += await asyncio.gather(*(client.post("/shares/KITE/buy") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["owned"] for answer in answers) == list(range(1, len(answers) + 1))


async def test_streams_end_at_the_signal_and_so_does_the_server() -> None:
    with Workers("starlette_leader", WORKERS, "sqlite:///locks.db", {}, options=OPTIONS) as server:
        async with client_of(server) as client, AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(client.stream("GET", "/events")) for _ in range(12)]
            read = [stream.aiter_lines() for stream in streams]
            for lines in read:
                await news(lines)
            server.interrupt()
            async with asyncio.timeout(40):  # the server would let them take 100
                for lines in read:
                    async for _ in lines:
                        pass
                while server.alive():
                    await asyncio.sleep(0.05)
        assert "Application shutdown complete" in server.log
        assert "timeout graceful shutdown exceeded" not in server.log


def freeze(worker: int, *files: Path) -> None:
    """Stop a process, but not in the middle of a write, which would keep everybody else out of the file."""
    while True:
        os.kill(worker, signal.SIGSTOP)
        if all(map(can_be_written, files)):
            return
        os.kill(worker, signal.SIGCONT)


def can_be_written(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=1, isolation_level=None)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


async def test_frozen_leader_publishes_nothing_after_its_term() -> None:
    options = (*OPTIONS, "--timeout-worker-healthcheck", "100")
    with Workers("starlette_leader", WORKERS, "sqlite:///locks.db", {}, options=options) as server:
        board = Board(server.folder / "board.db")
        async with client_of(server) as client:
            await eventually(lambda: terms(board), "somebody publishes")
            ((old, term),) = terms(board).items()
            freeze(term["worker"], server.folder / "board.db", server.folder / "locks.db")
            try:
                await eventually(lambda: len(terms(board)) > 1, "another one publishes")
                last = terms(board)[old]["newest"]
            finally:
                os.kill(term["worker"], signal.SIGCONT)
            until = monotonic() + PATIENCE
            # It reads the record of the other one's term some time after it has seen the end of its own.
            while (message := await now(client))["worker"] != term["worker"] or message["term"]["fence"] == old:
                assert monotonic() < until, "the frozen worker does not answer, or takes itself for the leader"
            assert not message["leads"]
            assert terms(board)[old]["newest"] == last
            assert message["term"]["fence"] == max(terms(board)) > old
