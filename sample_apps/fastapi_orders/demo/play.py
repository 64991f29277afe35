"""The whole demonstration, scene by scene."""

import asyncio
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from sample_apps.demo.claims import Claim
from sample_apps.demo.screen import Screen
from sample_apps.fastapi_orders.demo.customers import crowd, new_connection
from sample_apps.fastapi_orders.demo.freezing import Freeze, freeze, overwriting, refusal
from sample_apps.fastapi_orders.demo.leading import Succession, succeed, takeover
from sample_apps.fastapi_orders.demo.selling import ITEMS, Selling, danger, rush, safety
from sample_apps.fastapi_orders.shop import Shop
from sample_apps.workers import Workers

LEASE = 2.0
"""Seconds that the settlement's leader has without renewing."""

SETTINGS = {
    "GREL_LOCK_ITEM_LEASE_DURATION": "1.5",
    "GREL_LEADERELECTION_SETTLEMENT_LEASE_DURATION": str(LEASE),
    "GREL_LEADERELECTION_SETTLEMENT_RENEW_DEADLINE": "1.5",
    "GREL_LEADERELECTION_SETTLEMENT_RETRY_INTERVAL": "0.4",
    "GREL_LEADERELECTION_SETTLEMENT_BACKEND_TIMEOUT": "1.5",
    "SETTLE_EVERY": "0.2",
}
"""The workers' environment: short leases, so that nobody waits long for what happens when one ends."""

START_LIMIT = 30.0
"""Seconds within which all workers must answer."""

MOST_PER_WORKER = 16
"""Connections to one worker."""

FROZEN_ITEMS = (11, 12)


class NotStartedError(Exception):
    """The workers do not answer."""


