"""Scene 4: many people sign the same report at once, on a web server of several processes."""

import asyncio
import ssl
from collections import Counter
from dataclasses import dataclass

import httpx2

from sample_apps.demo.claims import Claim
from sample_apps.django_reports.project import PATIENCE, Project, ProjectError

CONNECTIONS = 16
SIGNED = 302
DAY = "2026-12-01"

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Shared and never used: otherwise each client makes one of its own, which takes longer than a request."""


@dataclass(frozen=True, slots=True)
class Signing:
    """What came of the signatures."""

    requests: int
    signed: int
    """Requests that were answered as signed."""
    signatures: int
    """Signatures in the report at the end."""
    others: dict[str, int]
    """Other answers."""


async def sign(url: str, project: Project, path: str, requests: int) -> Signing:
    """Send all requests for one report, over a few connections; `path` has a field `{pk}`."""
    project.change("DELETE FROM django_reports_report WHERE day = ?", DAY)
    project.change(
        "INSERT INTO django_reports_report (day, invoices, cents, worker, fence, signatures) VALUES (?, 0, 0, 0, 0, 0)",
        DAY,
    )
    ((pk,),) = project.rows("SELECT id FROM django_reports_report WHERE day = ?", DAY)
    limits = httpx2.Limits(max_connections=CONNECTIONS)
    async with httpx2.AsyncClient(
        base_url=url, timeout=PATIENCE, limits=limits, verify=NO_TLS, trust_env=False
    ) as client:
        await _page(client)
        headers = {"X-CSRFToken": client.cookies["csrftoken"]}

        async def one() -> str:
            try:
                answer = await client.post(path.format(pk=pk), headers=headers)
            except httpx2.HTTPError as error:
                return type(error).__name__
            return str(answer.status_code)

        answers = Counter(await asyncio.gather(*(one() for _ in range(requests))))
    ((signatures,),) = project.rows("SELECT signatures FROM django_reports_report WHERE id = ?", pk)
    return Signing(requests, answers.pop(str(SIGNED), 0), signatures, dict(answers))


async def _page(client: httpx2.AsyncClient) -> None:
    """Get the page, which a server that is starting does not serve yet."""
    for _ in range(round(PATIENCE / 0.1)):
        try:
            (await client.get("/")).raise_for_status()
            return
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
    raise ProjectError("the web server does not answer")


def danger(seen: Signing) -> Claim:
    """Without the lock signatures are lost."""
    return Claim(
        "without `@locked` signatures are lost",
        seen.signatures < seen.signed,
        f"{seen.signatures} signatures of {seen.signed} are in the report",
        "no two people signed at the same moment: run it again with more --requests",
    )


def safety(seen: Signing) -> Claim:
    """Under the lock none is lost."""
    return Claim(
        "under `@locked` no signature is lost, and every request is answered",
        seen.requests == seen.signed == seen.signatures,
        f"{seen.signatures} signatures of {seen.signed} are in the report, other answers: {seen.others}",
        "choose a --store that all processes share, and look at the log of the processes",
    )
