"""Scenes 1 and 2: ten hosts run the same command in the same second, first bare and then as a singleton."""

import asyncio
from collections import Counter
from dataclasses import dataclass

from sample_apps.demo.claims import Claim
from sample_apps.django_reports.project import Project, end_of

HOSTS = 10
INVOICES = 12
PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Sending:
    """What came of the processes that sent invoices."""

    processes: int
    invoices: int
    letters: int
    sent_twice: int
    """Invoices that went out more than once."""
    ran: int
    """Processes that ended with 0."""
    busy: int
    """Processes that ended with 75."""
    others: dict[int, int]
    """How many processes ended with each other exit code."""


async def send(project: Project, *singleton: str) -> Sending:
    """Start the command ten times at once, behind these words of `manage.py`."""
    project.change("DELETE FROM django_reports_letter")
    project.change("DELETE FROM django_reports_invoice")
    project.add_invoices(INVOICES)
    processes = [await project.manage(*singleton, "send_invoices") for _ in range(HOSTS)]
    codes = Counter(await asyncio.gather(*(end_of(process, PATIENCE) for process in processes)))
    letters = project.rows("SELECT count(*) FROM django_reports_letter GROUP BY invoice_id")
    return Sending(
        processes=HOSTS,
        invoices=INVOICES,
        letters=sum(count for (count,) in letters),
        sent_twice=sum(count > 1 for (count,) in letters),
        ran=codes.pop(0, 0),
        busy=codes.pop(75, 0),
        others=dict(codes),
    )


def danger(seen: Sending) -> Claim:
    """Without a lease invoices are sent again and again."""
    return Claim(
        "without `singleton` invoices are sent more than once",
        seen.sent_twice > 0,
        f"{seen.letters} letters for {seen.invoices} invoices",
        "no two processes ran at the same moment: run it again on a machine that is less busy",
    )


def safety(seen: Sending) -> Claim:
    """As a singleton one process runs, and each invoice is sent once."""
    exact = seen.letters == seen.invoices and seen.sent_twice == 0
    return Claim(
        "as a singleton one process runs, the others exit with 75, and each invoice is sent once",
        exact and (seen.ran, seen.busy) == (1, seen.processes - 1),
        f"{seen.letters} letters for {seen.invoices} invoices, {seen.ran} ran, {seen.busy} were busy, {seen.others}",
        "choose a --store that all processes share, and look at the log of the processes",
    )
