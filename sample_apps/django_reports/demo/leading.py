"""Scene 5: a daemon that has a standby; its leader is killed, and the next one is stopped."""

import signal
import time
from asyncio.subprocess import Process
from dataclasses import dataclass
from itertools import pairwise

from sample_apps.demo.claims import Claim
from sample_apps.django_reports.project import PATIENCE, Project, end_of, until

LEASE = 2.0
"""Seconds that a leader has without renewing."""
SETTINGS = {
    "GREL_LEADERELECTION_PUBLISH_RATES_LEASE_DURATION": f"{LEASE:g}",
    "GREL_LEADERELECTION_PUBLISH_RATES_RENEW_DEADLINE": "1.5",
    "GREL_LEADERELECTION_PUBLISH_RATES_RETRY_INTERVAL": "0.4",
    "GREL_LEADERELECTION_PUBLISH_RATES_BACKEND_TIMEOUT": "1.5",
}
START = 3.0
"""Seconds that the successor's command may take to start."""
RATES_SEEN = 5
"""Rates of each leader that are waited for."""


@dataclass(frozen=True, slots=True)
class Succession:
    """The end of one leader and the begin of the next one."""

    by: str
    """The signal."""
    stopped: int
    """The process that published."""
    successor: int
    after: float
    """Seconds from the signal to the successor's first rate, the start of its command included."""
    allowed: float
    """Seconds that it may take."""
    rates: int
    overlaps: int
    """How often a process published again after another one had."""


async def succeed(project: Project, number: signal.Signals, allowed: float, leader: Process) -> Succession:
    """Stop the leader with a signal once it has published a few rates, and wait for its standby's."""
    stopped = await published(project)
    stopped_at = time.monotonic()
    leader.send_signal(number)
    found = "SELECT worker FROM django_reports_rate WHERE worker != ? AND id > ? LIMIT 1"
    (last,) = project.rows("SELECT max(id) FROM django_reports_rate")[0]
    ((successor,),) = await until(lambda: project.rows(found, stopped, last) or None, PATIENCE, "the standby publishes")
    after = time.monotonic() - stopped_at
    await end_of(leader, PATIENCE)
    await published(project, other_than=stopped)
    workers = [worker for (worker,) in project.rows("SELECT worker FROM django_reports_rate ORDER BY id")]
    changes = sum(earlier != later for earlier, later in pairwise(workers))
    overlaps = changes + 1 - len(set(workers))
    return Succession(number.name, stopped, successor, after, allowed, len(workers), overlaps)


def takeover(seen: Succession, how: str) -> Claim:
    """The standby's command runs soon, and never two at once."""
    return Claim(
        f"when the leading daemon is {how}, its standby's runs within {seen.allowed:g} s, and never two at once",
        seen.after <= seen.allowed and seen.overlaps == 0 and seen.stopped != seen.successor,
        f"after {seen.after:.2f} s, {seen.overlaps} overlaps in {seen.rates} rates",
        "run it again on a machine that is less busy",
    )


async def published(project: Project, *, other_than: int | None = None) -> int:
    """Wait for a few rates of one process, not of `other_than`; which process it is."""

    def look() -> int | None:
        latest = project.rows("SELECT worker FROM django_reports_rate ORDER BY id DESC LIMIT ?", RATES_SEEN)
        workers = {worker for (worker,) in latest}
        return workers.pop() if len(latest) == RATES_SEEN and len(workers) == 1 and other_than not in workers else None

    return await until(look, PATIENCE, "rates are published")
