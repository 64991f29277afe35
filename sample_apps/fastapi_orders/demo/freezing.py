"""Scene 3: a worker is frozen while it holds a lock, for longer than its lease, and then goes on."""

import asyncio
import os
import signal
from dataclasses import dataclass

import httpx2

from sample_apps.demo.claims import Claim
from sample_apps.fastapi_orders.demo.customers import new_connection, until
from sample_apps.fastapi_orders.shop import Shop

STOCK = 10

COUNT_SECONDS = 1.0
"""How long the counting takes: the worker is frozen meanwhile."""

TRIES = 3

LONGEST_FREEZE = 4.0
"""Seconds; the server replaces a worker that is silent for 5."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """What became of the frozen worker's late write."""

    fenced: bool
    old_fence: int
    new_fence: int
    late_write: str
    """`refused` or `written`."""
    answer: str
    """What its client was told: the kind of the refusal, or the status."""
    frozen_for: float
    """Seconds."""
    stock_after: int
    """One was sold of `STOCK` while the worker was frozen."""


async def freeze(url: str, shop: Shop, item_id: int, *, fenced: bool) -> Freeze:
    """Freeze the worker that counts `item_id`, sell one elsewhere, and let it go on.

    A worker that is frozen in the middle of a write to a file keeps everybody out of that file. Then nothing is sold,
    and it is tried again.
    """
    for _ in range(TRIES - 1):
        try:
            return await _freeze(url, shop, item_id, fenced=fenced)
        except (httpx2.HTTPError, TimeoutError):
            await asyncio.sleep(1)
    return await _freeze(url, shop, item_id, fenced=fenced)


async def _freeze(url: str, shop: Shop, item_id: int, *, fenced: bool) -> Freeze:
    shop.restock(STOCK, item_id)
    counting = asyncio.create_task(_post(url, f"/items/{item_id}/count", seconds=COUNT_SECONDS, fenced=fenced))
    try:
        query = "SELECT worker, fence FROM counts WHERE item_id = ?"
        worker, old_fence = await until(lambda: shop.row(query, item_id), 10, "the counting begins")
        clock = asyncio.get_running_loop().time
        frozen_at = clock()
        os.kill(worker, signal.SIGSTOP)
        try:
            sale = await asyncio.wait_for(_post(url, f"/items/{item_id}/buy"), LONGEST_FREEZE)
            sale.raise_for_status()
        finally:
            os.kill(worker, signal.SIGCONT)
        frozen_for = clock() - frozen_at
        answer = await counting
    finally:
        counting.cancel()
    ((late_write,),) = shop.rows("SELECT outcome FROM counts WHERE item_id = ?", item_id)
    return Freeze(
        fenced=fenced,
        old_fence=old_fence,
        new_fence=sale.json()["fence"],
        late_write=str(late_write),
        answer=_kind(answer),
        frozen_for=frozen_for,
        stock_after=shop.stock(item_id),
    )


def refusal(seen: Freeze) -> Claim:
    """The fence refuses the late write, and the holder learns that it lost."""
    held = seen.late_write == "refused" and seen.old_fence < seen.new_fence and seen.stock_after == STOCK - 1
    return Claim(
        "the fence refuses the late write of a frozen holder, which learns that it lost the lock",
        held and seen.answer == "lost",
        f"late write {seen.late_write}, its client was told {seen.answer!r}, stock {seen.stock_after}",
        "choose a --store that all workers share; if it is one, look at what Shop.end_count writes",
    )


def overwriting(seen: Freeze) -> Claim:
    """Without the fence the late write destroys what the new holder wrote."""
    return Claim(
        "without the fence the late write goes through",
        seen.late_write == "written" and seen.stock_after == STOCK,
        f"late write {seen.late_write}, stock {seen.stock_after}",
        "the frozen worker did not write after the new holder: run it again on a machine that is less busy",
    )


def _kind(response: httpx2.Response) -> str:
    if response.headers.get("content-type") == "application/problem+json":
        return str(response.json()["type"]).rpartition(":")[2]
    return f"status {response.status_code}"


async def _post(url: str, path: str, **parameters: float) -> httpx2.Response:
    """A request on a connection of its own: a kept one may belong to the frozen worker."""
    async with new_connection(url) as connection:
        return await connection.post(path, params=parameters)
