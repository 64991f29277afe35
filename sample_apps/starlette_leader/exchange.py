"""Stands for an exchange, which lets us have one connection."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator

SHARES = {"BREW": (41, 17), "KITE": (128, 29), "MOSS": (7.5, 11)}
"""The middle of each price, and how slowly it moves."""


def quotes() -> dict[str, float]:
    """What the shares cost now, whoever asks."""
    now = time.time()
    return {symbol: round(price * (1 + math.sin(now / pace) / 9), 2) for symbol, (price, pace) in SHARES.items()}


async def news() -> AsyncGenerator[dict[str, float], None]:
    """The connection: new prices twice a second."""
    while True:
        yield quotes()
        await asyncio.sleep(0.5)
