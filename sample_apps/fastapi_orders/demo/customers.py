"""Customers: many connections, spread over all workers, and what came of each request."""

import asyncio
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from sample_apps.fastapi_orders.shop import Receipt, Status

T = TypeVar("T")

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Shared and never used: otherwise each client makes one of its own, which takes longer than a request."""

SOLD_OUT = 410

TRIES = 40
"""Connections that are tried for each one that is kept: which worker gets a connection cannot be chosen."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one customer was told, and when the request was sent, on the clock of the receipts."""

    item_id: int
    worker: int
    """Who answered, as the connection belongs to that worker."""
    sent_at: float
    receipt: Receipt | None = None
    sold_out: bool = False
    error: str = ""


class Crowd:
    """Customers on kept connections, each to a known worker; a connection serves one customer after the other."""

    def __init__(self, connections: list[tuple[httpx2.AsyncClient, int]]) -> None:
        self._connections = connections

    async def buy(self, path: str, item_ids: list[int]) -> list[Answer]:
        """One customer for each entry of `item_ids`, all at once as far as there are connections."""
        waiting = deque(item_ids)
        answers: list[Answer] = []

        async def serve(connection: httpx2.AsyncClient, worker: int) -> None:
            while waiting:
                answers.append(await _buy(connection, worker, path, waiting.popleft()))

        await asyncio.gather(*(serve(connection, worker) for connection, worker in self._connections))
        return answers


@asynccontextmanager
async def crowd(url: str, workers: int, per_worker: int) -> AsyncIterator[Crowd]:
    """Connections to `url`, as many to each worker as can be had."""
    async with AsyncExitStack() as stack:
        kept: list[tuple[httpx2.AsyncClient, int]] = []
        of_worker: Counter[int] = Counter()
        for _ in range(TRIES * workers * per_worker):
            if len(kept) == workers * per_worker:
                break
            connection = new_connection(url)
            worker = Status.model_validate((await connection.get("/status")).json()).worker
            if of_worker[worker] < per_worker:
                of_worker[worker] += 1
                stack.push_async_callback(connection.aclose)
                kept.append((connection, worker))
            else:
                await connection.aclose()
        yield Crowd(kept)


def new_connection(url: str) -> httpx2.AsyncClient:
    """A client with one connection of its own, which no worker has yet."""
    return httpx2.AsyncClient(
        base_url=url, timeout=45, limits=httpx2.Limits(max_connections=1), verify=NO_TLS, trust_env=False
    )


async def _buy(connection: httpx2.AsyncClient, worker: int, path: str, item_id: int) -> Answer:
    sent_at = time.monotonic()
    try:
        response = await connection.post(path.format(item_id=item_id))
    except httpx2.HTTPError as error:
        return Answer(item_id, worker, sent_at, error=type(error).__name__)
    if response.status_code == SOLD_OUT:
        return Answer(item_id, worker, sent_at, sold_out=True)
    if response.is_error:
        return Answer(item_id, worker, sent_at, error=f"status {response.status_code}")
    return Answer(item_id, worker, sent_at, receipt=Receipt.model_validate(response.json()))


async def until(look: Callable[[], T | None], patience: float, what: str) -> T:
    """Look again and again until there is something to see.

    Raises:
        TimeoutError: there was nothing for `patience` seconds.
    """
    ends_at = time.monotonic() + patience
    while (seen := look()) is None:
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not within {patience:g} s: {what}")
        await asyncio.sleep(0.01)
    return seen
