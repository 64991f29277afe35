"""A plain `yield` dependency may be entered in one thread and left in another: it holds its lock in between only."""

import asyncio
from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends

from grelmicro.coordination import Lock, ThreadLockHandle
from tests.integrations.asgi import client_of, is_free, new_app


async def test_its_lock_is_held_for_each_request_in_turn() -> None:
    app, micro = new_app()
    lock = Lock("cart", auto_renew=True, lease_duration=5)
    bounded = Lock("stock", lease_duration=60)
    inside: list[int] = []
    most = 0

    def cart() -> Iterator[ThreadLockHandle]:
        with lock.from_thread as held:
            yield held

    def stock() -> Iterator[ThreadLockHandle]:
        with bounded.from_thread.acquire(timeout=30) as held:
            yield held

    @app.get("/{number}")
    async def read(
        number: int,
        cart: Annotated[ThreadLockHandle, Depends(cart)],
        stock: Annotated[ThreadLockHandle, Depends(stock)],
    ) -> bool:
        nonlocal most
        inside.append(number)
        most = max(most, len(inside))
        await asyncio.sleep(0.01)
        inside.remove(number)
        return cart.valid and stock.valid

    @app.get("/failing/{number}")
    async def fail(number: int, cart: Annotated[ThreadLockHandle, Depends(cart)]) -> None:
        raise ZeroDivisionError

    async with client_of(app) as client:
        for _ in range(3):
            answers = await asyncio.gather(*(client.get(f"/{number}") for number in range(5)))
            assert [answer.text for answer in answers] == ["true"] * 5
            assert (await client.get("/failing/1")).status_code == 500
        assert most == 1
        assert await is_free(micro, "cart")
        assert await is_free(micro, "stock")
        assert not lock._held