class Demo:
    """One run of the demonstration.

    Args:
        workers: the running server.
        shop: its data.
        customers: how many come in scenes 1 and 2.
        screen: where it is told.
    """

    def __init__(self, workers: Workers, shop: Shop, customers: int, screen: Screen) -> None:
        self._workers = workers
        self._shop = shop
        self._customers = customers
        self._screen = screen
        self.claims: list[Claim] = []
        self.figures: dict[str, Any] = {}

    async def play(self) -> None:
        """All scenes."""
        with self._screen.busy("the workers start"):
            await self._started()
        await self._sell()
        await self._freeze(FROZEN_ITEMS[0], fenced=True)
        await self._freeze(FROZEN_ITEMS[1], fenced=False)
        await self._succeed(signal.SIGKILL, "killed", LEASE + 1)
        await self._succeed(signal.SIGTERM, "stopped politely", 1.0)

    async def _started(self) -> None:
        ends_at = time.monotonic() + START_LIMIT
        answered: set[int] = set()
        while len(answered) < self._workers.count:
            if not self._workers.alive() or time.monotonic() > ends_at:
                raise NotStartedError(f"{len(answered)} of {self._workers.count} workers answer")
            try:
                async with new_connection(self._workers.url) as connection:
                    answered.add((await connection.get("/status")).json()["worker"])
            except httpx2.TransportError:
                await asyncio.sleep(0.05)

    async def _sell(self) -> None:
        stock = max(self._customers // (4 * len(ITEMS)), 1)
        per_worker = max(min(self._customers // self._workers.count, MOST_PER_WORKER), 1)
        async with crowd(self._workers.url, self._workers.count, per_worker) as customers:
            with self._screen.busy("customers come, and there is no lock"):
                unsafe = await rush(customers, self._shop, "/unsafe/items/{item_id}/buy", self._customers, stock)
            self._tell_danger(unsafe, stock)
            with self._screen.busy("customers come, and take turns"):
                safe = await rush(customers, self._shop, "/items/{item_id}/buy", self._customers, stock)
            self._tell_safety(safe)

    async def _freeze(self, item_id: int, *, fenced: bool) -> None:
        try:
            with self._screen.busy("a worker is frozen"):
                seen = await freeze(self._workers.url, self._shop, item_id, fenced=fenced)
        except (TimeoutError, httpx2.HTTPError) as error:
            self._missed("3  a worker is frozen while it holds a lock", error)
        else:
            self._tell_freeze(seen)

    async def _succeed(self, number: signal.Signals, how: str, allowed: float) -> None:
        try:
            with self._screen.busy(f"the settling worker is {how}"):
                seen = await succeed(self._shop, number, allowed)
        except TimeoutError as error:
            self._missed(f"4  the settling worker is {how}", error)
        else:
            self._tell_succession(seen, how)

    def _tell_danger(self, seen: Selling, stock: int) -> None:
        claim = self._claim("without_lock", danger(seen), seen)
        self._screen.told(
            f"1  {seen.customers} customers, {len(ITEMS)} items x {stock} in stock, NO lock",
            f"sold {seen.sold} of {seen.stock}",
            f"OVERSOLD by {seen.sold - seen.stock}" if claim.held else "not oversold",
            good=claim.held,
        )

    def _tell_safety(self, seen: Selling) -> None:
        claim = self._claim("with_lock", safety(seen, self._workers.count), seen)
        self._screen.told(
            f"2  the same {seen.customers}, each under {part_of('LockDep(')}",
            f"sold {seen.sold} of {seen.stock}",
            f'{seen.sold_out} told "sold out", {seen.errors} errors',
            good=claim.held,
        )
        self._screen.line(
            f"     hand-over {seen.hand_over}, wait {seen.wait}, up to {seen.items_at_once} items at the same moment",
            "dim",
        )
        shares = "/".join(map(str, seen.served_per_worker))
        fences = "rise" if seen.fences_rise else "DO NOT RISE"
        gaps = "without a gap" if seen.fence_gaps == 0 else f"with {seen.fence_gaps} gaps"
        self._screen.line(f"     the workers served {shares}; on each item the fences {fences} {gaps}", "dim")

    def _tell_freeze(self, seen: Freeze) -> None:
        if seen.fenced:
            claim = self._claim("frozen_fenced", refusal(seen), seen)
            self._screen.told(
                f"3  a worker is frozen for {seen.frozen_for:.1f} s while it holds a lock",
                f"late write: fence {_short(seen.old_fence)} < {_short(seen.new_fence)}",
                f"{seen.late_write.upper()}, its client was told {seen.answer!r}",
                good=claim.held,
            )
        else:
            claim = self._claim("frozen_unfenced", overwriting(seen), seen)
            self._screen.told(
                "     the same with the fence check off",
                "late write",
                "OVERWROTE the new holder's" if claim.held else f"{seen.late_write}, stock {seen.stock_after}",
                good=claim.held,
            )

    def _tell_succession(self, seen: Succession, how: str) -> None:
        claim = self._claim(f"leader_{seen.by.lower()}", takeover(seen, how), seen)
        first = seen.by == "SIGKILL"
        self._screen.told(
            f"{'4  the settling worker' if first else '     the next one'} ({seen.stopped}) gets {seen.by}",
            f"{seen.successor} leads after {seen.after:.2f} s (allowed {seen.allowed:g})",
            f"{seen.runs} settlements, two at once: {seen.overlaps or 'never'}",
            good=claim.held,
        )

    def _missed(self, title: str, error: Exception) -> None:
        """A scene that did not come to its end."""
        found = str(error) or type(error).__name__
        self.claims.append(Claim(title[3:], False, found, "choose a --store that all workers share"))
        self._screen.told(title, found, "NOT SEEN", good=False)

    def _claim(self, key: str, claim: Claim, seen: Selling | Freeze | Succession) -> Claim:
        self.claims.append(claim)
        self.figures[key] = asdict(seen)
        return claim


APP_FILE = Path(__file__).resolve().parents[1] / "app.py"


def place_of(words: str) -> str:
    """Where the application's source has these words first: file and line."""
    for number, line in enumerate(APP_FILE.read_text(encoding="utf-8").splitlines(), 1):
        if words in line:
            return f"{APP_FILE.name}:{number}"
    raise LookupError(f"{APP_FILE} has no {words}")


def part_of(words: str) -> str:
    """The call that begins with these words in the application's source, with its first argument."""
    source = APP_FILE.read_text(encoding="utf-8")
    call = source[source.index(words) :].splitlines()[0]
    return f"{call.partition(',')[0].rstrip(')]')})"


def length() -> int:
    """Lines of the application that are not empty."""
    return sum(bool(line.strip()) for line in APP_FILE.read_text(encoding="utf-8").splitlines())


def _short(fence: int) -> str:
    """The last digits of a fence: where it begins depends on the store."""
    digits = str(fence)
    return digits if len(digits) <= 6 else f"..{digits[-4:]}"
