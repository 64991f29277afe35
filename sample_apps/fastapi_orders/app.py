"""A shop on several workers: nothing is sold twice, and one worker of all settles the accounts.

uvicorn sample_apps.fastapi_orders.app:app --workers 4
"""

import os
import time
from asyncio import sleep, to_thread
from typing import Annotated

from fastapi import FastAPI, HTTPException

from grelmicro import Grelmicro
from grelmicro.coordination import Coordination, LeaderRecord, LockHandle, MultiLockHandle
from grelmicro.task import Tasks
from grelmicro_fastapi import FenceDep, LeaderDep, LockDep, LocksDep, TaskLockDep, install
from grelmicro_starlette import readiness
from sample_apps.fastapi_orders.shop import Move, Receipt, Report, Shop, Status

shop = Shop(os.environ.get("ORDERS", "orders.db"))  # the application's own data, in a file of its own
tasks = Tasks()
micro = Grelmicro(uses=[Coordination.from_url(os.environ.get("STORE", "sqlite:///locks.db")), tasks])
leader = micro.coordination.leaderelection("settlement")
tasks.add_task(leader)

app = FastAPI(title="Orders")
install(app, micro)  # opens micro with the app, and answers 409 and 503 where it has to
app.add_api_route("/ready", readiness(micro, leaders=[leader]))  # for what sends requests to this worker, or not

ItemLock = Annotated[LockHandle, LockDep("item:{item_id}", timeout=30)]
BothLocks = Annotated[MultiLockHandle, LocksDep("item:{move.source}", "item:{move.target}", timeout=30)]


@app.post("/items/{item_id}/buy")
async def buy(item_id: int, held: ItemLock) -> Receipt:
    """Sell one: those who want the same item take turns, whichever worker serves them."""
    return await sell(item_id, held.fencing_token)


@app.post("/unsafe/items/{item_id}/buy")
async def buy_unsafe(item_id: int) -> Receipt:
    """Sell one without the lock: what was read may be out of date when it is written."""
    return await sell(item_id, None)


async def sell(item_id: int, fence: int | None) -> Receipt:
    """Read the stock, take the payment, write the stock."""
    began = time.monotonic()
    stock = await to_thread(shop.stock, item_id)
    if stock < 1:
        raise HTTPException(410, "sold out")
    await sleep(0.02)  # the payment
    if not await to_thread(shop.sell, item_id, stock - 1, fence):
        raise HTTPException(503, "somebody sold it under a newer lock")
    return Receipt(item_id=item_id, fence=fence, worker=os.getpid(), began=began, ended=time.monotonic())


@app.post("/items/{item_id}/count")
def count(
    item_id: int, fence: Annotated[int, FenceDep("item:{item_id}", timeout=30)], seconds: float = 1, fenced: bool = True
) -> int:
    """Count by hand. No thread can be cancelled: if the lock is lost meanwhile, the fence refuses what is written."""
    counted = shop.begin_count(item_id, fence)
    time.sleep(seconds)
    shop.end_count(item_id, counted, fence, fenced=fenced)
    return counted


@app.post("/moves")
async def move_stock(move: Move, held: BothLocks) -> Move:
    """Sell pieces of one item as another from now on: moves in opposite directions never wait for each other."""
    source, target = held.handles
    if not await to_thread(shop.move, move, source.fencing_token, target.fencing_token):
        raise HTTPException(410, "there is too little to move")
    return move


@tasks.every(seconds=float(os.environ.get("SETTLE_EVERY", "5")), leader=leader)
async def settle() -> None:
    """Settle what was sold since the last time: on one worker, and should that one die, on another."""
    await to_thread(shop.settle, leader.guard().fence)


@app.post("/settlements")
async def settle_now(term: Annotated[LeaderRecord, LeaderDep(leader)]) -> Status:
    """Settle out of turn, on the worker that settles; 503 on the others."""
    await to_thread(shop.settle, term.fence)
    return await status()


@app.post("/reports", dependencies=[TaskLockDep("report", min_hold_duration=60)])
async def report() -> Report:
    """Report what was sold, at most once a minute, whoever asks which worker; 409 in between."""
    return await to_thread(shop.report)


@app.get("/status")
async def status() -> Status:
    """Who answers, and whether it settles."""
    return Status(worker=os.getpid(), leads=leader.is_leader())
