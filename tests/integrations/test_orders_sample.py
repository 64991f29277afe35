"""The sample `fastapi_orders`: what its routes do beside what the demonstration shows."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from sample_apps.fastapi_orders.shop import Move, Shop
from sample_apps.workers import Workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.xdist_group("orders_sample"),  # one process starts the workers for all of them
]

WORKERS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Workers]:
    """Workers of the shop. A connection is for one request, so that the next one comes to any worker."""
    options = ("--timeout-keep-alive", "0")
    settings = {"SETTLE_EVERY": "3600", "ORDERS": "orders.db"}
    with Workers("fastapi_orders", WORKERS, "sqlite:///locks.db", settings, options=options) as server:
        asyncio.run(all_answer(server))
        yield server


@pytest.fixture
def shop(server: Workers) -> Iterator[Shop]:
    shop = Shop(server.folder / "orders.db")
    yield shop
    shop.close()


@asynccontextmanager
async def client_of(server: Workers) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_keepalive_connections=0)
    async with httpx2.AsyncClient(
        base_url=server.url, timeout=60, limits=limits, trust_env=False, verify=False
    ) as client:
        yield client


async def all_answer(server: Workers) -> None:
    """Wait until each worker has answered."""
    ready: set[int] = set()
    async with client_of(server) as client:
        while len(ready) < WORKERS:
            try:
                answers = await asyncio.gather(*(client.get("/status") for _ in range(4 * WORKERS)))
                ready.update(answer.json()["worker"] for answer in answers)
            except httpx2.TransportError:
                assert server.alive(), server.log
                await asyncio.sleep(0.05)


async def test_moves_in_opposite_directions_and_sales_lose_nothing(server: Workers, shop: Shop) -> None:
    async with client_of(server) as client:
        shop.restock(20, 1, 2)
        there, back = {"source": 1, "target": 2, "pieces": 1}, {"source": 2, "target": 1, "pieces": 1}
        requests = [client.post("/moves", json=move) for move in (there, back) * 6]
        requests += [client.post(f"/items/{item}/buy") for item in (1, 2) * 3]
        answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200] * 18
    assert (shop.stock(1), shop.stock(2)) == (17, 17)


async def test_nothing_is_moved_that_is_not_there(server: Workers, shop: Shop) -> None:
    async with client_of(server) as client:
        shop.restock(2, 1, 2)
        for source, target, pieces in ((1, 2, 3), (1, 99, 1), (1, 1, 1)):
            move = {"source": source, "target": target, "pieces": pieces}
            assert (await client.post("/moves", json=move)).status_code == 410
        assert (await client.post("/moves", json={"source": 1, "target": 2, "pieces": 0})).status_code == 422
    assert (shop.stock(1), shop.stock(2)) == (2, 2)


async def test_only_the_settling_worker_settles_out_of_turn(server: Workers, shop: Shop) -> None:
    async with client_of(server) as client:
        shop.restock(1, 3)
        assert (await client.post("/items/3/buy")).status_code == 200
        statuses: set[int] = set()
        while statuses != {200, 503}:
            answer = await client.post("/settlements")
            statuses.add(answer.status_code)
            if answer.is_success:
                assert answer.json()["leads"]
            else:
                assert answer.json()["type"] == "urn:grelmicro:not-leader"
    assert shop.rows("SELECT settlement IS NULL FROM sales WHERE item_id = 3") == [(0,)]


async def test_report_is_made_once_a_minute_by_all_workers_together(server: Workers) -> None:
    async with client_of(server) as client:
        answers = await asyncio.gather(*(client.post("/reports") for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    refusals = [answer for answer in answers if answer.status_code == 409]
    assert {refusal.json()["type"] for refusal in refusals} == {"urn:grelmicro:busy"}


async def test_every_worker_says_that_it_is_ready(server: Workers) -> None:
    async with client_of(server) as client:
        answers: list[httpx2.Response] = []

        async def is_ready() -> bool:
            answers[:] = await asyncio.gather(*(client.get("/ready") for _ in range(16)))
            return all(answer.is_success for answer in answers)

        while not await is_ready():
            await asyncio.sleep(0.05)
        assert {answer.json()["status"] for answer in answers} == {"ready"}
        assert list(answers[0].json()["elections"]) == ["settlement"]


def test_a_late_move_changes_neither_item(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "orders.db")
    shop.restock(5, 1, 2)
    assert shop.sell(2, 4, 10)
    assert not shop.move(Move(source=1, target=2, pieces=1), 11, 9)
    assert (shop.stock(1), shop.stock(2)) == (5, 4)
    assert shop.move(Move(source=1, target=2, pieces=2), 11, 11)
    assert (shop.stock(1), shop.stock(2)) == (3, 6)
    shop.close()
