"""Scenes 1 and 2: the same customers, first without the lock and then under it."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

from sample_apps.demo.claims import Claim, Spread
from sample_apps.fastapi_orders.demo.customers import Answer, Crowd
from sample_apps.fastapi_orders.shop import Receipt, Shop

ITEMS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Selling:
    """What came of a rush on the shop."""

    customers: int
    stock: int
    sold: int
    """Sales in the shop's data."""
    promised: int
    """Customers who were told that they got one."""
    sold_out: int
    errors: int
    first_error: str
    served_per_worker: list[int]
    """Customers that each worker answered."""
    items_at_once: int
    """The most items that were being sold at the same time."""
    fences_rise: bool
    fence_gaps: int
    hand_over: Spread
    """From the end of one sale to the begin of the next of that item, where somebody waited."""
    wait: Spread
    """From the sending of a request to the begin of its sale."""


async def rush(crowd: Crowd, shop: Shop, path: str, customers: int, stock_per_item: int) -> Selling:
    """Fill the shelves, and let all customers in at once."""
    shop.restock(stock_per_item, *ITEMS)
    answers = await crowd.buy(path, [ITEMS[number % len(ITEMS)] for number in range(customers)])
    (sold,) = shop.row("SELECT count(*) FROM sales") or (0,)
    return summary(answers, stock=stock_per_item * len(ITEMS), sold=sold)


def summary(answers: list[Answer], *, stock: int, sold: int) -> Selling:
    """The figures of what the customers were told."""
    receipts = [answer.receipt for answer in answers if answer.receipt is not None]
    errors = [answer.error for answer in answers if answer.error]
    steps = [step for each in _by_item(receipts).values() for step in _fence_steps(each)]
    return Selling(
        customers=len(answers),
        stock=stock,
        sold=sold,
        promised=len(receipts),
        sold_out=sum(answer.sold_out for answer in answers),
        errors=len(errors),
        first_error=next(iter(errors), ""),
        served_per_worker=sorted(Counter(answer.worker for answer in answers).values(), reverse=True),
        items_at_once=_most_at_once(receipts),
        fences_rise=all(step > 0 for step in steps),
        fence_gaps=sum(step != 1 for step in steps),
        hand_over=Spread.of(_hand_overs(answers)),
        wait=Spread.of([answer.receipt.began - answer.sent_at for answer in answers if answer.receipt is not None]),
    )


def danger(seen: Selling) -> Claim:
    """Without the lock the shop sells what it does not have."""
    return Claim(
        "without the lock the shop is oversold",
        seen.sold > seen.stock,
        f"sold {seen.sold} of {seen.stock}",
        "no two customers came at the same moment: run it again with more --requests",
    )


def safety(seen: Selling, workers: int) -> Claim:
    """Under the lock every item is sold exactly as often as it was there."""
    exact = seen.sold == seen.promised == seen.stock
    fair = seen.errors == 0 and seen.sold_out == seen.customers - seen.stock
    spread = seen.items_at_once > 1 and len(seen.served_per_worker) == workers
    found = (
        f"sold {seen.sold} and promised {seen.promised} of {seen.stock}, {seen.sold_out} told sold out, "
        f"{seen.errors} errors {seen.first_error}, at most {seen.items_at_once} items at once, by "
        f"{len(seen.served_per_worker)} of {workers} workers, fences {'rise' if seen.fences_rise else 'DO NOT RISE'}"
    )
    return Claim(
        "under LockDep exactly the stock is sold, items do not wait for each other, and fences rise",
        exact and fair and spread and seen.fences_rise,
        found,
        "choose a --store that all workers share" if not exact else "run it again on a machine that is less busy",
    )


def _by_item(receipts: list[Receipt]) -> dict[int, list[Receipt]]:
    found: defaultdict[int, list[Receipt]] = defaultdict(list)
    for receipt in sorted(receipts, key=lambda receipt: receipt.began):
        found[receipt.item_id].append(receipt)
    return found


def _fence_steps(receipts: list[Receipt]) -> list[int]:
    return [(later.fence or 0) - (earlier.fence or 0) for earlier, later in pairwise(receipts)]


def _hand_overs(answers: list[Answer]) -> list[float]:
    sent_at = {answer.receipt.began: answer.sent_at for answer in answers if answer.receipt is not None}
    receipts = [answer.receipt for answer in answers if answer.receipt is not None]
    return [
        later.began - earlier.ended
        for each in _by_item(receipts).values()
        for earlier, later in pairwise(each)
        if sent_at[later.began] < earlier.ended
    ]


def _most_at_once(receipts: list[Receipt]) -> int:
    """The most items of which a sale was going on at the same moment."""
    moments = [(receipt.began, 1, receipt.item_id) for receipt in receipts]
    moments += [(receipt.ended, -1, receipt.item_id) for receipt in receipts]
    going_on: Counter[int] = Counter()
    most = 0
    for _, change, item_id in sorted(moments):
        going_on[item_id] += change
        most = max(most, sum(count > 0 for count in going_on.values()))
    return most
